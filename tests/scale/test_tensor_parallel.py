"""Tensor parallelism for real: models loaded with DistributedConfig by 2 and 4 gloo processes, kernels emulated on CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import tpu_kernels
from tests.models.tiny_models import TinyModel
from tpu_kernels import tensor_parallel, tuning
from tpu_kernels.ledger import Explanation, Row

from .launch import WORKERS, torchrun

_GEOMETRY = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}
_SINKS_PLAN = {
    f"model.layers.*.self_attn.{name}": style
    for name, style in (
        ("q_proj", "colwise"), ("k_proj", "colwise"), ("v_proj", "colwise"), ("o_proj", "rowwise"), ("sinks", "colwise"),
    )
}  # fmt: skip
# name: (model, tp_plan given to DistributedConfig)
CASES = {
    "llama": (TinyModel("llama", _GEOMETRY), None),
    "qwen3": (TinyModel("qwen3", _GEOMETRY), None),
    "glm4": (TinyModel("glm4", _GEOMETRY), None),
    "gpt_oss, sinks split": (
        TinyModel("gpt_oss", {**_GEOMETRY, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}),
        _SINKS_PLAN,
    ),
    "llama, tied": (TinyModel("llama", {**_GEOMETRY, "tie_word_embeddings": True}), None),
    "glm4, 1 KV head, replicated": (TinyModel("glm4", {**_GEOMETRY, "num_key_value_heads": 1}), "replicate"),
    "glm4, 1 KV head": (TinyModel("glm4", {**_GEOMETRY, "num_key_value_heads": 1}), None),
}
LENGTH, PADS = 12, (0, 5)


def save(folder: Path, tiny: TinyModel, plan) -> None:
    """The model, and what it gives in one process with the same attention."""
    model = tiny.build("tpu_attention")
    # Sinks and norms start equal in every head; then a wrong split would not show.
    make = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "norm.weight")):
            parameter.data.add_(torch.randn(parameter.shape, generator=make) * 0.5)
    folder.mkdir()
    model.save_pretrained(folder / "model")
    ids = torch.randint(3, 120, (len(PADS), LENGTH), generator=make)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(PADS):
        mask[row, :pad] = 0
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    model.train()
    model(ids, attention_mask=mask).logits.square().mean().backward()
    expected = {"ids": ids, "mask": mask, "logits": logits, "tokens": tokens}
    torch.save({**expected, "gradient": model.model.layers[0].self_attn.q_proj.weight.grad}, folder / "expected.pt")
    (folder / "case.json").write_text(json.dumps({"tp_plan": plan}))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_equal_to_the_single_process(processes, tmp_path):
    tpu_kernels.register()
    saved, reports_folder = tmp_path / "saved", tmp_path / "reports"
    saved.mkdir()
    reports_folder.mkdir()
    for name, (tiny, plan) in CASES.items():
        save(saved / name, tiny, plan)
    reports, output = torchrun(
        WORKERS / "tensor_parallel.py", processes, str(saved), *CASES, "dtensors", folder=reports_folder, timeout=1800
    )
    assert len(reports) == processes, output
    table = Table("model", "heads (query/KV) here", "largest", "logit error", "tokens dynamic/static",
                  "gradient error,\nrelative", "fell back",
                  title=f"{processes} processes against one; emulated on CPU, gloo")  # fmt: skip
    for name in CASES:
        told = reports[0][name]
        if "error" in told:
            table.add_row(name, told["error"][:100] + "...")
            continue
        same = "/".join("same" if told[cache] else "DIFFERENT" for cache in ("dynamic", "static"))
        gradient = told["gradient"] / told["largest gradient"]
        heads = "/".join(map(str, told["seen"]["heads"]))
        table.add_row(name, heads, f"{told['largest']:.1f}", f"{told['logits']:.1e}", same, f"{gradient:.1e}",
                      f"{told['fallbacks']} of {told['calls']}")  # fmt: skip
    Console(width=150).print(table)

    for told in reports:
        for name in CASES.keys() - {"glm4, 1 KV head"}:
            case = told[name]
            assert "error" not in case, case["trace"]
            # One process and several add the same float32 products in another order.
            assert case["logits"] <= 2e-6 * max(1.0, case["largest"]), name
            assert case["gradient"] <= 1e-4 * case["largest gradient"], name
            assert case["dynamic"] and case["static"], name
            assert case["fallbacks"] == 0 and case["calls"] > 0, name
            assert case["merged"]["ranks"] == processes and case["merged"]["notes"] == []
            assert case["merged"]["calls"] == processes * case["calls"]
            assert f"({processes} processes)" in case["merged"]["text"]
            whole = name.endswith("replicated")
            assert case["seen"]["heads"] == ([8, 1] if whole else [8 // processes, 4 // processes]), name
            assert case["seen"]["kinds"] == ["Tensor"] * 3
        assert told["gpt_oss, sinks split"]["seen"]["sinks"] == "DTensor"
        assert set(told["glm4, 1 KV head, replicated"]["plan"].values()) == {"replicate"}
        error = told["glm4, 1 KV head"]["error"]
        assert "8 query heads and 1 KV heads do not divide" in error and "tensor_parallel_plan" in error, error

        attended = told["dtensors"]
        for name, heads in (("split", 8 // processes), ("replicated", 8)):
            assert attended[name]["kind"] == "DTensor" and attended[name]["local heads"] == heads
            assert attended[name]["error"] <= 1e-6 and attended[name]["gradient error"] <= 1e-5
        assert "Shard(dim=2)" in attended["lengths split"] and "replicate them" in attended["lengths split"]
        assert "key plain" in attended["keys plain"]


def config(**changes):
    tiny = TinyModel("glm4", {**_GEOMETRY, **changes})
    return tiny.build("sdpa").config


def test_the_plan_replicates_attention_only_where_heads_do_not_divide():
    assert tpu_kernels.tensor_parallel_plan(config(), 4) is None
    assert tpu_kernels.tensor_parallel_plan(config(num_key_value_heads=1), 1) is None
    plan = tpu_kernels.tensor_parallel_plan(config(num_key_value_heads=2), 4)
    assert plan == {f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"}


def test_a_norm_on_the_heads_is_replicated_with_them():
    qwen3 = TinyModel("qwen3", {**_GEOMETRY, "num_key_value_heads": 1}).build("sdpa").config
    assert tpu_kernels.tensor_parallel_plan(qwen3, 2)["model.layers.*.self_attn.q_norm"] == "replicate"


def test_plans_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="tp_size=0"):
        tpu_kernels.tensor_parallel_plan(config(), 0)
    with pytest.raises(ValueError, match="ViTConfig"):
        tpu_kernels.tensor_parallel_plan(AutoConfig.for_model("vit"), 2)


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        (None, True),
        ({"model.layers.*.mlp.down_proj": "replicate"}, True),
        ({f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"}, False),
        ({}, False),
    ],
)
def test_the_first_mask_tells_of_heads_that_do_not_divide(plan, refused):
    """Before the projections, whose own error names neither heads nor plan."""
    tpu_kernels.register()
    model = TinyModel("glm4", {**_GEOMETRY, "num_key_value_heads": 1}).build("tpu_attention")
    model.config.distributed_config = DistributedConfig(tp_size=2, tp_plan=plan)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        if refused:
            with pytest.raises(ValueError, match="1 KV heads do not divide by tp_size=2.*tensor_parallel_plan"):
                model(ids)
        else:
            model(ids)


@pytest.mark.parametrize(("plan", "refused"), [(None, True), ("replicate", False)])
def test_loading_tells_of_heads_that_do_not_divide(plan, refused, tmp_path, monkeypatch):
    """Before any weight is read. The step that splits is replaced: one process has no mesh."""
    one = config(num_key_value_heads=1)
    TinyModel("glm4", {**_GEOMETRY, "num_key_value_heads": 1}).build("sdpa").save_pretrained(tmp_path)
    tpu_kernels.unregister()
    split = []
    monkeypatch.setattr(
        PreTrainedModel, "maybe_distribute_model", classmethod(lambda cls, model, *_: split.append(cls) or model)
    )
    monkeypatch.setattr(PreTrainedModel, "prepare_distribute_model", lambda given, device_map=None: (given, None, None))
    plan = tpu_kernels.tensor_parallel_plan(one, 2) if plan == "replicate" else plan

    def load(attention):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation=attention, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan)
        )

    tpu_kernels.register()
    try:
        if refused:
            with pytest.raises(ValueError, match="1 KV heads do not divide by tp_size=2.*tensor_parallel_plan"):
                load("tpu_attention")
            assert split == []
        else:
            load("tpu_attention")
            assert len(split) == 1
        load("sdpa")
        assert len(split) == 1 + (not refused)
    finally:
        tpu_kernels.unregister()
        assert PreTrainedModel.maybe_distribute_model.__func__.__name__ == "<lambda>"
        monkeypatch.undo()
        tpu_kernels.register()


def test_tied_embeddings_on_a_tpu_host_are_told(monkeypatch):
    monkeypatch.setattr(tuning, "attached_chip", lambda: "TPU v6e")
    with pytest.warns(UserWarning, match="tie_word_embeddings with tp_size > 1"):
        tpu_kernels.tensor_parallel_plan(config(tie_word_embeddings=True), 2)


def table_of(*rows, masks=None) -> Explanation:
    return Explanation(tuple(Row(*row) for row in rows), masks or {}, ())


def test_merged_tables_add_up_and_name_the_rank_that_differs():
    usual = ("layers.0", "range-attention.forward", "kernel", "", "cpu", 3, 1)
    other = ("layers.0", "sdpa", "dense_mask", "bool", "cpu", 3, 0)
    tables = [table_of(usual, masks={"odd": 1}), table_of(other, masks={"odd": 2}), table_of(usual)]
    merged = tensor_parallel.merge_explanations(tables)
    assert merged.ranks == 3 and merged.masks == {"odd": 3}
    assert merged.rows == (Row(*usual[:5], calls=6, traced=2), Row(*other[:5], calls=3, traced=0))
    assert merged.notes == (
        "rank 1 differs from most ranks: layers.0 ran on sdpa (dense_mask), 3 calls and 0 traced",
    )
    assert "(3 processes)" in str(merged) and "rank 1 differs" in str(merged)


def test_a_rank_that_never_called_is_named():
    usual = ("layers.0", "range-attention.forward", "kernel", "", "cpu", 3, 1)
    merged = tensor_parallel.merge_explanations([table_of(usual), table_of(usual), table_of()])
    assert "rank 2" in merged.notes[0] and "did not run" in merged.notes[0]


def test_there_is_nothing_to_gather_in_one_process():
    with pytest.raises(RuntimeError, match="not initialised"):
        tpu_kernels.gather_explanations()
    with pytest.raises(ValueError, match="at least one"):
        tpu_kernels.merge_explanations([])
