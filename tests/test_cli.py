"""The command line: doctor and list."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tpu_kernels import cli, doctor, staging


@pytest.fixture
def clean(monkeypatch):
    """No setting of this machine that doctor would remark on."""
    for name in ("JAX_PLATFORMS", *doctor._TELEMETRY, "TPU_KERNELS_DISABLE", "TPU_KERNELS_STRICT", "TPU_KERNELS_TARGET"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})


def findings(subject: str) -> list[doctor.Finding]:
    return [found for found in doctor.examine(load_kernels=False) if found.subject == subject]


def versions(monkeypatch, **changed: str | None):
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = changed.get(name, real)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name) if found is real else found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_doctor_finds_nothing_wrong_with_the_tested_versions(clean):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for name, (_, tested) in doctor.PACKAGES.items():
        assert f"{name} " in result.output and tested in result.output
    assert "kernel range-attention" in result.output and "packaged" in result.output
    assert "problem" not in result.output


def test_doctor_json(clean):
    result = run("doctor", "--json", "--no-load")
    assert result.exit_code == 0
    found = {each["subject"]: each for each in json.loads(result.output)}
    assert found["transformers"]["level"] == "ok"
    assert "kernel range-attention" not in found


@pytest.mark.parametrize("version", [None, "0.16.4"], ids=["missing", "old"])
def test_doctor_tells_how_to_get_a_package_that_is_missing_or_old(clean, monkeypatch, version):
    versions(monkeypatch, kernels=version)
    result = run("doctor", "--no-load")
    assert result.exit_code == 1
    (kernels,) = findings("kernels")
    assert kernels.level == "problem"
    assert kernels.remedy == "pip install 'kernels>=0.17.2'"


def test_doctor_explains_the_gap_between_transformers_and_kernels(clean, monkeypatch):
    assert findings("transformers' own Hub loading") == []
    versions(monkeypatch, transformers="5.24.0")
    (gap,) = findings("transformers' own Hub loading")
    assert gap.level == "note"
    assert "0.18.2" in gap.found and "0.17.2 is installed" in gap.found
    versions(monkeypatch, transformers="5.24.0", kernels="0.18.2")
    assert findings("transformers' own Hub loading") == []


def test_doctor_warns_of_jax_opening_the_tpu(clean, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    (found,) = findings("JAX_PLATFORMS")
    assert found.level == "problem" and "unset it" in found.remedy
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert findings("JAX_PLATFORMS") == []


def test_doctor_warns_of_telemetry_switched_off(clean, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    (found,) = findings("HF_HUB_DISABLE_TELEMETRY")
    assert found.level == "note" and "HF_HUB_USER_AGENT_ORIGIN" in found.remedy  # only kernels' own loading fails


def test_doctor_counts_chips_without_opening_them(clean, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: SimpleNamespace(type="tpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.tpu, "get_device_name", lambda: "TPU v6e")
    (tpu,) = findings("TPU")
    assert (tpu.level, tpu.found) == ("ok", "4 x TPU v6e (found by torch_tpu, not opened)")
    (backend,) = findings("torch.backends.tpu")
    assert backend.level == "note"


def test_doctor_names_a_release_whose_masks_nobody_compared(clean, monkeypatch):
    from tpu_kernels import masks

    monkeypatch.setattr(masks.transformers, "__version__", "5.99.0")
    found = [each for each in doctor.examine() if each.subject == "masks"]
    assert len(found) == 1 and "5.99.0" in found[0].found


def test_doctor_reports_a_kernel_that_does_not_load(clean, monkeypatch, tmp_path):
    from tpu_kernels import hub

    monkeypatch.setattr(hub, "_loaded", {})
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(blocked))
    result = run("doctor")
    assert result.exit_code == 1
    assert "does not load" in result.output and "TPU_KERNELS_CACHE" in result.output


@pytest.mark.parametrize("command", ["doctor", "list", "plan", "verify", "init", "prefetch", "lock"])
def test_every_command_has_an_example(command):
    assert f"Example: tpu-kernels {command} " in " ".join(run(command, "--help").output.split())


def test_list_names_functions_and_abilities():
    result = run("list")
    assert result.exit_code == 0, result.output
    for text in ("range-attention", "forward", "decode", "grouped KV heads", "packaged with tpu-kernels", "on request"):
        assert text in result.output
    specs = {each["name"]: each for each in json.loads(run("list", "--json").output)}
    assert [name for name, spec in specs.items() if not spec["on_request"]] == ["range-attention"]
    assert {"forward", "decode"} <= {function["name"] for function in specs["range-attention"]["functions"]}
    for name, spec in specs.items():
        assert spec["loads_from"]["source"] == "packaged" and spec["loads_from"]["place"].endswith(name)
        assert spec["loads_from"]["revision"] == staging.content_hash(Path(spec["folder"]))
