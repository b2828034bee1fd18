"""Documents packed in one row that see each other, as transformers lets them: told once, and only then."""

from __future__ import annotations

import logging

import pytest
import torch

import tpu_kernels
from tpu_kernels import attention, masks, packing

from .models.tiny_models import DECODERS
from .test_attention import Layer

IDS = torch.arange(3, 15)[None]
PACKED = torch.cat((torch.arange(7), torch.arange(5)))[None]
ONES = torch.ones_like(IDS)


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register()
    tpu_kernels.reset()


def told(caplog):
    return [record.message for record in caplog.records if "position_ids restart" in record.message]


def run(caplog, name="llama", **inputs):
    model = DECODERS[name].build("tpu_attention")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "tpu_kernels"):
        for _ in range(2):
            logits = model(IDS, **inputs).logits
    return model, logits


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("inputs", [{"attention_mask": ONES, "use_cache": False}, {}, {"attention_mask": ONES}])
def test_packed_documents_that_see_each_other_are_told_once(name, inputs, caplog):
    model, logits = run(caplog, name, position_ids=PACKED, **inputs)
    alone = model(IDS[:, 7:], use_cache=False).logits
    assert (logits[:, 7:] - alone).abs().max() > 1e-3  # they do
    (message,) = told(caplog)
    assert message.startswith(f"{type(model.model.layers[0].self_attn).__name__}: ") and "use_cache=False" in message
    assert [message] == [note for note in tpu_kernels.explain(model).notes if "restart" in note]


@pytest.mark.parametrize(
    "inputs",
    [
        {"position_ids": PACKED, "use_cache": False},
        {"attention_mask": ONES},
        {"position_ids": PACKED, "attention_mask": torch.block_diag(ONES[:, :7] * ONES[:, :7].T, ONES[:, 7:] * ONES[:, 7:].T)
         .tril().bool()[None, None]},
        {"position_ids": torch.tensor([[1, 1, 1, *range(9)]]), "attention_mask": torch.tensor([[0] * 3 + [1] * 9])},
        {"position_ids": torch.tensor([[*range(9), 1, 1, 1]]), "attention_mask": torch.tensor([[1] * 9 + [0] * 3])},
    ],
    ids=["packed", "one document", "own mask", "left padding", "right padding"],
)  # fmt: skip
def test_nothing_is_told_where_documents_stay_apart(inputs, caplog):
    model, _ = run(caplog, **inputs)
    assert not told(caplog) and not tpu_kernels.explain(model).notes


def test_generation_and_compiled_calls_are_not_told(caplog):
    model = DECODERS["llama"].build("tpu_attention")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "tpu_kernels"):
        for mask in (ONES, torch.tensor([[0] * 3 + [1] * 9])):
            for cache in ("dynamic", "static"):
                model.generate(IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation=cache,
                               disable_compile=True)  # fmt: skip
        torch.compile(model, fullgraph=True, backend="eager")(IDS, position_ids=PACKED, attention_mask=ONES, use_cache=False)
    assert not told(caplog)


def test_away_from_the_cpu_explain_looks(caplog):
    """No value is read in the call (here: of tensors that cannot be read)."""
    with caplog.at_level(logging.WARNING, "tpu_kernels"):
        attention.LEDGER.met_positions(Layer(), PACKED.to("meta"), None, 12, 12, "tpu")
        assert not told(caplog)
        attention.LEDGER.met_positions(Layer(), PACKED, None, 12, 12, "tpu")
        assert not told(caplog)
        (note,) = tpu_kernels.explain().notes
        assert told(caplog) == [note] and note.startswith("Layer: position_ids restart")
        attention.LEDGER.met_positions(Layer(), PACKED, None, 12, 12, "tpu")
        assert tpu_kernels.explain().notes == (note,) and told(caplog) == [note]


@pytest.mark.parametrize(
    ("lows", "kv_len", "mix"),
    [
        ([0] * 12, 12, True),
        ([0] * 7 + [7] * 5, 12, False),
        ([0] * 7 + [6] * 5, 12, True),  # one key too many
        ([0] * 12, 40, True),  # a static cache, its tail free
        ([0] * 7 + [7] * 5, 40, False),
    ],
)
def test_ranges(lows, kv_len, mix):
    starts, ends = torch.tensor([lows]), torch.arange(1, 13)[None]
    for valid in (None, torch.arange(kv_len)[None] < 12):
        mask = masks.encode_ranges(starts, ends, valid, kv_len)
        assert bool(packing.documents_mix(PACKED, mask, 12, kv_len)) == mix


@pytest.mark.parametrize("kv_len", [12, 40])
def test_ranges_that_end_before_trailing_padding(kv_len):
    positions = torch.tensor([[*range(9), 1, 0, 0]])
    for ends in (torch.arange(1, 13).clamp(max=9), torch.full((12,), 9)):
        valid = torch.arange(kv_len)[None] < 9
        mask = masks.encode_ranges(torch.zeros(1, 12), ends[None], valid, kv_len)
        assert not packing.documents_mix(positions, mask, 12, kv_len)
        if kv_len == 12:
            assert packing.documents_mix(PACKED, mask, 12, kv_len)


def test_ranges_after_a_cache():
    starts = torch.tensor([[0] * 12])
    mask = masks.encode_ranges(starts, torch.arange(21, 33)[None], None, 32)
    assert packing.documents_mix(PACKED, mask, 12, 32)
    mask = masks.encode_ranges(torch.tensor([[0] * 7 + [27] * 5]), torch.arange(21, 33)[None], None, 32)
    assert not packing.documents_mix(PACKED, mask, 12, 32)
