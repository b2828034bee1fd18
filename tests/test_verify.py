"""The self-check: it passes here, and it fails when the kernel is wrong."""

from __future__ import annotations

import json
import math
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tpu_kernels import cli, cli_verify, verify


def cases(*names: str):
    return [case for case in verify.parity_cases(large=False) if case.name in names]


@pytest.fixture
def few(monkeypatch):
    """Two parity cases, so that the command takes seconds."""
    chosen = cases("left padding", "softcap")
    assert len(chosen) == 2
    monkeypatch.setattr(verify, "parity_cases", lambda large: chosen)


@pytest.mark.slow
def test_the_whole_suite_passes():
    report = verify.verify()
    assert report.passed, [result for result in report.results if not result.passed]
    assert len(report.results) == verify.checks(report.device)


@pytest.mark.tpu
def test_the_whole_suite_passes_on_the_tpu():
    report = verify.verify()
    assert report.device == "tpu" and report.passed, [result for result in report.results if not result.passed]


@pytest.mark.thorough
def test_the_command_reports_and_exits_with_0(few, tmp_path):
    page, plot = tmp_path / "report.html", tmp_path / "report.svg"
    result = CliRunner().invoke(
        cli.app, ["verify", "--json", "--html", str(page), "--plot", str(plot)], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["passed"] and document["what"] == "emulated on CPU"
    assert document["versions"]["jax"] != "not installed"
    assert {each["name"] for each in document["results"]} >= {"left padding", "softcap", "NaN in hidden keys"}
    text = page.read_text()
    assert "softcap" in text and "data:image/png;base64," in text
    drawn = plot.read_text()
    assert all(f"{each['name']}   {each['shape']}" in drawn for each in document["results"] if each["group"] == "parity")


def test_a_failed_check_without_a_number_is_drawn(tmp_path):
    broken = verify.Result("parity", "broken", False, "", math.inf, 1e-6, 1e-7, "", "float32", "B1 H1/1 2x3 D64")
    report = verify.Report("emulated on CPU", "cpu", {}, (broken, replace(broken, name="raised", error=math.nan)))
    cli_verify.draw(report, tmp_path / "report.svg")
    drawn = (tmp_path / "report.svg").read_text()
    assert "FAILED: broken   B1 H1/1 2x3 D64" in drawn and "FAILED: raised" in drawn
    cli_verify.write_html(report, tmp_path / "report.html")
    assert "FAIL" in (tmp_path / "report.html").read_text()


def test_a_file_after_json_is_not_taken_for_a_kernel():
    result = CliRunner().invoke(cli.app, ["verify", "--json", "report.json"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "--json takes no file: tpu-kernels verify --json > report.json" in result.output


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        pytest.param(lambda out, args: out * 1.01, "softcap", marks=pytest.mark.thorough, id="1 % off"),
        pytest.param(lambda out, args: out + 1e-30 / out.new_tensor(0.0), "left padding", id="infinite"),
        pytest.param(lambda out, args: out.flip(1), "order of grouped heads", marks=pytest.mark.thorough, id="heads"),
        pytest.param(lambda out, args: out + 0.001 * args[1][:, :1, :1, :1], "NaN in hidden keys", id="reads a hidden key"),
    ],
)
def test_a_wrong_kernel_is_found_and_the_exit_code_is_1(few, monkeypatch, fault, caught):
    from tpu_kernels import attention

    run = attention._run_kernel
    monkeypatch.setattr(attention, "_run_kernel", lambda *args: fault(run(*args), args[1:]))
    result = CliRunner().invoke(cli.app, ["verify", "--json"])
    assert result.exit_code == 1, result.output
    failed = {each["name"] for each in json.loads(result.stdout)["results"] if not each["passed"]}
    assert caught in failed


def test_a_check_that_raises_has_failed_and_the_rest_runs(few, monkeypatch):
    from tpu_kernels import attention

    def broken(*args):
        raise RuntimeError("Mosaic says no")

    monkeypatch.setattr(attention, "_run_kernel", broken)
    report = verify.verify()
    assert not report.passed and len(report.results) == 11
    assert all("Mosaic says no" in result.detail for result in report.results)


def test_a_call_that_falls_back_has_failed(few, monkeypatch):
    monkeypatch.setenv("TPU_KERNELS_DISABLE", "1")
    report = verify.verify()
    assert not any(result.passed for result in report.results)
    assert "not on a kernel" in report.results[0].detail


def test_the_references_agree_with_torch():
    """The float64 reference against torch's own SDPA in float64."""
    for case in cases("left padding", "decode", "sliding window"):
        q, k, v, sinks, visible, _ = verify.make(case)
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), visible, enable_gqa=True
        ).transpose(1, 2)  # fmt: skip
        torch.testing.assert_close(verify.reference(case, q, k, v, visible, sinks), want, atol=1e-12, rtol=0)


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path):
    html = str(tmp_path / "nowhere" / "report.html")
    result = CliRunner().invoke(cli.app, ["verify", "--html", html], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "is not a folder" in result.output


def test_the_module_takes_what_the_command_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("tpu_kernels.cli.app", calls.append)
    monkeypatch.setattr(sys, "argv", ["verify", "--json", "report.json"])
    monkeypatch.delitem(sys.modules, "tpu_kernels.verify")
    runpy.run_module("tpu_kernels.verify", run_name="__main__")
    assert calls == [["verify", "--json", "report.json"]]
