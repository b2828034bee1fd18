"""forward_dense, emulated on CPU: masks and biases with an element for each pair, against attention in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from range_attention_reference import OUTPUT_ROUNDING, TORCH, blocks, range_attention

# After the reference, which puts the kernel's folder on the path.
from range_attention import dense  # isort: skip

import tpu_kernels
from tpu_kernels.attention import tpu_attention


def tensors(dtype, batch, heads, kv_heads, q_len, kv_len, dim, v_dim=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim or dim))
    return [torch.randn(size, generator=generator).to(TORCH[dtype]) for size in sizes]


def some(*shape, share=0.5, seed=0):
    """A bool mask in which each pair is seen with this probability."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@functools.cache
def _jitted(**static):
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # these tests mostly compile
    return jax.jit(functools.partial(range_attention.forward_dense, **static), compiler_options=options)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def run(q, k, v, mask=None, bias=None, sinks=None, *, softcap=0.0, scale=None, block_q=0, block_kv=0, interpret=True):
    static = dict(
        scale=q.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap, block_q=block_q, block_kv=block_kv,
        precision="highest", vmem_bytes=0, interpret=interpret,
    )  # fmt: skip
    call = _jitted(**static) if interpret is True else functools.partial(range_attention.forward_dense, **static)
    made = call(*(None if x is None else jax.dlpack.from_dlpack(x.contiguous()) for x in (q, k, v, mask, bias, sinks)))
    return torch.from_dlpack(jax.block_until_ready(made)).clone()


def attention(q, k, v, mask=None, bias=None, sinks=None, *, softcap=0.0, scale=None):
    """Written out, scores in float32 or, for float64 inputs, in float64; rows without keys are 0."""
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q.to(kind) @ k.to(kind).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias.to(kind)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    hidden = scores == -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(kind)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].masked_fill(hidden, 0.0)
    return weights.to(v.dtype) @ v


def check(q, k, v, *extra, **options):
    """Error at most twice that of attention written out in the same dtype, plus one rounding of the largest output."""
    got = run(q, k, v, *extra, **options)
    of_the_kernel = {"block_q", "block_kv", "interpret"}
    options = {name: value for name, value in options.items() if name not in of_the_kernel}
    want = attention(q.double(), k.double(), v.double(), *extra, **options)
    theirs = (attention(q, k, v, *extra, **options).double() - want).abs().max().item()
    rounding = OUTPUT_ROUNDING["f32" if q.dtype == torch.float32 else "bf16"]
    error = (got.double() - want).abs().max().item()
    assert got.dtype == q.dtype and got.shape == want.shape
    assert error <= 2 * theirs + rounding * want.abs().max().item(), error
    return got


@pytest.mark.parametrize(("dtype", "heads"), [("bf16", 1), slow("f32", 4), slow("f32", 1)])
def test_masks_of_pairs(dtype, heads):
    """Full, empty and mixed tiles, rows without keys, several key blocks."""
    mask = some(2, heads, 200, 600)
    mask[:, :, :, 128:384] = False
    mask[1, :, 128:, 384:512] = True
    mask[0, :, 5] = False
    made = check(*tensors(dtype, 2, 4, 2, 200, 600, 64), mask, block_q=128, block_kv=256)
    assert (made[0, :, 5] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1, 300), (2, 1, 40, 1), (1, 4, 40, 300), (2, 4, 1, 1)])
def test_masks_are_broadcast(shape):
    check(*tensors("f32", 2, 4, 2, 40, 300, 32), some(*shape, seed=3))


