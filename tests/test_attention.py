"""The attention function called directly: layouts, causality, options, refusals, one graph under torch.compile."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tpu_kernels
from tpu_kernels import masks
from tpu_kernels.attention import tpu_attention

B, HQ, HKV, D = 2, 4, 2, 16


class Layer(torch.nn.Module):
    """What tpu_attention reads of an attention module."""

    def __init__(self, **attributes):
        super().__init__()
        self.layer_idx = 0
        self.num_key_value_groups = HQ // HKV
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register()
    tpu_kernels.reset()
    yield
    tpu_kernels.register(strict=False)


def tensors(q_len=8, kv_len=8, dtype=torch.float32, seed=0, **shape):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *size: torch.randn(*size, generator=generator).to(dtype)  # noqa: E731
    hq, hkv, d = shape.get("hq", HQ), shape.get("hkv", HKV), shape.get("d", D)
    return make(B, hq, q_len, d), make(B, hkv, kv_len, d), make(B, hkv, kv_len, shape.get("dv", d))


def only_row():
    (row,) = tpu_kernels.explain().rows
    return row


def close(got, want, atol=2e-6):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(7, 40), (40, 7), (1, 40), (8, 8), (128, 130), (1, 1)]
)
@pytest.mark.parametrize("kwarg", [None, True, False])
@pytest.mark.parametrize("attribute", ["absent", True, False])
def test_causality_without_a_mask_is_that_of_sdpa(q_len, kv_len, kwarg, attribute):
    layer = Layer() if attribute == "absent" else Layer(is_causal=attribute)
    q, k, v = tensors(q_len, kv_len)
    want, _ = sdpa_attention_forward(layer, q, k, v, None, is_causal=kwarg)
    got, weights = tpu_attention(layer, q, k, v, None, is_causal=kwarg)
    assert got.shape == (B, q_len, HQ, D) and got.is_contiguous() and weights is None
    close(got, want)
    assert only_row().reason == "kernel"


def test_layout_where_heads_equal_length():
    q, k, v = tensors(HQ, HQ, hkv=HQ)
    close(tpu_attention(Layer(), q, k, v, None)[0], sdpa_attention_forward(Layer(num_key_value_groups=1), q, k, v, None)[0])


def test_views_as_models_pass_them():
    base = torch.randn(B, 8, HQ + 2 * HKV, D)
    q, k, v = base.split([HQ, HKV, HKV], dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    assert not q.is_contiguous()
    close(tpu_attention(Layer(), q, k, v, None)[0], sdpa_attention_forward(Layer(), q, k, v, None)[0])


@pytest.mark.parametrize("scaling", [None, 1.0, 0.3])
def test_scaling(scaling):
    q, k, v = tensors()
    want, _ = sdpa_attention_forward(Layer(), q, k, v, None, scaling=scaling)
    close(tpu_attention(Layer(), q, k, v, None, scaling=scaling)[0], want)


@pytest.mark.parametrize("extra", [{}, {"is_causal": True}, {"sliding_window": 3}])
def test_no_mask_means_every_key_to_models_that_transformers_keeps_off_sdpa(extra):
    """As eager, the only attention that they are made for, takes it."""
    model = type("Attention", (Layer,), {"__module__": "transformers.models.nllb_moe.modeling_nllb_moe"})
    q, k, v = tensors()
    close(tpu_attention(model(is_causal=True), q, k, v, None, **extra)[0],
          sdpa_attention_forward(Layer(is_causal=False), q, k, v, None)[0])  # fmt: skip


def dense_window(q_len, kv_len, window, offset=0):
    rows = torch.arange(q_len)[:, None] + offset
    keys = torch.arange(kv_len)[None]
    return ((keys <= rows) & (keys > rows - window))[None, None].expand(B, 1, q_len, kv_len)


@pytest.mark.parametrize(("q_len", "kv_len", "offset"), [(30, 30, 0), (1, 30, 29), (30, 9, 0)])
@pytest.mark.parametrize("window", [1, 5, 29, 30, 64, 0, None])
def test_a_window_without_a_mask_counts_the_query_itself(q_len, kv_len, offset, window):
    q, k, v = tensors(q_len, kv_len)
    got, _ = tpu_attention(Layer(), q, k, v, None, sliding_window=window)
    close(got, sdpa_attention_forward(Layer(), q, k, v, dense_window(q_len, kv_len, window or 1000, offset))[0])
    assert only_row().reason == "kernel"


def test_packed_bounds_without_a_mask_isolate_documents():
    q, k, v = (tensor[:1] for tensor in tensors(12, 12))
    bounds = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    segment = torch.tensor([0] * 5 + [1] + [2] * 6)
    allowed = (segment[:, None] == segment[None]) & torch.ones(12, 12, dtype=torch.bool).tril()
    got, _ = tpu_attention(Layer(), q, k, v, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=6)
    close(got, sdpa_attention_forward(Layer(), q, k, v, allowed[None, None])[0])
    full, _ = tpu_attention(Layer(is_causal=False), q, k, v, None, cu_seq_lens_q=bounds)
    close(full, sdpa_attention_forward(Layer(), q, k, v, (segment[:, None] == segment[None])[None, None])[0])


def test_packed_bounds_need_a_batch_of_one():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="batch size 2"):
        tpu_attention(Layer(), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 8]))


@pytest.mark.parametrize("kv_len", [5, 127, 128, 129])
def test_decode_with_holes_in_the_keys(kv_len):
    q, k, v = tensors(1, kv_len)
    valid = torch.rand(B, kv_len, generator=torch.Generator().manual_seed(1)) < 0.5
    starts, ends = torch.full((B, 1), 1), torch.full((B, 1), kv_len - 1)
    mask = masks.encode_ranges(starts.int(), ends.int(), valid, kv_len)
    dense = masks.expand_range_mask(mask, 1, kv_len)
    assert dense.any()
    close(tpu_attention(Layer(), q, k, v, mask)[0], sdpa_attention_forward(Layer(), q, k, v, dense)[0])
    assert only_row().route == "range-attention.decode"


def test_ranges_past_the_keys_are_clamped():
    for q_len, kv_len in ((1, 9), (64, 70), (1, 200)):
        q, k, v = tensors(q_len, kv_len)
        mask = torch.zeros(B, 1, q_len, 2, dtype=torch.int32)
        mask[..., 0], mask[..., 1] = -3, kv_len + 1000
        want, _ = sdpa_attention_forward(Layer(is_causal=False), q, k, v, None)
        close(tpu_attention(Layer(), q, k, v, mask)[0], want)


def test_mask_is_complete_and_is_causal_is_not_added():
    q, k, v = tensors()
    mask = masks.encode_ranges(torch.zeros(B, 8, dtype=torch.int32), torch.full((B, 8), 8, dtype=torch.int32), None, 8)
    want, _ = sdpa_attention_forward(Layer(is_causal=False), q, k, v, None)
    close(tpu_attention(Layer(is_causal=True), q, k, v, mask, is_causal=True)[0], want)


@pytest.mark.parametrize(
    ("kwargs", "route", "reason"),
    [
        ({"dropout": 0.5}, "sdpa", "dropout"),
        ({"position_bias": torch.randn(1, HQ, 8, 8)}, "sdpa", "position_bias"),
        ({"position_bias": torch.randn(1, HQ, 8, 8), "softcap": 3.0}, "eager", "position_bias"),
        ({"output_attentions": True}, "eager", "output_attentions"),
        ({"wobble": 3}, "sdpa", "unknown_kwarg"),
    ],
)
def test_told_fallbacks(kwargs, route, reason, caplog):
    q, k, v = tensors()
    with caplog.at_level(logging.WARNING, "tpu_kernels"):
        tpu_attention(Layer(), q, k, v, None, **kwargs)
        tpu_attention(Layer(), q, k, v, None, **kwargs)
    row = only_row()
    assert (row.route, row.reason, row.calls) == (route, reason, 2)
    assert len(caplog.records) == 1 and reason in caplog.records[0].message


def test_the_unknown_argument_is_named():
    q, k, v = tensors()
    tpu_attention(Layer(), q, k, v, None, wobble=3, wibble=torch.ones(1))
    assert only_row().detail == "wibble, wobble"


def test_position_bias_is_that_of_transformers():
    q, k, v = tensors()
    bias = torch.randn(1, HQ, 8, 8)
    for mask in (None, torch.ones(B, 1, 8, 8, dtype=torch.bool).tril()):
        want, _ = sdpa_attention_forward(Layer(), q, k, v, mask, position_bias=bias)
        close(tpu_attention(Layer(), q, k, v, mask, position_bias=bias)[0], want)


MASKED = {
    "none": (None, None),
    "ranges": (lambda dense: masks.encode_ranges(torch.zeros(B, 8).int(), torch.arange(1, 9).expand(B, 8), None, 12), True),
    "bool": (lambda dense: dense, True),
    "float": (lambda dense: torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min), True),
}


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("sinks", [False, True])
def test_keys_selected_by_index(kind, sinks):
    """Sparse attention: the selection joins the mask, as the models themselves do it for SDPA and eager."""
    q, k, v = tensors(8, 12)
    make, _ = MASKED[kind]
    causal = torch.ones(B, 1, 8, 12, dtype=torch.bool).tril()
    chosen = torch.rand(B, 8, 12, generator=torch.Generator().manual_seed(3)).topk(5).indices.int()
    seen = causal & torch.zeros(B, 8, 12, dtype=torch.bool).scatter(-1, chosen.long(), True)[:, None]
    some = seen.any(-1).expand(B, HQ, 8).transpose(1, 2)
    extra = {"s_aux": torch.zeros(HQ)} if sinks else {}
    got, _ = tpu_attention(Layer(), q, k, v, make and make(causal), indices=chosen, **extra)
    want, _ = tpu_attention(Layer(), q, k, v, seen, **extra)
    close(got[some], want[some])
    rows = {(row.route, row.reason) for row in tpu_kernels.explain().rows}
    route = "eager" if sinks else "sdpa"
    assert rows == {(route, "selected_keys"), (route, "dense_mask")}


def test_a_selection_that_nobody_can_read_is_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="indices have shape"):
        tpu_attention(Layer(), q, k, v, None, indices=torch.zeros(B, 1, 8, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="block_indices.*no indexer"):
        tpu_attention(Layer(), q, k, v, None, block_indices=torch.zeros(B, 1, 8, 3, dtype=torch.int32))
    assert not tpu_kernels.explain().rows


@pytest.mark.parametrize("argument", ["block_table", "cache", "head_mask"])
def test_arguments_that_nothing_here_honours_are_refused(argument):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=argument):
        tpu_attention(Layer(), q, k, v, None, **{argument: torch.zeros(1)})
    assert not tpu_kernels.explain().rows


def test_bookkeeping_arguments_are_ignored():
    q, k, v = tensors()
    want, _ = tpu_attention(Layer(), q, k, v, None)
    got, _ = tpu_attention(Layer(), q, k, v, None, position_ids=torch.arange(8)[None], use_cache=True, wobble=None)
    assert torch.equal(got, want)
    assert only_row().reason == "kernel"


def test_weights_are_returned_when_asked_for():
    q, k, v = tensors()
    out, weights = tpu_attention(Layer(), q, k, v, None, output_attentions=True)
    close(weights.sum(-1), torch.ones(B, HQ, 8))
    assert (weights.triu(1) == 0).all()
    close(out, sdpa_attention_forward(Layer(), q, k, v, None)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_run_on_sdpa(dtype):
    q, k, v = tensors(dtype=dtype)
    got, _ = tpu_attention(Layer(), q, k, v, None)
    assert torch.equal(got, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2))
    assert (only_row().reason, only_row().detail) == ("dtype", str(dtype)[6:])


def test_dense_masks_bool_and_additive_agree():
    q, k, v = tensors()
    keep = torch.rand(B, 1, 8, 8, generator=torch.Generator().manual_seed(2)) < 0.7
    keep |= torch.eye(8, dtype=torch.bool)
    added = torch.zeros(B, 1, 8, 8).masked_fill(~keep, float("-inf"))
    want, _ = sdpa_attention_forward(Layer(), q, k, v, keep)
    close(tpu_attention(Layer(), q, k, v, keep)[0], want)
    close(tpu_attention(Layer(), q, k, v, added)[0], want)
    assert {row.detail for row in tpu_kernels.explain().rows} == {"bool", "float"}


def test_gradients_flow_through_the_kernel_and_the_fallback():
    q, k, v = tensors()
    v.requires_grad_()
    tpu_attention(Layer(), q, k, v, None)[0].sum().backward()
    ours, v.grad = v.grad, None
    assert only_row().route == "range-attention.forward_with_lse"
    sdpa_attention_forward(Layer(), q, k, v, None)[0].sum().backward()
    close(ours, v.grad)
    v.grad = None
    tpu_attention(Layer(), q, k, v, torch.ones(B, 1, 8, 8, dtype=torch.bool).tril())[0].sum().backward()
    close(ours, v.grad)
    with torch.no_grad():
        tpu_attention(Layer(), q, k, v, None)
    with torch.inference_mode():
        tpu_attention(Layer(), q.clone(), k.clone(), v.clone(), None)
    assert {row.route for row in tpu_kernels.explain().rows} == {
        "range-attention.forward_with_lse", "range-attention.decode", "sdpa"
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "ranges", "bool"])
@pytest.mark.parametrize("weights", [False, True])
def test_one_query_row_broadcasts_over_the_keys_batch(kind, weights):
    """Learned queries (a Q-Former's) stand in a batch of one."""
    q, k, v = tensors(8, 12)
    dense = None if kind == "none" else torch.ones(B, 1, 8, 12, dtype=torch.bool).tril()
    mask = MASKED[kind][0] and MASKED[kind][0](dense)
    layer = Layer(is_causal=False)
    got, _ = tpu_attention(layer, q[:1], k, v, mask, output_attentions=weights)
    close(got, sdpa_attention_forward(layer, q[:1].expand(B, -1, -1, -1), k, v, dense)[0])
    assert only_row().reason == ("output_attentions" if weights else "batch_broadcast")


BAD = {
    "mixed dtypes": (lambda q, k, v: (q, k.bfloat16(), v), {}, "different dtypes.*bfloat16"),
    "heads do not divide": (lambda q, k, v: (q[:, :3], k, v), {}, "3 heads.*multiple of the 2"),
    "3-D query": (lambda q, k, v: (q[0], k, v), {}, "4-D"),
    "lengths differ": (lambda q, k, v: (q, k[:, :, :5], v), {}, "heads or length"),
    "head dims differ": (lambda q, k, v: (q[..., :8], k, v), {}, "head_dim 8"),
    "2-D mask": (lambda q, k, v: (q, k, v), {"attention_mask": torch.ones(B, 8)}, "4-D masks.*register"),
    "int64 mask": (
        lambda q, k, v: (q, k, v),
        {"attention_mask": torch.ones(B, 1, 8, 8, dtype=torch.int64)},
        "int64.*bool",
    ),
    "int32 mask of pairs": (
        lambda q, k, v: (q, k, v),
        {"attention_mask": torch.ones(B, 1, 8, 8, dtype=torch.int32)},
        "int32",
    ),
    "mask too narrow": (
        lambda q, k, v: (q, k, v),
        {"attention_mask": torch.ones(B, 1, 8, 7, dtype=torch.bool)},
        "axis 3",
    ),
    "mask of another batch": (
        lambda q, k, v: (q, k, v),
        {"attention_mask": torch.ones(3, 1, 8, 8, dtype=torch.bool)},
        "axis 0",
    ),
    "range mask sliced": (
        lambda q, k, v: (q, k, v),
        {"attention_mask": torch.ones(B, 1, 8, 4, dtype=torch.int32)},
        "range mask",
    ),
    "sinks of the wrong size": (lambda q, k, v: (q, k, v), {"s_aux": torch.zeros(3)}, "sinks have shape"),
    "scaling tensor": (lambda q, k, v: (q, k, v), {"scaling": torch.tensor(1.0)}, "scaling is a tensor"),
    "scaling NaN": (lambda q, k, v: (q, k, v), {"scaling": float("nan")}, "^scaling is nan"),
    "scaling too small": (lambda q, k, v: (q, k, v), {"scaling": -1e-31}, "^scaling is -1e-31"),
    "scaling too large": (lambda q, k, v: (q, k, v), {"scaling": float("inf")}, "^scaling is inf"),
    "softcap negative": (lambda q, k, v: (q, k, v), {"softcap": -30.0}, "^softcap is -30"),
    "softcap infinite": (lambda q, k, v: (q, k, v), {"softcap": float("inf")}, "^softcap is inf"),
    "softcap beyond scaling": (lambda q, k, v: (q, k, v), {"softcap": 1e20, "scaling": 1e-20}, "^scaling / softcap is"),
    "dropout NaN": (lambda q, k, v: (q, k, v), {"dropout": float("nan")}, "^dropout is nan"),
    "window negative": (lambda q, k, v: (q, k, v), {"sliding_window": -1}, "^sliding_window is -1"),
    "mask elsewhere": (
        lambda q, k, v: (q, k, v),
        {"attention_mask": torch.ones(B, 1, 8, 8, dtype=torch.bool, device="meta")},
        "attention_mask is on meta",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    change, kwargs, message = BAD[case]
    kwargs = {"attention_mask": None, **kwargs}
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        tpu_attention(Layer(), *change(*tensors()), **kwargs)
    assert not tpu_kernels.explain().rows


def test_disable_turns_every_call_to_the_fallback(monkeypatch):
    monkeypatch.setenv("TPU_KERNELS_DISABLE", "1")
    q, k, v = tensors()
    got, _ = tpu_attention(Layer(), q, k, v, None)
    close(got, sdpa_attention_forward(Layer(), q, k, v, None)[0])
    assert (only_row().route, only_row().reason) == ("sdpa", "disabled")


@pytest.mark.parametrize("how", ["register", "environment"])
def test_strict_raises_with_every_reason(how, monkeypatch):
    if how == "register":
        tpu_kernels.register(strict=True)
    else:
        monkeypatch.setenv("TPU_KERNELS_STRICT", "1")
    q, k, v = tensors()
    tpu_attention(Layer(), q, k, v, None)
    with pytest.raises(tpu_kernels.FallbackError, match="(?s)Layer.0.*dropout.*range-attention refused"):
        tpu_attention(Layer(), q, k, v, None, dropout=0.1)


def test_autocast_computes_in_its_dtype_as_sdpa_does():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = tpu_attention(Layer(), q, k, v, None)
        mixed, _ = tpu_attention(Layer(), q, k.bfloat16(), v.bfloat16(), None)
    assert got.dtype == mixed.dtype == torch.bfloat16
    close(got.float(), sdpa_attention_forward(Layer(), q, k, v, None)[0], atol=2e-2)
    assert only_row().reason == "kernel"


def test_no_module_attributes_are_needed():
    q, k, v = tensors()
    close(tpu_attention(SimpleNamespaceModule(), q, k, v, None)[0], sdpa_attention_forward(Layer(), q, k, v, None)[0])
    assert only_row().layer == "SimpleNamespaceModule"


class SimpleNamespaceModule(SimpleNamespace):
    """An attention "module" that is no torch module and has no attribute at all."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_under_compile(dynamic, backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    layer = Layer()
    compiled = torch.compile(
        lambda q, k, v, mask: tpu_attention(layer, q, k, v, mask, dropout=0.0, scaling=0.25)[0],
        fullgraph=True,
        backend=counter,
        dynamic=dynamic,
    )
    for q_len, kv_len, fill, graphs in ((1, 40, 7, 1), (1, 40, 20, 1), (6, 40, 3, 2)):
        q, k, v = tensors(q_len, kv_len)
        ends = torch.full((B, q_len), fill, dtype=torch.int32)
        mask = masks.encode_ranges(torch.zeros_like(ends), ends, torch.ones(B, kv_len, dtype=torch.bool), kv_len)
        with torch.no_grad():
            close(compiled(q, k, v, mask), tpu_attention(layer, q, k, v, mask)[0])
        assert counter.frame_count == graphs
    table = tpu_kernels.explain()
    assert table.fallback_calls == 0
    assert sum(row.traced for row in table.rows) == 2


def test_range_op_passes_opcheck():
    q, k, v = tensors(5, 9)
    mask = masks.encode_ranges(
        torch.zeros(B, 5, dtype=torch.int32), torch.full((B, 5), 9, dtype=torch.int32), torch.ones(B, 9).bool(), 9
    )
    for function in ("forward", "decode"):
        op = getattr(torch.ops.tpu_kernels, f"range_attention_{function}").default
        args = (q, k, v, mask, torch.zeros(HQ), 0.25, 3.0, False, True, "highest", 0, 0, 0)
        torch.library.opcheck(op, args)
