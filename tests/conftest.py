"""What every test starts from: jax on CPU, no metadata server, no Hub, and `tpu` tests only where there is a TPU."""

from __future__ import annotations

import gc
import os
import sys

# Read at import of jax, torch_tpu, transformers and huggingface_hub, hence before any of them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

# --hypothesis-profile=long: see test_properties.py
settings.register_profile("long", max_examples=int(os.environ.get("EXAMPLES", "20000")))

torch.set_num_threads(1)  # the tensors are tiny, and two test processes share the machine


def pytest_collection_modifyitems(items):
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == "tpu":
        return
    for item in items:
        if item.get_closest_marker("tpu"):
            item.add_marker(pytest.mark.skip(reason="no TPU on this host"))


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    """Frees all that XLA compiled where `bridge` would free its own programs: parity tests compile kernels themselves."""
    yield
    if "jax" not in sys.modules:
        return
    from tpu_kernels import bridge

    if bridge.mappings() > bridge.MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """What is installed is read anew, nothing is loaded, and what the test loads is forgotten."""
    import kernels.importer

    import tpu_kernels
    from tpu_kernels import attention, hub

    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_loaded", {})
    monkeypatch.setattr(kernels.importer, "_loaded_kernels", {})
    monkeypatch.setattr(attention, "_by_default", None)
    monkeypatch.setattr(attention, "_known", {})
    monkeypatch.setattr(attention, "_plans", {})
    yield
    tpu_kernels.reset()
