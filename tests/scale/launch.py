"""Workers started as users start them: torchrun, one process a rank, over gloo on CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"


def torchrun(
    script: Path, processes: int, *arguments: str, folder: Path, timeout: float = 900, check: bool = True
) -> tuple[list[Any], str]:
    """Run `script` in `processes` ranks. Each rank may write `report(...)`, see `workers/rank.py`.

    Args:
        folder: an empty folder for the reports.

    Returns:
        (the report of each rank that wrote one, in order of rank; all output).

    Raises:
        AssertionError: with the output, when a rank fails and `check` is set.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "REPORTS": str(folder),
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    environment.pop("TORCH_LOGS", None)
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port", str(port),
        str(script), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout)
    output = done.stdout + done.stderr
    assert not check or done.returncode == 0, output
    reports = [folder / f"{rank}.json" for rank in range(processes)]
    return [json.loads(path.read_text()) for path in reports if path.exists()], output
