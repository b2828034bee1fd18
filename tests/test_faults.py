"""The faults of docs/faults.md: each test that the page names exists. Then the cases of them that have no other place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from transformers import StaticCache

import tpu_kernels
from tpu_kernels import masks
from tpu_kernels.attention import tpu_attention

from .models.test_models import LENGTH, NEW, generate, prompts
from .models.tiny_models import DECODERS
from .test_attention import Layer, close, only_row, tensors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "faults.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if re.match(r"\| *\d+ ", line)]


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register()
    tpu_kernels.reset()


def test_the_page_counts_what_it_lists():
    assert [int(row[0]) for row in ROWS] == list(range(1, 49)) and all(len(row) == 4 for row in ROWS)
    counts = {verdict: sum(row[3].startswith(verdict) for row in ROWS) for verdict in ("shown", "in part", "none")}
    assert sum(counts.values()) == 48
    told = re.search(r"(\d+) shown, (\d+) in part, (\d+) none", PAGE)
    assert told is not None and [int(each) for each in told.groups()] == list(counts.values())
    assert all(("::" in row[2]) == (not row[3].startswith("none")) for row in ROWS)


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`([\w/]+\.py)((?:::\w+)?)`", PAGE)
    assert len(named) > 48 and all(test for _, test in named)
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test[2:] in found and test.startswith("::test_"), f"{file}{test}"


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", ["kernel", "disabled"])
def test_a_reused_cache_with_poison_in_its_slots(route, name, poison, monkeypatch):
    """A static cache that served a longer prompt, every slot overwritten by poison: tokens are those of a fresh start."""
    if route == "disabled":
        monkeypatch.setenv("TPU_KERNELS_DISABLE", "1")
    ids, mask = prompts((0, 3, 7))
    model = DECODERS[name].build("tpu_attention")
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 2 * NEW)

    def run(ids, mask):
        with torch.no_grad():
            return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW,
                                  do_sample=False, disable_compile=True)  # fmt: skip

    run(ids, mask)
    cache.reset()
    for layer in cache.layers:
        layer.keys.fill_(poison), layer.values.fill_(poison)
    short, short_mask = ids[:, 2:], mask[:, 2:]
    want = generate(DECODERS[name].build("eager"), short, short_mask, "dynamic")
    tpu_kernels.reset()
    assert torch.equal(run(short, short_mask), want.sequences)
    assert {row.reason for row in tpu_kernels.explain(model).rows} == {route}


SEEN = torch.rand(2, 8, 12, generator=torch.Generator().manual_seed(1)) < 0.6
SEEN[:, :, 0] = True
SEEN[0, :, [3, 10, 11]] = False
SEEN[1, :, 7:] = False
RANGES = masks.encode_ranges(torch.zeros(2, 8), torch.tensor([[9], [7]]).expand(2, 8), SEEN.any(1), 12)
FREE = ~masks.expand_range_mask(RANGES, 8, 12).any(2)[..., None]
ROUTES = {  # reason: (mask, other arguments)
    "dropout": (RANGES, {"dropout": 1e-12}),
    "position_bias": (RANGES, {"position_bias": torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(2))}),
    "output_attentions": (RANGES, {"output_attentions": True}),
    "unknown_kwarg": (RANGES, {"softcap": 3.0, "s_aux": torch.zeros(4), "wobble": 1}),
    "dense_mask": (SEEN[:, None], {}),
    "selected_keys": (RANGES, {"indices": torch.arange(1, 6).expand(2, 8, 5)}),
    "batch_broadcast": (RANGES, {}),
    "dtype": (None, {}),  # causal, with keys that no query reaches
}


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("reason", ROUTES)
def test_poison_in_free_slots_of_calls_that_fall_back(reason, poison):
    """Output and gradients are those with zeros there, bit by bit."""
    mask, extra = ROUTES[reason]
    q, k, v = tensors(8, 12, dtype=torch.float16 if reason == "dtype" else torch.float32)
    q = q[:1] if reason == "batch_broadcast" else q
    free = {"dense_mask": ~SEEN.any(1)[:, None, :, None], "dtype": (torch.arange(12) >= 8)[:, None]}.get(reason, FREE)
    results = []
    for slots in (0.0, poison):
        inputs = [q.clone(), k.masked_fill(free, slots), v.masked_fill(free, slots)]
        for each in inputs:
            each.requires_grad_()
        torch.manual_seed(0)
        out, _ = tpu_attention(Layer(), *inputs, mask, **extra)
        out.float().square().sum().backward()
        results.append([out, *(each.grad for each in inputs)])
    assert only_row().reason == reason
    for zeros, poisoned in zip(*results, strict=True):
        assert torch.equal(zeros, poisoned) and zeros.isfinite().all()


def test_bfloat16_weights_add_up_to_one_over_many_keys():
    """Ones averaged over more keys than bfloat16 can count (256), and than int16 can number."""
    q, k, _ = (x[:1].bfloat16() for x in tensors(1, 40000))
    got, _ = tpu_attention(Layer(), q, k, torch.ones_like(k), None)
    assert (got.float() - 1).abs().max() <= torch.finfo(torch.bfloat16).eps
    assert only_row().reason == "kernel"


@pytest.mark.parametrize("edge", [32767, 32768, 65536])
def test_positions_past_16_bits(edge):
    """The visible keys lie on both sides of the edge; what lies one further on either side would show."""
    q, k, v = (x[:1] for x in tensors(1, edge + 300))
    starts, ends = torch.tensor([[edge - 2]]), torch.tensor([[edge + 2]])
    v[:, :, edge - 3], v[:, :, edge + 2] = 1e6, -1e6
    valid = torch.ones(1, edge + 300, dtype=torch.bool)
    valid[:, edge] = False
    mask = masks.encode_ranges(starts, ends, valid, edge + 300)
    got, _ = tpu_attention(Layer(), q, k, v, mask)
    seen = torch.tensor([edge - 2, edge - 1, edge + 1])
    want = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, seen], v[:, :, seen], enable_gqa=True)
    close(got, want.transpose(1, 2))
    assert only_row().reason == "kernel"
