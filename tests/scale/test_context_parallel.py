"""Ring attention over gloo processes equals one call over all keys. Emulated on CPU."""

from __future__ import annotations

import pytest

from .launch import WORKERS, torchrun


@pytest.mark.parametrize("processes", [pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4)])
def test_ring_attention_equals_one_call(processes, tmp_path):
    reports, output = torchrun(WORKERS / "context_parallel.py", processes, folder=tmp_path)
    assert len(reports) == processes, output
    for rank, told in enumerate(reports):
        assert told["world"] == processes and len(told["errors"]) == 8
        for case, error in told["errors"].items():
            print(f"{processes} processes, rank {rank}, {case}: largest error {error:.1e}")
            # Both are float32 attention over the same keys, summed in another order.
            assert error <= 3e-6, (rank, case)
