"""The static schedule beside published times of tokamax's attention kernel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "benchmarks" / "calibration.py"


@pytest.fixture(scope="module")
def calibration():
    spec = importlib.util.spec_from_file_location("calibration", _PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["calibration"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["calibration"]


def test_published_rows_span_generations_head_sizes_and_masks(calibration):
    rows = calibration.published()
    assert len(rows) >= 20
    assert {row.target for row in rows} == {"v5p", "v6e", "tpu7x"}
    assert {row.head_dim for row in rows} == {64, 128, 256}
    assert {row.causal for row in rows} == {True, False}
    assert all(1e-4 < row.seconds < 1e-2 for row in rows)
    job = rows[0].job()
    assert job.arguments[0].shape == (rows[0].batch, rows[0].length, rows[0].heads, rows[0].head_dim)


def test_summary_and_report(calibration):
    rows = calibration.published()[:5]
    factors = (1.1, 0.9, 1.3, 1.0, 1.05)
    results = [calibration.Compared(row, row.seconds * factor, "") for row, factor in zip(rows, factors, strict=True)]
    deviation, correlation = calibration.summary(results)
    assert deviation == pytest.approx(0.1)
    assert correlation <= 1.0
    assert calibration.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert calibration.rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    refused = calibration.Compared(rows[0], None, "it waits for a DMA that it did not start")
    text = calibration.report([*results, refused])
    assert "refused: it waits for a DMA" in text
    assert "6 rows: median deviation 10%" in text
    assert "Not seen:" in text


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
def test_estimates_follow_published_times(calibration, capsys):
    results = list(calibration.compare(calibration.published()))
    with capsys.disabled():
        print("\n" + calibration.report(results))
    assert all(each.seconds is not None for each in results)
    deviation, correlation = calibration.summary(results)
    assert deviation <= 0.20
    assert correlation >= 0.90
