"""`tpu-kernels plan`: bad input, small models end to end, and the published geometries."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpu_kernels import cli
from tpu_kernels.cli_plan import layers_in_short
from tpu_kernels.offdevice import plan as planning
from tpu_kernels.offdevice.plan import Plan, PlanError, Row, make_plan, read_config

CONFIGS = Path(__file__).with_name("configs")
QWEN = CONFIGS / "qwen3-0.6b.json"
TINY = {
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 8192,
}


def invoke(*arguments: object):
    # Wide, so that messages are not broken where a test looks for their words.
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((QWEN, "--target", "v3"), "unknown TPU generation 'v3': libtpu can compile ahead of time for v4, v5e"),
        (("/no/such/folder",), "MODEL '/no/such/folder': no such file or folder"),
        (("missing.json",), "MODEL 'missing.json': no such file or folder"),
        ((QWEN, "--batch", 0), "batch is 0; it must be at least 1"),
        ((QWEN, "--prompt", -1), "prompt is -1; it must be at least 1"),
        ((QWEN, "--new-tokens", 0), "new_tokens is 0; it must be at least 1"),
        ((QWEN, "--dtype", "int8"), "dtype is 'int8'; supported: bfloat16, float32, float16"),
        ((QWEN, "--plot", "picture.txt"), "picture.txt is none of .png, .svg, .pdf"),
        ((QWEN, "--plot", "/no/such/folder/a.png"), "/no/such/folder is not a folder"),
    ],
)
def test_bad_arguments_are_refused_with_the_remedy(arguments, text):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "is a folder without config.json"),
        ("{", "is not JSON"),
        ("[1]", "has no model_type"),
        ('{"hidden_size": 8}', "has no model_type"),
    ],
)
def test_bad_configurations_are_refused(tmp_path, content, text):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match=text):
        read_config(str(tmp_path))


def test_a_name_on_the_hub_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PlanError, match="cannot be had from the Hub .*: give a folder"):
        read_config("no-such-org/no-such-model")


def test_a_folder_and_a_file_are_the_same_configuration(tmp_path):
    (tmp_path / "config.json").write_text(QWEN.read_text())
    assert read_config(str(tmp_path)) == read_config(str(QWEN)) == json.loads(QWEN.read_text())


def test_layers_are_named_in_short():
    names = [f"model.layers.{index}.self_attn" for index in (0, 1, 2, 4, 6, 7)]
    assert layers_in_short(names) == "6: model.layers.0-2,4,6-7.self_attn"
    assert layers_in_short(["encoder.layers.0.attn", "decoder.layers.0.attn"]) == (
        "2: encoder.layers.0.attn, decoder.layers.0.attn"
    )
    assert layers_in_short(["LlamaAttention"]) == "1: LlamaAttention"


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize(("heads", "length"), [((32, 8), 4096), ((64, 8), 32768), ((7, 7), 131072), ((16, 8), 1)])
def test_what_is_estimated_in_part_is_scaled_to_the_whole(batch, heads, length):
    q_heads, kv_heads = heads
    call = {"request": {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": length, "kv_len": length}}
    part_batch, part_heads = planning.reduced(call)
    cut, times = planning._smaller(call, part_batch, part_heads)
    q = cut([batch, q_heads, length, 128])
    k = cut([batch, kv_heads, length, 64])
    assert q[0] == k[0] and q[1] % k[1] == 0 and q[1] // k[1] == q_heads // kv_heads
    assert times * q[0] * q[1] == batch * q_heads
    assert times == 1 or length > 1
    assert cut([q_heads]) == (q[1],)  # sinks


def made(**changes) -> Plan:
    row = {
        "phase": "prefill", "layers": ("model.layers.0.self_attn",), "query": (1, 4, 8, 64), "key": (1, 2, 8, 64),
        "value": (1, 2, 8, 64), "sees": "causal", "mask": "causal", "softcap": False, "sinks": True,
        "route": "range-attention.forward", "reason": "kernel", "sentence": "The call ran on the kernel.", "remedy": "",
        "compiled": True, "error": "", "vmem_bytes": 2**20, "temp_bytes": 0, "kernel_seconds": 1e-3,
        "sdpa_seconds": 2e-3, "sdpa_temp_bytes": 2**21, "sdpa_error": "",
    }  # fmt: skip
    return Plan("llama", "v6e", 1, 8, 1, "bfloat16", 8, (Row(**{**row, **changes}),), ("a note",), ())


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, 0, ["range-attention.forward", "compiles", "1.000", "2.000", "(0.50)", "sees causal, sinks", "a note"]),
        ({"compiled": False, "error": "compile: too much VMEM"}, 1, ["does not compile: compile: too much VMEM"]),
        ({"kernel_seconds": None, "error": "took too long"}, 0, ["no estimate: took too long"]),
        (
            {"route": "sdpa", "reason": "dtype", "sentence": "It is float16.", "remedy": "Load in bfloat16."},
            0,
            ["sdpa (dtype)", "It is float16. Load in bfloat16.", "(1.00)"],
        ),
    ],
)
def test_table_json_and_exit_code(monkeypatch, tmp_path, changes, code, words):
    plan = made(**changes)
    monkeypatch.setattr(planning, "make_plan", lambda config, **_: plan)
    picture = tmp_path / "plan.svg"
    shown = invoke(QWEN, "--plot", picture)
    assert shown.exit_code == code
    for word in words:
        assert word in shown.output.replace("\N{NO-BREAK SPACE}", " ")
    assert picture.read_text().startswith("<?xml")
    listed = invoke(QWEN, "--json")
    assert listed.exit_code == code
    document = json.loads(listed.stdout)
    assert document["ok"] is (code == 0)
    assert document["estimate"] == "static schedule"
    assert document["attention_seconds"]["prefill"]["sdpa_seconds"] == 2e-3


@pytest.mark.slow
def test_a_small_model_of_two_layer_types():
    """Every layer is listed once a phase, under the mask that its type has."""
    told: list[str] = []
    plan = make_plan(TINY, target="v6e", batch=2, prompt=4096, new_tokens=256, progress=told.append)
    assert plan.ok, plan
    assert not plan.failures and not plan.notes
    assert plan.decode_position == 4224
    rows = {(row.phase, row.layers): row for row in plan.rows}
    sliding = tuple(f"layers.{index}.self_attn" for index in (0, 1))
    for phase in ("prefill", "decode"):
        mine = {
            tuple(name.removeprefix("model.") for name in layers): row
            for (where, layers), row in rows.items()
            if where == phase
        }
        assert set(mine) == {sliding, ("layers.2.self_attn",)}
        windowed, full = mine[sliding], mine["layers.2.self_attn",]
        assert windowed.sees == ("a window of 256" if phase == "prefill" else "256 of 256 slots")
        assert full.sees == ("causal" if phase == "prefill" else "4225 of 4352 slots")
        for row in (windowed, full):
            assert row.route == f"range-attention.{'forward' if phase == 'prefill' else 'decode'}"
            assert row.on_kernel and not row.error and row.vmem_bytes > 0
            assert row.query[:2] == (2, 4) and row.key[:2] == (2, 2)
            assert row.kernel_seconds is not None and row.sdpa_seconds is not None, row.sdpa_error
            assert 1e-6 < row.kernel_seconds < 1e-3
        assert windowed.kernel_seconds < full.kernel_seconds
        total = plan.total(phase)
        assert total == pytest.approx(2 * windowed.kernel_seconds + full.kernel_seconds)
    assert told[0].startswith("tracing gemma3_text")
    assert sum("compiled" in line for line in told) == 8  # four calls, on the kernel and on SDPA


@pytest.mark.slow
def test_a_dtype_without_a_kernel_and_an_encoder():
    config = {
        "model_type": "bert", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 448, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }  # fmt: skip
    plan = make_plan(config, target="v5e", prompt=512, new_tokens=8, dtype="float16")
    (row,) = plan.rows
    assert (row.phase, row.route, row.reason) == ("prefill", "sdpa", "dtype")
    assert "bfloat16" in row.remedy
    assert row.compiled and row.kernel_seconds is None and row.seconds == row.sdpa_seconds
    assert any("an encoder" in note for note in plan.notes) and any("512" in note for note in plan.notes)
    assert plan.ok


@pytest.mark.slow
def test_an_encoder_with_a_decoder():
    config = {
        "model_type": "whisper", "vocab_size": 320, "d_model": 256, "encoder_layers": 2, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 448, "decoder_ffn_dim": 448,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    plan = make_plan(config, target="v6e", prompt=4, new_tokens=128)
    assert plan.ok and not plan.failures, plan
    calls = {(row.phase, row.layers): (row.query[2], row.key[2], row.sees) for row in plan.rows}
    own, cross = ("model.decoder.layers.0.self_attn",), ("model.decoder.layers.0.encoder_attn",)
    assert calls == {
        ("prefill", tuple(f"model.encoder.layers.{layer}.self_attn" for layer in (0, 1))): (1500, 1500, "all 1500 keys"),
        ("prefill", own): (4, 4, "causal"),
        ("prefill", cross): (4, 1500, "all 1500 keys"),
        ("decode", own): (1, 132, "69 of 132 slots"),
        ("decode", cross): (1, 1500, "all 1500 keys"),
    }
    assert all(row.seconds for row in plan.rows)


@pytest.mark.slow
def test_what_cannot_be_traced_is_told():
    broken = make_plan({"model_type": "no_such_model"}, target="v6e", prompt=8, new_tokens=8)
    assert not broken.ok and len(broken.failures) == 2
    assert "build" in broken.failures[0] and "no_such_model" in broken.failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3-8b"])
def test_published_geometries(name, target, capsys):
    started = time.monotonic()
    plan = make_plan(read_config(str(CONFIGS / f"{name}.json")), target=target, batch=8, prompt=4096, new_tokens=512)
    seconds = time.monotonic() - started
    assert plan.ok, plan
    prefill, decode = plan.rows
    layers = {"qwen3-0.6b": 28, "llama-3-8b": 32}[name]
    assert len(prefill.layers) == len(decode.layers) == layers
    ratios = [plan.total(phase) / plan.total(phase, sdpa=True) for phase in ("prefill", "decode")]
    with capsys.disabled():
        print(
            f"\n{name} on {target}, batch 8, prompt 4096: prefill {ratios[0]:.2f}, decode {ratios[1]:.2f} of SDPA's time "
            f"(static schedule); VMEM {prefill.vmem_bytes / 2**20:.1f} MiB, temp {prefill.temp_bytes / 2**20:.1f} MiB, "
            f"SDPA's temp {prefill.sdpa_temp_bytes / 2**20:.1f} MiB; planned in {seconds:.0f} s"
        )
    for row in plan.rows:
        assert row.on_kernel and row.kernel_seconds < row.sdpa_seconds, row
