"""range-attention by its repository's name in transformers alone: attn_implementation="acme/range-attention", no plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tpu_kernels import staging
from tpu_kernels.specs import packaged_specs_dir

REPO = "acme/range-attention"
needs_open_route = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.23"),
    reason="transformers 5.23 and later load Hub kernels only with kernels >= 0.18.2 (doctor says so)",
)
pytestmark = [pytest.mark.slow, needs_open_route]


def built(folder: Path, variant: str = "torch-tpu") -> Path:
    staging.stage(packaged_specs_dir() / "range-attention", folder)
    (folder / "build" / "torch-tpu").rename(folder / "build" / variant)
    return folder


def check(result: dict[str, object]) -> None:
    assert result["error"] == "" and result["compared"] == 14
    assert result["difference"] < 1e-5
    assert result["on_kernel"] > result["elsewhere"] >= 0  # prefill with padding is SDPA's
    assert result["plugin"] == []


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_from_the_hub(machine, loopback, tmp_path, model):
    """Where kernels knows the TPU; softcap (Gemma 2) included."""
    loopback.publish(REPO, "v1", built(tmp_path / "built"))
    (result,) = machine.start(("stock_model", [REPO, model, True]), JAX_PLATFORMS="cpu").results(300)
    check(result)


def test_from_the_hub_where_kernels_does_not_know_the_tpu(machine, loopback, tmp_path):
    """kernels 0.17.2 with torch_tpu 0.2.0: the build for TPU is refused and told, one for any backend is taken."""
    loopback.publish(REPO, "v1", built(tmp_path / "tpu"))
    loopback.publish("acme/universal", "v1", built(tmp_path / "universal", "torch-universal"))
    (refused,), (taken,) = (
        machine.run(("stock_model", [repo, "llama"]), JAX_PLATFORMS="cpu") for repo in (REPO, "acme/universal")
    )
    assert "torch-tpu: backend (tpu) does not match system backend" in refused["error"]
    check(taken)


def test_from_a_local_folder(machine, loopback, tmp_path):
    variant = built(tmp_path / "built") / "build" / "torch-tpu"
    (result,) = machine.run(("stock_model", [REPO, "llama"]), JAX_PLATFORMS="cpu", LOCAL_KERNELS=f"{REPO}={variant}")
    check(result)
    assert loopback.asked() == []


def test_on_a_fake_tpu(machine, loopback, tmp_path):
    loopback.publish(REPO, "v1", built(tmp_path / "built", "torch-universal"))
    (traced,) = machine.run(("stock_trace", [REPO]), JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
    assert traced["device"].startswith("tpu") and traced["graphs"] == 1
    assert len(traced["kernel_nodes"]) == 2 and traced["sdpa_nodes"] == [] and traced["plugin"] == []
