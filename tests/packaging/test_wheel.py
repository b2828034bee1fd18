"""The wheel by itself, outside the checkout: what it holds, and that it works."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, capture_output=True, text=True)
    (made,) = out.glob("*.whl")
    return made


def test_it_holds_the_package_the_kernels_and_the_type_marker(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    kernel = {
        f"tpu_kernels/kernel_specs/{path.relative_to(ROOT / 'kernel_specs').as_posix()}"
        for path in (ROOT / "kernel_specs").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert kernel <= names
    assert {"tpu_kernels/__init__.py", "tpu_kernels/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples"))]
    assert "Name: tpu-kernels" in metadata and "Requires-Python: >=3.12" in metadata


USE = """
import pathlib, sys, torch, tpu_kernels
from tpu_kernels import attention, hub, specs
assert pathlib.Path(tpu_kernels.__file__).is_relative_to(sys.argv[1]), tpu_kernels.__file__
print(tpu_kernels.register(strict=True))
q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
out, _ = attention.tpu_attention(torch.nn.Identity(), q, k, k, None)
want = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).transpose(1, 2)
torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
spec = specs.load_specs()[0]
assert spec.folder.is_relative_to(sys.argv[1]), spec.folder
print("kernel from", hub.load_kernel(spec).source)
"""


@pytest.mark.thorough
def test_it_works_outside_the_checkout(wheel, tmp_path, monkeypatch):
    site, cache = tmp_path / "site", tmp_path / "cache"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(cache))
    ran = subprocess.run([sys.executable, "-c", USE, str(site)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "kernel from packaged" in ran.stdout
    assert list(cache.rglob("metadata.json"))
    listed = subprocess.run(
        [sys.executable, "-m", "tpu_kernels.cli", "list"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "range-attention" in listed.stdout
