"""Draw docs/loss-curves.svg: the model of tests/test_training.py under sdpa, eager and tpu_attention, emulated on CPU.

python tools/plot_loss_curves.py [STEPS]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
import torch  # noqa: E402

import tpu_kernels  # noqa: E402
from tests.test_training import losses  # noqa: E402


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tpu-kernels"
    from matplotlib import pyplot

    tpu_kernels.register(strict=True)
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 5), sharex=True)
    for column, dtype in zip(axes.T, (torch.float32, torch.bfloat16), strict=True):
        curves = {name: losses(name, steps, dtype) for name in ("sdpa", "eager", "tpu_attention")}
        gaps = {name: (curves[name] - curves["sdpa"]).abs() for name in ("tpu_attention", "eager")}
        name = str(dtype).removeprefix("torch.")
        print(name, {each: f"largest gap to sdpa {gap.max().item():.1e}" for each, gap in gaps.items()}, flush=True)
        for each, style in (("sdpa", "-"), ("tpu_attention", "--")):
            column[0].plot(curves[each], style, label=each)
        for each, gap in gaps.items():
            column[1].semilogy(gap.clamp(min=1e-9), label=f"{each}, largest {gap.max().item():.0e}")
        column[0].set(title=name, ylabel="loss")
        column[1].set(xlabel="step", ylabel="gap to sdpa")
        column[0].legend()
        column[1].legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "loss-curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
