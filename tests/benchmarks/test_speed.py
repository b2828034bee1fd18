"""Estimates side by side: with an estimator that answers at once, and one real comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import estimate, report, shapes
from benchmarks.__main__ import app
from benchmarks.implementations import BASE, IMPLEMENTATIONS, OURS, CannotError, range_mask
from tpu_kernels.offdevice.targets import TARGETS

from .fake_estimator import MIB, FakeEstimator

TABLE = shapes.load()


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(FakeEstimator, "made", 0)
    monkeypatch.setattr(FakeEstimator, "asked", [])
    monkeypatch.setattr(FakeEstimator, "broken", "")
    return FakeEstimator


def estimated(tmp_path, names, implementations=None, target="v6e", **more):
    chosen = [TABLE[name] for name in names]
    wanted = [IMPLEMENTATIONS[name] for name in implementations or (OURS, BASE, "jax-splash")]
    todo = estimate.tasks(chosen, wanted, target)
    results = list(estimate.run(todo, target, estimate.Cache(tmp_path), estimator=FakeEstimator, **more))
    return report.compare(chosen, target, [figure for _, figure, _ in results]), results


def test_the_best_of_each_is_compared_with_sdpa_and_the_bars(tmp_path):
    (compared,), results = estimated(tmp_path, ["causal-16x8-d128-4k"])
    assert [figure.label for _, figure, _ in results] == ["", "", "blocks of 512", "blocks of 1024", "blocks of 2048"]
    assert compared.ratio(compared.of(OURS)) == pytest.approx(0.5)
    assert compared.of("jax-splash").label == "blocks of 512"
    checks = {check.what: check for check in compared.checks()}
    assert checks["time over SDPA's"].passed is True and checks["time over SDPA's"].bar == 0.60
    assert checks["time over jax-splash's"].passed is False
    assert checks["time over jax-splash's"].value == pytest.approx(1e-3 / 512e-6)
    # A full block is the piece with the most products: 1700 slots of two units in 1000 cycles.
    assert compared.of(OURS).block == (4, 1000)
    assert compared.of(OURS).paths == ((10, 900, 100), (4, 1000, 1700))
    assert checks["matrix units busy in full blocks"].value == pytest.approx(0.85)
    assert compared.of(OURS).matrix_busy == pytest.approx(0.5)
    assert report.verdict([compared]) == (3, 1, 0)
    assert report.missed([compared]) == ["causal-16x8-d128-4k: time over jax-splash's 1.95 (<= 1)"]


def test_bytes_peak_and_measured_figures_have_their_bars(tmp_path):
    decode, full = estimated(tmp_path, ["decode-b8-32x8-d128-1k-of-8k", "full-16x8-d128-8k"])[0]
    (bytes_check,) = [check for check in decode.checks() if "HBM bytes" in check.what]
    assert bytes_check.value == pytest.approx(64 / 32) and not bytes_check.passed
    assert "no decode" in decode.of("jax-splash").error
    (peak,) = [check for check in full.checks() if "peak" in check.what]
    # 4 x 16 heads x 8192^2 pairs x 128 operations in 1 ms.
    assert peak.value == pytest.approx(4 * 16 * 8192**2 * 128 / 1e-3 / TARGETS["v6e"].flops_per_second)
    assert peak.passed
    timed = estimate.Figure("full-16x8-d128-8k", OURS, "v6e", "", 1e-3, how="TPU v6e")
    measured = report.Comparison(full.shape, "v6e", (timed, *full.figures[1:]))
    assert {check.what for check in measured.checks()} == {"share of peak", "time over jax-splash's"}


def test_a_run_goes_on_where_it_was_stopped(tmp_path, fake):
    chosen, wanted = [TABLE["full-20-d64-1500"]], [IMPLEMENTATIONS[name] for name in (OURS, BASE)]
    todo = estimate.tasks(chosen, wanted, "v6e")
    cache = estimate.Cache(tmp_path)
    stopped = estimate.run(todo, "v6e", cache, estimator=FakeEstimator)
    first = next(stopped)
    stopped.close()
    assert fake.asked == ["call"] and not first[2]
    again = list(estimate.run(todo, "v6e", cache, estimator=FakeEstimator))
    assert [known for *_, known in again] == [True, False]
    assert again[0][1] == first[1]
    made = fake.made
    assert all(known for *_, known in estimate.run(todo, "v6e", cache, estimator=FakeEstimator))
    assert fake.made == made  # no estimator is started for what is known
    assert not any(known for *_, known in estimate.run(todo, "v6e", cache, estimator=FakeEstimator, anew=True))
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:50])
    assert not any(known for *_, known in estimate.run(todo, "v6e", cache, estimator=FakeEstimator))


def test_shapes_that_share_a_program_keep_their_names(tmp_path, fake):
    """SDPA with a dense mask of one kind is SDPA with one of another."""
    names = ["decode-b8-32x8-d128-1k-of-8k", "decode-b8-32x8-d128-8k-of-8k"]
    compared, results = estimated(tmp_path, names, ["sdpa-transformers"])
    assert [known for *_, known in results] == [False, True] and fake.asked == ["module"]
    assert [each.of("sdpa-transformers").shape for each in compared] == names


def test_the_cache_knows_sources_versions_and_targets(monkeypatch):
    ours, base = IMPLEMENTATIONS[OURS], IMPLEMENTATIONS[BASE]
    (candidate,) = ours.candidates(TABLE["decode-b8-32x8-d128-1k-of-8k"], "v6e")
    (other,) = ours.candidates(TABLE["decode-b8-32x8-d128-8k-of-8k"], "v6e")
    (sdpa,) = base.candidates(TABLE["causal-16x8-d128-4k"], "v6e")
    keys = [estimate.cache_key(ours, candidate, "v6e"), estimate.cache_key(ours, candidate, "v5e")]
    keys += [estimate.cache_key(ours, other, "v6e"), estimate.cache_key(base, sdpa, "v6e")]
    monkeypatch.setattr(estimate, "kernel_digest", lambda name: "another source")
    keys.append(estimate.cache_key(ours, candidate, "v6e"))
    assert estimate.cache_key(base, sdpa, "v6e") == keys[3]  # SDPA does not depend on it
    monkeypatch.setattr(estimate, "version", lambda package: "9.9")
    keys += [estimate.cache_key(ours, candidate, "v6e"), estimate.cache_key(base, sdpa, "v6e")]
    assert len(set(keys)) == len(keys)


def test_what_fails_or_is_refused_says_why(tmp_path, fake):
    fake.broken = "jax_splash2048"
    names = ["mla-16-d192-v128-4k", "window128-sinks-64x8-d64-4k"]
    mla, window = estimated(tmp_path, names, [OURS, BASE, "jax-splash", "jax-flash"])[0]
    assert mla.of("jax-splash").label == "blocks of 512"
    assert mla.of("jax-flash").error == "no head size of v other than k's"
    assert "no mask of kind 'window'" in window.of("jax-flash").error
    fake.broken = "jax_splash"
    (lost,) = estimated(tmp_path / "x", ["mla-16-d192-v128-4k"])[0]
    assert lost.of("jax-splash").seconds is None and "RESOURCE_EXHAUSTED" in lost.of("jax-splash").error
    assert math.isnan(lost.seconds("jax-splash"))
    assert not any("splash" in check.what for check in lost.checks())
    fake.broken = "call"
    (ours_lost,) = estimated(tmp_path / "y", ["mla-16-d192-v128-4k"])[0]
    assert all(check.passed is None for check in ours_lost.checks())


def test_a_large_call_of_sdpa_is_estimated_in_part(tmp_path):
    shape = TABLE["window1024-32x8-d128-32k"]
    (candidate,) = IMPLEMENTATIONS[BASE].candidates(shape, "v6e")
    assert candidate.times == 8  # one of eight KV heads, with its four query heads
    assert candidate.job.arguments[0].shape == (1, 4, 32768, 128) and candidate.job.arguments[1].shape == (1, 1, 32768, 128)
    assert candidate.whole.arguments[0].shape == (1, 32, 32768, 128)
    (compared,), _ = estimated(tmp_path, [shape.name], [BASE])
    figure = compared.of(BASE)
    assert figure.seconds == pytest.approx(8 * 2e-3) and figure.hbm_bytes == 8 * 64 * MIB
    assert figure.temp_bytes == 7 * MIB  # of the whole call


def test_every_shape_has_a_program_of_ours_and_of_sdpa():
    for shape in TABLE.values():
        for name in (OURS, BASE):
            (candidate,) = IMPLEMENTATIONS[name].candidates(shape, "v6e")
            assert candidate.job.arguments[0].shape[2:] == (shape.q_len, shape.head_dim)
        mask = range_mask(shape)
        assert (mask is None) == (shape.sees in ("causal", "full"))
        if mask is not None:
            assert mask.shape == (shape.batch, 1, shape.q_len, 2) and mask.dtype == np.int32
    functions = {
        shape.name: IMPLEMENTATIONS[OURS].candidates(shape, "v6e")[0].job.static.get("function") for shape in TABLE.values()
    }
    assert functions["decode-b8-32x8-d128-1k-of-8k"] == "decode"
    assert functions["causal-16x8-d128-4k"] == "forward"
    assert functions["training-16x8-d128-4k"] is None


def test_peers_refuse_by_name():
    with pytest.raises(CannotError, match="no sinks"):
        IMPLEMENTATIONS["torch-tpu-splash"].candidates(TABLE["window128-sinks-64x8-d64-4k"], "v6e")
    with pytest.raises(CannotError, match="whole blocks"):
        IMPLEMENTATIONS["torch-tpu-splash"].candidates(TABLE["full-20-d64-1500"], "v6e")


def run_cli(*arguments):
    return CliRunner().invoke(app, ["speed", *map(str, arguments)])


def test_the_command_prints_writes_and_draws(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(estimate, "Estimator", FakeEstimator)
    options = ["--target", "v6e", "--cache", tmp_path / "cache", "--json", tmp_path / "x.json", "--plot", tmp_path / "x.png"]
    result = run_cli(*options, "--shape", "full-20-*", "--shape", "decode*1k*", "--impl", "range-*", "--impl", "*s*")
    assert result.exit_code == 1, result.output  # a bar is missed
    assert "full-20-d64-1500" in result.output and "v6e, static schedule" in result.output
    assert "not installed: tokamax" in result.output or "tokamax-splash" in result.output
    assert "2/" in result.output
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["how"] == "static schedule" and written["versions"]["jax"]
    rows = {row["shape"]["name"]: row for row in written["rows"]}
    (ours,) = [each for each in rows["full-20-d64-1500"]["figures"] if each["implementation"] == OURS]
    assert ours["over_sdpa"] == pytest.approx(0.5)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "v9"], "unknown TPU generation"),
        (["--target", "v6e", "--shape", "nothing*"], "'nothing\\*' matches none of"),
        (["--target", "v6e", "--impl", "nobody"], "'nobody' matches none of"),
        (["--target", "v6e", "--json", "/no/where/x.json"], "/no/where is not a"),
        ([], "name a generation"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = run_cli(*arguments)
    assert result.exit_code == 2
    assert message.replace("\\", "") in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_real_comparison(tmp_path):
    """The compiler, torch_tpu and the kernels themselves, on the cheapest shape."""
    shape = TABLE["full-20-d64-1500"]
    wanted = [IMPLEMENTATIONS[name] for name in (OURS, BASE, "sdpa-transformers", "jax-splash")]
    todo = [task for task in estimate.tasks([shape], wanted, "v6e") if task.candidate.label in ("", "blocks of 512")]
    figures = [figure for _, figure, _ in estimate.run(todo, "v6e", estimate.Cache(Path(tmp_path)))]
    (compared,) = report.compare([shape], "v6e", figures)
    assert all(figure.seconds for figure in compared.figures), [figure.error for figure in compared.figures]
    goal = TARGETS["v6e"]
    for figure in compared.figures:
        assert shape.least_seconds(goal) < figure.seconds < 20 * shape.least_seconds(goal)
        assert figure.hbm_bytes >= shape.least_bytes
        assert 0 < figure.matrix_busy < 1 and 0 < figure.block_busy < 1
        assert figure.vmem_bytes > 0
