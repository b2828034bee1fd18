"""Start a script once for each chip, as tensor parallelism needs it.   usage: launch.py [--nproc_per_node N] SCRIPT [ARGS]

torch_tpu needs three environment variables that every process must agree on, so they are set here, before torchrun starts
the processes; then this is `torchrun --nproc_per_node=N SCRIPT ARGS`. Without a TPU the processes meet over gloo on CPU.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch.distributed.run import main as torchrun


def chips() -> int:
    """How many TPU chips this host has. Opens none: the processes will."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == "tpu" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Run SCRIPT once for each chip.")
    parser.add_argument("--nproc_per_node", type=int, default=None, help="processes; default: one a chip, 1 without a TPU")
    parser.add_argument("--master_port", default="", help="where the processes meet; default: any free port of this host")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    found = chips()
    processes = options.nproc_per_node or found or 1
    if found:
        if processes > found:
            sys.exit(f"error: --nproc_per_node={processes}, but this host has {found} chips; one process drives one chip.")
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=processes)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores
        print(f"no TPU here: {processes} processes on CPU, over gloo; kernels are emulated", flush=True)
    meet = f"--master_port={options.master_port}" if options.master_port else "--standalone"
    torchrun([f"--nproc_per_node={processes}", meet, options.script, *options.arguments])


if __name__ == "__main__":
    main()
