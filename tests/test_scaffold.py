"""`tpu-kernels init`: the kernel that it writes is right, does what it declares, and serves a model as anybody's would."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import tpu_kernels
from tpu_kernels import attention, cli, scaffold, specs, verify

from .models.tiny_models import DECODERS


def run(*arguments: object):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments], env={"COLUMNS": "200"})


def test_the_folder_is_a_kernel_in_source_layout(tmp_path):
    done = run("init", "their-attention", "--org", "acme", "--folder", tmp_path)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "their-attention"
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "build.toml", "CARD.md", "spec.toml", "torch-ext/their_attention/__init__.py",
        "torch-ext/their_attention/attention.py",
    }  # fmt: skip
    from kernels._rust import Build

    Build.open(folder)  # kernel-builder's own reader
    assert 'repo-id = "acme/their-attention"' in (folder / "build.toml").read_text()
    spec = specs.read_spec(folder)
    assert (spec.name, spec.module) == ("their-attention", "their_attention")
    assert not [path for path in folder.rglob("*") if path.is_file() and "my-" in path.read_text()]


def test_nothing_is_overwritten(tmp_path):
    folder = scaffold.write_kernel("one-kernel", tmp_path)
    (folder / "spec.toml").write_text("mine")
    done = run("init", "one-kernel", "--folder", tmp_path)
    assert done.exit_code == 2 and "exists; nothing was written" in done.output
    assert (folder / "spec.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("My_Kernel",), "'My_Kernel' must be lower-case letters"),
        (("x",), "at least two"),
        (("-x",), "No such option"),
        (("../up",), "'../up' must be lower-case"),
        (("class",), "'class' is a Python keyword"),
        (("good", "--org", "a/b"), "organisation 'a/b'"),
        (("good", "--folder", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_names_that_cannot_be(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    done = run("init", *arguments)
    assert done.exit_code == 2 and says in " ".join(done.output.split()), done.output
    assert list(tmp_path.iterdir()) == []


def few(monkeypatch, *names: str) -> None:
    chosen = [case for case in verify.parity_cases(large=False) if case.name in names]
    assert len(chosen) == len(names)
    monkeypatch.setattr(verify, "parity_cases", lambda large: chosen)


SOME = ("causal bfloat16 D64", "softcap", "sinks and window", "holes in the padding", "no mask, full float32 D128",
        "192/128 (MLA)", "head size 512")  # fmt: skip


@pytest.mark.thorough
def test_it_passes_verify_at_once(tmp_path, alone, monkeypatch):
    few(monkeypatch, *SOME)
    folder = scaffold.write_kernel("init-kernel", tmp_path)
    done = run("verify", folder, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0, [each for each in document["results"] if not each["passed"]]
    assert document["kernel"] == "init-kernel" and document["what"] == "emulated on CPU"
    assert {each["name"]: each["refused"] for each in document["results"] if each["refused"]} == {
        "head size 512": "head_dim", "gradients": "gradients",
    }  # fmt: skip
    assert document["claims"] == {
        "dtypes": ["float32", "bfloat16"], "masks": ["none", "ranges", "ranges+validity"], "max_head_dim": 192, "gqa": True,
        "v_head_dim_may_differ": True, "softcap": True, "sinks": True, "gradients": False, "any_length": True,
        "unproved": [],
    }  # fmt: skip


@pytest.mark.slow
def test_it_passes_the_whole_suite(tmp_path, alone):
    report = verify.verify(kernel=specs.read_spec(scaffold.write_kernel("whole-kernel", tmp_path)))
    assert report.passed and len(report.results) == verify.checks("cpu")
    assert report.claims is not None and report.claims.max_head_dim == 256 and report.claims.unproved == ()


@pytest.mark.thorough
def test_what_is_declared_and_wrong_is_not_claimed(tmp_path, alone, monkeypatch):
    few(monkeypatch, *SOME)
    folder = scaffold.write_kernel("wrong-kernel", tmp_path)
    code = folder / "torch-ext" / "wrong_kernel" / "attention.py"
    text = code.read_text()
    for right, wrong in (
        ("softcap * jnp.tanh(s / softcap)", "s"),  # no softcap
        ("sinks.astype(jnp.float32)", "0.0 * sinks.astype(jnp.float32)"),  # sinks not read
    ):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    code.write_text(text)
    done = run("verify", folder)
    assert done.exit_code == 1 and "softcap = false" in done.stdout and "sinks = false" in done.stdout
    assert "gqa = true" in done.stdout and 'masks = ["none", "ranges", "ranges+validity"]' in done.stdout
    assert "declared, but not proved here: softcap, sinks" in " ".join(done.stdout.split())


def test_somebody_elses_kernel_serves_a_model(tmp_path, alone, monkeypatch):
    scaffold.write_kernel("served-kernel", tmp_path)
    monkeypatch.setenv("TPU_KERNELS_SPECS", str(tmp_path))
    try:
        assert tpu_kernels.register().kernels[-1] == "served-kernel"
        tpu_kernels.register("tpu_theirs", kernels=("served-kernel",), strict=True)
        model = DECODERS["llama"].build("tpu_theirs")
        ids = torch.arange(3, 25).reshape(2, 11)
        padding = torch.ones_like(ids)
        padding[1, :4] = 0
        got = {}
        for name in ("tpu_theirs", "tpu_attention", "eager"):
            model.set_attn_implementation(name)
            tpu_kernels.reset()
            with torch.no_grad():
                got[name] = model(ids, attention_mask=padding).logits[padding.bool()]
            if name != "eager":
                kernel = "served-kernel.forward" if name == "tpu_theirs" else "range-attention.decode"
                assert {row.route for row in tpu_kernels.explain(model).rows} == {kernel}
        torch.testing.assert_close(got["tpu_theirs"], got["eager"], atol=2e-6, rtol=0)
        torch.testing.assert_close(got["tpu_attention"], got["eager"], atol=2e-6, rtol=0)
    finally:
        tpu_kernels.unregister("tpu_theirs")
        attention.set_strict(False)


def test_a_repository_that_is_none(alone):
    done = run("verify", "no-such-kernel")
    assert done.exit_code == 2 and "neither an installed kernel (range-attention" in done.output
    done = run("verify", "acme/kernel@main")
    assert done.exit_code == 2 and "'main' must be a version, such as v1, or a full commit id" in done.output