@pytest.mark.parametrize("q_len", [7, *map(slow, (1, 32, 200))])
def test_few_queries_after_a_long_cache(q_len):
    """The rows of a group share a block where they are few: their masks and sinks must not be mixed up."""
    mask = some(2, 1, q_len, 700, seed=q_len)
    sinks = torch.linspace(-2, 3, 8)
    check(*tensors("f32", 2, 8, 2, q_len, 700, 32, 48), mask, None, sinks, softcap=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_biases(heads, dtype):
    bias = torch.randn(1, heads, 150, 300, generator=torch.Generator().manual_seed(1))
    check(*tensors(dtype, 2, 4, 2, 150, 300, 32), None, bias.to(TORCH[dtype]), softcap=5.0, block_q=128, block_kv=128)
    check(*tensors(dtype, 2, 4, 2, 150, 300, 32), some(2, 1, 1, 300), bias, torch.zeros(4))


@pytest.mark.parametrize("kind", [torch.float32, slow(torch.bfloat16)])
def test_additive_masks(kind):
    """-inf hides; the lowest number hides too, but in rows that have nothing else, whose mean SDPA takes."""
    seen = some(2, 1, 200, 300, seed=4)
    seen[:, :, :, 128:256] = False
    seen[0, 0, 7] = False
    lowest = torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)
    never = torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, -torch.inf)
    q, k, v = tensors("f32", 2, 4, 2, 200, 300, 32)
    as_lowest, as_never, as_bool = (
        check(q, k, v, *each, block_q=128, block_kv=128) for each in ((None, lowest), (None, never), (seen,))
    )
    torch.testing.assert_close(as_lowest[0, :, 7], v[0].mean(1).repeat_interleave(2, 0), atol=1e-6, rtol=0)
    assert (as_never[0, :, 7] == 0).all()
    torch.testing.assert_close(as_never, as_bool, atol=1e-6, rtol=0)
    other = torch.arange(200) != 7
    torch.testing.assert_close(as_lowest[:, :, other], as_bool[:, :, other], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_nan_in_a_bias_is_not_hidden():
    bias = torch.zeros(1, 1, 40, 300)
    bias[0, 0, 3, 200] = torch.nan
    made = run(*tensors("f32", 1, 2, 2, 40, 300, 32), None, bias)
    assert made[:, :, 3].isnan().all() and made[:, :, torch.arange(40) != 3].isfinite().all()


@pytest.mark.parametrize(("heads", "v_dim"), [slow(1, 32), slow(2, 48)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_hidden_keys_do_not_leak(poison, heads, v_dim):
    """A key that a row does not see changes no bit of that row, and reaches those that do see it."""
    mask = some(1, heads, 130, 300, seed=5)
    q, k, v = tensors("f32", 1, 2, 1, 130, 300, 32, v_dim)
    for at in (3, 299):
        for bias in (None, torch.zeros(1, 2, 130, 300).masked_fill(~mask, -torch.inf)):
            given = (mask, None) if bias is None else (None, bias)
            clean = run(q, k, v, *given, block_kv=128)
            bad_k, bad_v = k.clone(), v.clone()
            bad_k[:, :, at, 3], bad_v[:, :, at, 3] = poison, poison
            made = run(q, bad_k, bad_v, *given, block_kv=128)
            sees = mask[..., at].expand(1, 2, 130)
            assert torch.equal(made[~sees], clean[~sees])
            assert not made[sees].isfinite().all(-1).any()


@pytest.mark.slow
@pytest.mark.parametrize("dim", [40, 192, 512])
def test_head_sizes(dim):
    check(*tensors("bf16", 1, 2, 1, 140, 300, dim, 128 if dim == 192 else 0), some(1, 1, 140, 300, share=0.1))


@pytest.mark.slow
def test_negative_and_zero_scales():
    for scale in (-0.3, 0.0):
        check(*tensors("f32", 1, 2, 1, 40, 300, 32), some(1, 1, 40, 300), scale=scale)


@pytest.mark.slow
def test_more_tiles_than_scalar_memory_holds(monkeypatch):
    """Then every tile is visited, under its mask."""
    q, k, v = tensors("f32", 1, 2, 2, 150, 600, 32, seed=7)
    mask = some(1, 2, 150, 600, share=0.2)
    want = check(q, k, v, mask, block_kv=128)
    monkeypatch.setattr(dense, "MOST_SCALARS", 0)
    _jitted.cache_clear()
    torch.testing.assert_close(check(q, k, v, mask, block_kv=128), want, atol=1e-6, rtol=0)
    _jitted.cache_clear()


@pytest.mark.parametrize("examples", [4, slow(60)])
def test_what_the_kernel_is_told_of_tiles(examples):
    settings(max_examples=examples, deadline=None, derandomize=True)(given(data=st.data())(tiles))()


def tiles(data):
    """Words hold the mask's bits; entries name the next visited tile and how many from it on are alike."""
    tile, n = data.draw(st.sampled_from([(128, 1), (128, 3), (256, 2), (512, 1)]))
    q_rows, kv_len = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 1200))
    q_blocks, kv_blocks = -(-q_rows // 128), -(-kv_len // (tile * n))
    count = kv_blocks * n
    mask = np.zeros((q_blocks * 128, count * tile), bool)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    for i, t in np.ndindex(q_blocks, count):
        share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
        mask[i * 128 : i * 128 + 128, t * tile : t * tile + tile] = rng.random((128, tile)) < share
    mask[q_rows:], mask[:, kv_len:] = False, False
    words, any_seen, all_seen = dense._pack(
        jnp.asarray(mask[None, None, None, :q_rows, :kv_len]), blocks.Blocks(128, tile * n, tile), q_blocks, kv_blocks
    )
    width = words.shape[-2]
    bits = (np.asarray(words)[0, 0, 0][:, None] >> np.arange(tile // width)[None, :, None, None]) & 1
    assert np.array_equal(bits.reshape(count * tile, -1).T.astype(bool), mask)
    by_tile = mask.reshape(q_blocks, 128, count, tile)
    some_pair = by_tile.any((1, 3))
    real = np.arange(q_blocks * 128).reshape(q_blocks, 128) < q_rows
    every_pair = (by_tile.all(3) | ~real[:, :, None]).all(1)
    assert np.array_equal(np.asarray(any_seen)[0, 0, 0], some_pair)
    assert np.array_equal(np.asarray(all_seen)[0, 0, 0], every_pair)
    visits, fetches = (np.asarray(x).reshape(q_blocks, -1) for x in dense._visits(any_seen, all_seen, n))
    for i in range(q_blocks):
        for t in range(count + 1):
            later = [u for u in range(t, count) if some_pair[i, u]]
            if not later:
                assert visits[i, t] == dense.ENTRY * count
                continue
            first, run_length = later[0], 1
            while run_length < dense.CHAIN and first + run_length < count and some_pair[i, first + run_length]:
                if every_pair[i, first + run_length] != every_pair[i, first]:
                    break
                run_length += 1
            assert visits[i, t] == dense.ENTRY * first + dense.FULL * every_pair[i, first] + run_length
        for j in range(kv_blocks):
            assert 0 <= fetches[i, j] < kv_blocks
            if some_pair[i, j * n : j * n + n].any():
                assert fetches[i, j] == j


def test_bad_arguments():
    q, k, v = tensors("f32", 1, 4, 2, 8, 16, 8)
    with pytest.raises(ValueError, match="mask must be bool, got int32"):
        run(q, k, v, torch.ones(1, 1, 8, 16, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"mask must broadcast to \(1, 4, 8, 16\), got shape \(1, 2, 8, 16\)"):
        run(q, k, v, some(1, 2, 8, 16))
    with pytest.raises(ValueError, match="bias must be float32 or bfloat16, got float16"):
        run(q, k, v, None, torch.zeros(1, 1, 8, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="not a multiple"):
        run(q[:, :3], k, v, some(1, 1, 8, 16))


# --- through tpu_attention -----------------------------------------------------------------------------------------


@pytest.fixture
def attend():
    """tpu_attention, and the route it took."""
    tpu_kernels.register()
    tpu_kernels.reset()
    layer = torch.nn.Identity()

    def call(*tensors, **options):
        out = tpu_attention(layer, *tensors, **options)[0].transpose(1, 2)
        routes = {(row.route, row.reason) for row in tpu_kernels.explain().rows}
        tpu_kernels.reset()
        return out, routes

    return call


ROUTE = {("range-attention.forward_dense", "kernel")}


@pytest.mark.slow
def test_long_masks_take_the_kernel_bool_or_added(attend):
    q, k, v = tensors("f32", 2, 4, 2, 40, 2048, 32)
    mask = some(2, 1, 40, 2048)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    for either in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        out, routes = attend(q, k, v, either)
        assert routes == ROUTE
        torch.testing.assert_close(out, want, atol=2e-6, rtol=0)


@pytest.mark.slow
def test_a_half_precision_mask_is_added_as_it_is(attend):
    q, k, v = tensors("f32", 1, 2, 2, 20, 2048, 32)
    bias = torch.randn(1, 1, 20, 2048, generator=torch.Generator().manual_seed(2)).half()
    out, routes = attend(q, k, v, bias)
    assert routes == ROUTE
    torch.testing.assert_close(out, attention(q, k, v, None, bias), atol=2e-6, rtol=0)


def test_short_masks_and_gradients_stay_on_sdpa(attend):
    q, k, v = tensors("f32", 1, 2, 2, 20, 2048, 32)
    mask = some(1, 1, 20, 2048)
    _, routes = attend(q, k[:, :, :2047], v[:, :, :2047], mask[..., :2047])
    assert routes == {("sdpa", "dense_mask")}
    out, routes = attend(q.requires_grad_(), k, v, mask)
    assert routes == {("sdpa", "dense_mask")}
    out.sum().backward()
    assert q.grad is not None
    learned = torch.zeros(1, 1, 20, 2048, requires_grad=True)  # of the mask alone: a learned bias, all else frozen
    out, routes = attend(q.detach(), k, v, learned)
    assert routes == {("sdpa", "dense_mask")}
    (gradient,) = torch.autograd.grad(out.square().sum(), learned)
    assert gradient.abs().max() > 0


@pytest.mark.slow
def test_selected_keys_join_a_long_mask(attend):
    q, k, v = tensors("f32", 1, 2, 2, 20, 2100, 32)
    indices = torch.rand(1, 20, 2100, generator=torch.Generator().manual_seed(3)).topk(64, -1).indices
    seen = torch.zeros(1, 1, 20, 2100, dtype=torch.bool).scatter(-1, indices[:, None], True)
    out, routes = attend(q, k, v, torch.ones(1, 1, 20, 2100, dtype=torch.bool).tril(1900), indices=indices)
    assert routes == ROUTE
    torch.testing.assert_close(out, attention(q, k, v, seen & seen.new_ones(20, 2100).tril(1900)), atol=2e-6, rtol=0)


@pytest.mark.slow
def test_one_graph_under_compile(attend):
    q, k, v = tensors("f32", 1, 2, 2, 20, 2048, 32)
    mask, layer = some(1, 1, 20, 2048), torch.nn.Identity()
    compiled = torch.compile(lambda *x: tpu_attention(layer, *x)[0], fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(q, k, v, mask).transpose(1, 2), attend(q, k, v, mask)[0])
    torch._dynamo.reset()
