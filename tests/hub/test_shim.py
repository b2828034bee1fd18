"""The shim for kernels 0.17's TPU detection: where it works, where it does nothing, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.backends import _backend

from tpu_kernels import builds


def accelerator(monkeypatch, kind):
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)


@pytest.mark.parametrize("kind", [None, "cuda", "xpu"])
def test_does_nothing_where_the_accelerator_is_no_tpu(monkeypatch, kind):
    accelerator(monkeypatch, kind)
    before = _backend()
    with builds.backend_shim() as shimmed:
        assert shimmed is False and not hasattr(torch.backends, "tpu")
        assert _backend() == before


class _Tpu:
    """In the place of torch's device of type "tpu", which torch knows only once torch_tpu has started."""

    type = "tpu"


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: _Tpu())


def test_kernels_sees_the_tpu_inside_and_not_afterwards(on_tpu):
    before = _backend()
    assert before.name != "tpu"
    with builds.backend_shim() as shimmed:
        assert shimmed is True and _backend().name == "tpu"
    assert _backend() == before and not hasattr(torch.backends, "tpu")


def test_attribute_goes_when_loading_fails(on_tpu):
    with pytest.raises(RuntimeError, match="in the kernel"), builds.backend_shim():
        raise RuntimeError("in the kernel")
    assert not hasattr(torch.backends, "tpu")


def test_nested(on_tpu):
    with builds.backend_shim() as outer, builds.backend_shim() as inner:
        assert (outer, inner) == (True, False)
    assert not hasattr(torch.backends, "tpu")


def test_does_nothing_where_the_attribute_exists(on_tpu, monkeypatch):
    theirs = object()
    monkeypatch.setattr(torch.backends, "tpu", theirs, raising=False)
    with builds.backend_shim() as shimmed:
        assert shimmed is False and torch.backends.tpu is theirs
    assert torch.backends.tpu is theirs


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What happens in a process with the real torch_tpu started as on a TPU host (no device is opened)."""
    if sys.platform != "linux":
        pytest.skip("torch_tpu exists for Linux only")
    program = Path(__file__).with_name("torch_tpu_shim.py")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HF_HUB_OFFLINE": "1",
        "TPU_KERNELS_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("kernels"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_accelerator_of_torch_tpu_is_named_tpu(real):
    assert real["accelerator"] == "tpu"


def test_the_shim_is_still_needed(real):
    """When this fails, kernels or torch_tpu have mended TPU detection: remove `builds.backend_shim` and its tests."""
    assert real["attribute_before"] is False
    assert "backend (tpu) does not match system backend" in real["without_shim"]


def test_with_the_shim_a_tpu_build_is_chosen_and_loaded(real):
    assert real["with_shim"] == ["tpu", "_small_kernel_tpu_0000001"]
    assert real["attribute_after"] is False


def test_other_builds_load_after_the_shim_as_before(real):
    assert real["others_before"] == real["others_after"]
    assert real["others_after"]["torch-universal"] == "loaded" and real["others_after"]["torch-cpu, asked for"] == "loaded"
    if torch.version.cuda is not None:
        assert real["others_after"]["torch-cuda"] == "loaded"


def test_a_kernel_sees_the_tpu_while_it_is_imported(real):
    assert real["load_kernel"] == ["packaged", True]
