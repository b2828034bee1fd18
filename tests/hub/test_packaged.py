"""The packaged copy: staged, checked and loaded through kernels, once, or refused with what to do."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import threading
import time
from pathlib import Path

import kernels
import pytest

import tpu_kernels
from tpu_kernels import hub, staging
from tpu_kernels.specs import load_specs, read_spec

from .small_kernel import BODY


def staged(folder: Path) -> Path:
    """Where hub stages the kernel of `folder`."""
    return hub.cache_dir() / "staged" / f"{folder.name}-{staging.content_hash(folder)[:16]}" / staging.VARIANT


def test_packaged_copy_loads_through_kernels(make_kernel):
    folder = make_kernel()
    loaded = hub.load_kernel(read_spec(folder))
    assert loaded.source == "packaged" and loaded.revision == staging.content_hash(folder)
    assert loaded.location == str(staged(folder).resolve())
    (known,) = kernels.get_loaded_kernels()
    assert known.module is loaded.module and known.metadata.id == loaded.module.__name__
    assert loaded.module.forward() == "first"


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_every_packaged_kernel_loads(spec, fresh):
    loaded = hub.load_kernel(spec)
    assert loaded.source == "packaged"
    assert [f.name for f in spec.functions if not callable(getattr(loaded.module, f.name))] == []


def test_submodules_are_imported_with_the_kernel(make_kernel):
    loaded = hub.load_kernel(read_spec(make_kernel(extra="X = 1\n")))
    assert sys.modules[loaded.module.__name__ + ".extra"].X == 1


def test_two_copies_of_a_kernel_keep_to_their_own_files(make_kernel):
    first = hub.load_kernel(read_spec(make_kernel()))
    second = hub.load_kernel(read_spec(make_kernel(value="second", functions="max_packed_rows = 8\n")))
    assert first.module is not second.module
    assert (first.module.forward(), second.module.forward()) == ("first", "second")


def test_a_second_load_gives_the_same_kernel(make_kernel):
    folder = make_kernel()
    assert hub.load_kernel(read_spec(folder)) is hub.load_kernel(read_spec(folder))


def test_four_threads_load_once(make_kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("BODY_LOG", str(tmp_path / "log"))
    spec = read_spec(make_kernel(body="import time\ntime.sleep(0.2)\n" + BODY))
    start, got = threading.Barrier(4), []

    def load():
        start.wait()
        got.append(hub.load_kernel(spec))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4 and len({id(loaded) for loaded in got}) == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def change(variant: Path) -> str:
    (variant / "parts.py").write_text("raise SystemExit('never run this')\n")
    return "parts.py"


def remove(variant: Path) -> str:
    (variant / "parts.py").unlink()
    return "parts.py"


def add(variant: Path) -> str:
    (variant / "more.py").write_text("raise SystemExit('never run this')\n")
    return "more.py"


@pytest.mark.parametrize("tamper", [change, remove, add])
def test_files_that_differ_from_the_digest_are_not_imported(make_kernel, tmp_path, monkeypatch, tamper):
    monkeypatch.setenv("BODY_LOG", str(tmp_path / "log"))
    folder = make_kernel()
    variant = staging.stage(folder, staged(folder).parents[1])
    named = tamper(variant)
    with pytest.raises(hub.KernelLoadError) as caught:
        hub.load_kernel(read_spec(folder))
    message = str(caught.value)
    assert named in message and str(variant) in message and f"Delete {variant}" in message
    assert not (tmp_path / "log").exists() and kernels.get_loaded_kernels() == []


def test_unreadable_metadata(make_kernel):
    folder = make_kernel()
    variant = staging.stage(folder, staged(folder).parents[1])
    text = (variant / "metadata.json").read_text()
    (variant / "metadata.json").write_text(text.replace('"license"', '"licence"'))
    with pytest.raises(hub.KernelLoadError, match=r"metadata\.json cannot be read: .*license.*Delete "):
        hub.load_kernel(read_spec(folder))


def test_cache_that_cannot_be_written(make_kernel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "file"))
    with pytest.raises(hub.KernelLoadError, match=r"cannot be staged in .*file.*set TPU_KERNELS_CACHE"):
        hub.load_kernel(read_spec(make_kernel()))


def test_source_that_cannot_be_built(make_kernel):
    folder = make_kernel()
    (folder / "build.toml").write_text("[general]\n")
    with pytest.raises(hub.KernelLoadError, match=r"small-kernel.*build\.toml"):
        hub.load_kernel(read_spec(folder))


ONCE = 'import pathlib\nif pathlib.Path({flag!r}).exists():\n    raise RuntimeError("not yet")\n'


@pytest.mark.parametrize("where", ["body", "extra"])
def test_after_a_failure_nothing_is_kept_and_a_retry_works(make_kernel, tmp_path, where):
    flag = tmp_path / "flag"
    flag.touch()
    once = ONCE.format(flag=str(flag))
    folder = make_kernel(body=BODY + once) if where == "body" else make_kernel(extra=once)
    spec, before = read_spec(folder), set(sys.modules)
    for _ in range(2):
        with pytest.raises(hub.KernelLoadError, match=r"'small-kernel' cannot be loaded from .*RuntimeError: not yet"):
            hub.load_kernel(spec)
        assert kernels.get_loaded_kernels() == []
        assert [name for name in set(sys.modules) - before if name.startswith("_small_kernel")] == []
    flag.unlink()
    assert hub.load_kernel(spec).module.forward() == "first"


def test_cause_is_chained(make_kernel):
    with pytest.raises(hub.KernelLoadError) as caught:
        hub.load_kernel(read_spec(make_kernel(body="1 / 0\n")))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_function_that_the_spec_promises_but_the_kernel_lacks(make_kernel):
    folder = make_kernel(functions="[functions.decode]\n[functions.backward]\n")
    with pytest.raises(hub.KernelLoadError, match=r"lacks decode, backward, which its spec\.toml promises"):
        hub.load_kernel(read_spec(folder))
    assert kernels.get_loaded_kernels() == []


def test_jax_missing(fresh, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)
    (spec,) = [spec for spec in load_specs() if spec.name == "range-attention"]
    with pytest.raises(hub.KernelLoadError, match=r"needs the Python package 'jax': pip install jax"):
        hub.load_kernel(spec)


def test_kernels_missing(make_kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(hub.KernelLoadError, match=r"package kernels is not installed: pip install 'kernels>=0\.17\.2'"):
        hub.load_kernel(read_spec(make_kernel()))


def test_kernels_too_old(make_kernel, monkeypatch):
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.16.9" if name == "kernels" else installed(name))
    with pytest.raises(hub.KernelLoadError, match=r"needs kernels >= 0\.17\.2, but 0\.16\.9 is installed: pip install"):
        hub.load_kernel(read_spec(make_kernel()))


def test_loading_is_told(make_kernel, caplog):
    caplog.set_level(logging.INFO, "tpu_kernels")
    loaded = hub.load_kernel(read_spec(make_kernel()))
    told = f"packaged (spec.toml names no Hub repository), revision {loaded.revision}, {loaded.location}"
    (record,) = caplog.records
    assert record.message == f"kernel 'small-kernel': {told}"
    explanation = tpu_kernels.explain()
    assert explanation.kernels == (f"kernel small-kernel: {told}",)
    assert "kernel small-kernel: packaged" in str(explanation)


def test_a_failure_does_not_hold_the_lock(make_kernel):
    with pytest.raises(hub.KernelLoadError):
        hub.load_kernel(read_spec(make_kernel(body="1 / 0\n")))
    done = threading.Event()
    spec = read_spec(make_kernel(name="small-other"))

    def load():
        hub.load_kernel(spec)
        done.set()

    threading.Thread(target=load, daemon=True).start()
    deadline = time.monotonic() + 20
    while not done.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done.is_set()
