"""Small kernels to load, and a loader that has loaded nothing yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import kernels.importer
import pytest

from tpu_kernels import hub

from .small_kernel import write_kernel


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Nothing loaded, an empty kernel cache; kernels loaded by the test are forgotten afterwards."""
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_loaded", {})
    monkeypatch.setattr(kernels.importer, "_loaded_kernels", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("_small_", "_range_attention_")):
            del sys.modules[name]


@pytest.fixture
def make_kernel(tmp_path, fresh) -> Callable[..., Path]:
    """write_kernel into the test's folder."""
    return lambda **options: write_kernel(tmp_path / "specs", **options)
