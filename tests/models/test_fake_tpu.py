"""One graph with our kernel in it, traced through the real torch_tpu device on fake tensors (no TPU is opened)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [f"{model}:{phase}" for model in ("llama", "qwen3") for phase in ("prefill", "decode")]


@pytest.fixture(scope="module")
def traced():
    program = Path(__file__).with_name("fake_tpu_graphs.py")
    done = subprocess.run([sys.executable, str(program), *CASES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {f"{result['model']}:{result['phase']}": result for result in results}


@pytest.mark.parametrize("case", CASES)
def test_one_graph_on_the_kernel(case, traced):
    result = traced[case]
    assert result["graphs"] == 1
    assert result["device"].startswith("tpu")
    function = "decode" if case.endswith("decode") else "forward"
    assert len(result["kernel_nodes"]) == 2 and all(function in node for node in result["kernel_nodes"])
    assert result["sdpa_nodes"] == [] and result["score_sized"] == []
    assert result["reasons"] == ["kernel"]
