"""The newest transformers release beside the pinned one: masks, and models on the kernel. It comes into a side folder that
is put first on the path, so that torch is not installed twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import filelock
import platformdirs
import pytest

ROOT = Path(__file__).resolve().parents[1]
NEWEST = "5.24.0"
MODELS = "(llama or qwen3 or gemma3_text or gpt_oss or llama4_text) and static and padded and decoder"


@pytest.fixture(scope="module")
def side() -> Path:
    """A folder with that transformers in it, kept between runs."""
    folder = Path(platformdirs.user_cache_dir("tpu_kernels")) / f"transformers-{NEWEST}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock", timeout=600):
        if not (folder / "done").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--upgrade", "--target", str(folder), f"transformers=={NEWEST}"], check=True)
            (folder / "done").touch()
    return folder


def run_with(side: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(side)}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.slow
def test_masks_of_the_newest_release(side):
    version = run_with(side, "-c", "import transformers; print(transformers.__version__)")
    assert version.split()[-1] == NEWEST
    run_with(side, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_masks.py", "tests/test_mask_encoding.py")


@pytest.mark.slow
def test_models_of_the_newest_release(side):
    run_with(side, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/models/test_models.py", "-k", MODELS)


@pytest.mark.slow
def test_doctor_explains_the_gap(side):
    told = run_with(side, "-m", "tpu_kernels.cli", "doctor", "--no-load", "--json")
    assert "needs kernels" in told and "0.18.2" in told
