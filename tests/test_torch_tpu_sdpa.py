"""What torch_tpu's compiler makes of the SDPA that calls fall back to: its pass that makes `is_causal` of causal masks.

The pass itself is run, on graphs of our fallback, and the graph after it on the CPU. Dynamo hands it fake inputs, so that it
sees the masks alone that a graph makes of positions.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_kernels import fallback, masks

S, DIM = 8, 16
ROWS, KEYS = torch.arange(S)[:, None], torch.arange(S)[None]


@pytest.fixture(scope="module")
def rewrite():
    return pytest.importorskip("torch_tpu._internal.compile.fx_passes.detect_causal_mask").apply


def inputs(q_len=S, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    make = lambda heads, length: torch.randn(2, heads, length, DIM, generator=generator).to(dtype)  # noqa: E731
    return make(4, q_len), make(2, S), make(2, S)


def graph_of(attend, given):
    """The graph that the compiler gets, and the fake inputs that Dynamo gives with it."""
    graph = make_fx(attend, tracing_mode="fake", pre_dispatch=True)(*given)
    mode = FakeTensorMode()
    return graph, [mode.from_tensor(each) for each in given]


def causal_flags(graph):
    flags = []
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
            flags.append((mask is not None, bool(causal)))
    assert flags
    return flags


def positions(q_len=S):
    """Made in the graph, as masks of transformers are."""
    return torch.arange(q_len)[:, None], torch.arange(S)[None]


def added(seen, hidden):
    return torch.zeros(seen.shape).masked_fill(~seen, hidden)


# Masks that a graph makes of nothing but positions: rewritten or not, the result must stay.
MADE = {
    "causal": (lambda r, k: k <= r, True),
    "causal, -inf": (lambda r, k: added(k <= r, float("-inf")), True),
    "causal, lowest": (lambda r, k: added(k <= r, torch.finfo(torch.float32).min), True),
    "one key more": (lambda r, k: k <= r + 1, False),
    "one key less": (lambda r, k: (k < r) | (r == 0), False),
    "window": (lambda r, k: (k <= r) & (k > r - S + 1), False),
    "an image": (lambda r, k: (k <= r) | ((r >= 2) & (r < 5) & (k >= 2) & (k < 5)), False),
    "prefix": (lambda r, k: (k <= r) | (k < 3), False),
    "left padding": (lambda r, k: (k <= r) & (k > 0), False),
    "one hole": (lambda r, k: (k <= r) & ~((r == S - 1) & (k == 3)), False),
    "a bias below": (lambda r, k: added(k <= r, float("-inf")) - 0.01 * (r - k).clamp(min=0), False),
    "documents": (lambda r, k: (k <= r) & ((k < 4) == (r < 4)), False),
}


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("kind", MADE)
def test_only_masks_that_are_causal_are_rewritten(kind, scale, rewrite):
    make, causal = MADE[kind]

    def attend(q, k, v):
        return fallback.sdpa(q, k, v, make(*positions())[None, None], causal=False, scale=scale)

    given = inputs()
    graph, fake = graph_of(attend, given)
    assert causal_flags(graph) == [(True, False)]
    want = graph(*given)
    rewrite(graph, fake)
    assert causal_flags(graph) == [(not causal, causal)]
    torch.testing.assert_close(graph(*given), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("differs", ["batch", "head"])
def test_masks_that_differ_are_kept(differs, rewrite):
    def attend(q, k, v):
        causal = torch.ones(S, S, dtype=torch.bool).tril()
        other = causal & (torch.arange(S) > 0) | torch.eye(S).bool()
        mask = torch.stack((causal, other))
        mask = mask[:, None] if differs == "batch" else mask.repeat(2, 1, 1)[None]
        return fallback.sdpa(q, k, v, mask, causal=False, scale=0.25)

    given = inputs()
    graph, fake = graph_of(attend, given)
    want = graph(*given)
    rewrite(graph, fake)
    assert causal_flags(graph) == [(True, False)]
    assert torch.equal(graph(*given), want)


@pytest.mark.parametrize("kind", ["bool", "float", "ranges"])
def test_a_mask_that_is_an_input_is_never_taken_for_causal(kind, rewrite):
    """The first call's mask is causal, the next one's is not: one program serves both."""
    causal = KEYS <= ROWS
    padded = causal & (KEYS > 0)
    make = {
        "bool": lambda seen: seen[None, None],
        "float": lambda seen: added(seen, float("-inf"))[None, None],
        "ranges": lambda seen: masks.encode_ranges(
            seen.int().argmax(-1)[None], torch.where(seen.any(-1), ROWS[:, 0] + 1, 0)[None], None, S
        ),
    }[kind]

    def attend(q, k, v, mask):
        if kind == "ranges":
            mask = masks.expand_range_mask(mask, S, S)
        return fallback.sdpa(q, k, v, mask, causal=False, scale=0.25)

    given = inputs()
    graph, fake = graph_of(attend, (*given, make(causal)))
    rewrite(graph, fake)
    assert causal_flags(graph) == [(True, False)]
    for seen in (causal, padded):
        want = fallback.sdpa(*given, seen[None, None], causal=False, scale=0.25)
        torch.testing.assert_close(graph(*given, make(seen)), want, atol=1e-6, rtol=0)


def test_the_pass_does_take_a_causal_example_for_all_masks(rewrite):
    """Of real inputs in place of fake ones. When this fails, torch_tpu has changed; docs/faults.md, 22."""

    def attend(q, k, v, mask):
        return fallback.sdpa(q, k, v, mask, causal=False, scale=0.25)

    given = (*inputs(), (KEYS <= ROWS)[None, None])
    graph, _ = graph_of(attend, given)
    rewrite(graph, given)
    assert causal_flags(graph) == [(False, True)]


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("q_len", [S, S // 2, 1])
def test_causality_is_handed_over_without_a_mask(q_len, scale, rewrite):
    """At no scale is there a mask of ours that could be rewritten, and none of the keys that no query reaches."""

    def attend(q, k, v):
        return fallback.sdpa(q, k, v, None, causal=True, scale=scale)

    given = inputs(q_len)
    graph, fake = graph_of(attend, given)
    rewrite(graph, fake)
    assert causal_flags(graph) == [(False, True)]
    q, k, v = (x.double() for x in given)
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * scale).masked_fill(KEYS > ROWS[:q_len], float("-inf"))
    want = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(graph(*given).double(), want, atol=1e-6, rtol=0)
