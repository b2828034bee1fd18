"""LOCAL_KERNELS: a folder of the user's in place of a Hub repository."""

from __future__ import annotations

import logging
import sys

import kernels
import pytest

from tpu_kernels import hub, staging
from tpu_kernels.specs import read_spec

from .conftest import REPO
from .small_kernel import write_kernel


@pytest.fixture
def spec(tmp_path, fresh):
    return read_spec(write_kernel(tmp_path / "specs", source=f'hub = "{REPO}"\nversion = 1', value="packaged"))


@pytest.fixture
def root(tmp_path):
    """A repository with a build in it."""
    staging.stage(write_kernel(tmp_path / "mine", value="mine"), tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize("within", ["", "build", "build/torch-tpu"])
def test_repository_or_build_folder_or_build(spec, root, monkeypatch, within):
    monkeypatch.setenv("LOCAL_KERNELS", f"acme/other=/nowhere:{REPO}={root / within}")
    loaded = hub.load_kernel(spec)
    assert (loaded.source, loaded.module.forward(), loaded.why) == ("local", "mine", "LOCAL_KERNELS")
    assert loaded.location == str((root / "build" / "torch-tpu").resolve()) and loaded.revision == loaded.module.__name__
    (known,) = kernels.get_loaded_kernels()
    assert known.module is loaded.module


def test_home_and_symbolic_links(spec, root, monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}=~/link")
    assert hub.load_kernel(spec).location == str((root / "build" / "torch-tpu").resolve())


def test_files_being_edited_are_loaded(spec, root, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={root}")
    (root / "build" / "torch-tpu" / "parts.py").write_text("def value():\n    return 'edited'\n")
    assert hub.load_kernel(spec).module.forward() == "edited"


def test_a_failed_edit_can_be_mended_in_the_same_process(spec, root, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={root}")
    body = root / "build" / "torch-tpu" / "__init__.py"
    good = body.read_text()
    for bad in ("1 / 0\n", "from . import parts\n"):  # raises; has no forward
        body.write_text(bad)
        with pytest.raises(hub.KernelLoadError):
            hub.load_kernel(spec)
    body.write_text(good)
    assert hub.load_kernel(spec).module.forward() == "mine"


def test_kernels_without_a_repository_are_not_affected(tmp_path, fresh, root, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={root}")
    assert hub.load_kernel(read_spec(write_kernel(tmp_path / "specs"))).source == "packaged"


@pytest.mark.parametrize("setting", ["", ":", "acme/k", f"{REPO}=", "=/folder", f"{REPO}=/folder:", "/folder"])
@pytest.mark.parametrize("on_the_hub", [True, False])
def test_malformed(tmp_path, fresh, spec, monkeypatch, setting, on_the_hub):
    monkeypatch.setenv("LOCAL_KERNELS", setting)
    wanted = spec if on_the_hub else read_spec(write_kernel(tmp_path / "packaged"))
    with pytest.raises(hub.KernelLoadError) as caught:
        hub.load_kernel(wanted)
    message = str(caught.value)
    assert f"LOCAL_KERNELS={setting!r} is malformed" in message and "org/name=/folder" in message and "unset" in message


def test_no_such_folder(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={tmp_path / 'nowhere'}")
    with pytest.raises(hub.KernelLoadError, match=r"maps acme/small-kernel to .*nowhere, where there is no build.*staging"):
        hub.load_kernel(spec)


def test_unreadable_metadata(spec, root, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={root}")
    (root / "build" / "torch-tpu" / "metadata.json").write_text("{")
    with pytest.raises(hub.KernelLoadError, match=r"LOCAL_KERNELS folder .*root"):
        hub.load_kernel(spec)


def test_nothing_is_said_but_which_source(spec, root, monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={root}")
    caplog.set_level(logging.INFO, "tpu_kernels")
    hub.load_kernel(spec)
    assert ["local (LOCAL_KERNELS)" in record.message for record in caplog.records] == [True]


def test_same_kernel_from_two_places(tmp_path, fresh, root, monkeypatch, spec):
    """Both copies have one id; each keeps to its own files where it imported them when it was loaded."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={root}")
    first = hub.load_kernel(spec)
    monkeypatch.delenv("LOCAL_KERNELS")
    second = hub.load_kernel(read_spec(write_kernel(tmp_path / "again", value="mine")))
    assert first.module.__name__ == second.module.__name__ and first.module is not second.module
    assert sys.modules[second.module.__name__] is second.module
    assert (first.module.forward(), second.module.forward()) == ("mine", "mine")
