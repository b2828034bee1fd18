"""Tensor parallelism compiled for four v6e chips: what the program sends between them around the kernel."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_kernels.offdevice.process import worker_environment


@pytest.fixture(scope="module")
def told():
    script = Path(__file__).with_name("sharded_layer.py")
    done = subprocess.run(
        [sys.executable, str(script), "v6e:2x2"], env=worker_environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["prefill", "decode"])
def test_the_one_collective_is_the_sum_after_o_proj(told, case):
    """compiled for v6e, 4 chips"""
    case = told[case]
    print(case)
    assert case["partitions"] == 4
    assert len(case["kernels"]) == 1
    # The kernel gives a quarter of the heads, whatever shape it packs them in.
    shape = re.search(r" = bf16\[([\d,]+)\]", case["kernels"][0]).group(1)
    assert math.prod(map(int, shape.split(","))) * 4 == case["whole output"]
    assert case["collectives"] == ["all-reduce"], case["lines"]
    assert case["lines"][0].startswith("ROOT")  # nothing follows it


@pytest.mark.slow
def test_a_kernel_split_otherwise_would_need_more(told):
    """The counting would show it."""
    assert set(told["prefill, by batch"]["collectives"]) - {"all-reduce"}, told["prefill, by batch"]
