"""The paged kernel, emulated on CPU, against float64 attention over the same keys laid out whole."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu
from range_attention_reference import Call, allowed_error, make_call, range_attention, reference, run_function


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    yield
    pltpu.reset_tpu_interpret_mode_state()


def paged(call: Call, page: int, *, junk: float = 1e30, interpret: Any = True, share: int = 0) -> torch.Tensor:
    """The call with its keys scattered over a pool of pages in which everything else is `junk`.

    share: how many first pages all requests have in common with request 0 (its keys, then).
    """
    batch, kv_heads, kv_len, _ = call.k.shape
    most = -(-kv_len // page)
    order = np.random.default_rng(0).permutation(batch * most + 3)
    table = order[: batch * most].reshape(batch, most)
    table[:, :share] = table[0, :share]
    pools = []
    for x in (call.k, call.v):
        pool = torch.full((len(order), page, kv_heads, x.shape[3]), junk, dtype=x.dtype)
        for b in range(batch):
            for m in range(most):
                tokens = x[b, :, m * page : (m + 1) * page].transpose(0, 1)
                pool[table[b, m], : len(tokens)] = tokens
        pools.append(jax.dlpack.from_dlpack(pool))
    # Entries past the last key in range are never read: -1, as transformers has them.
    last = np.clip(call.ends, 0, kv_len).max(1)
    table = np.where(np.arange(most)[None] * page < last[:, None], table, -1)
    arrays = [jax.dlpack.from_dlpack(call.q), *pools, jnp.asarray(table, jnp.int32)]
    arrays += [jnp.asarray(x, jnp.int32) for x in (call.starts, np.minimum(call.ends, kv_len))]
    arrays.append(None if call.sinks is None else jnp.asarray(call.sinks))
    static = dict(
        scale=float(call.scale), softcap=call.softcap, precision="highest", vmem_bytes=0, interpret=interpret
    )
    return torch.from_dlpack(run_function("paged", arrays, static)).clone()


def check(call: Call, page: int, **options: Any) -> torch.Tensor:
    out, expected = paged(call, page, **options), reference(call)
    assert out.dtype == call.q.dtype and out.shape == expected.shape
    error, allowed = (out.double() - expected).abs().max().item(), allowed_error(call, expected)
    assert error <= allowed, f"max error {error:.3e}, allowed {allowed:.3e}"
    nothing = torch.from_numpy(~call.mask.any(-1))[:, None, :, None].expand_as(out)
    assert (out[nothing] == 0).all()
    return out


LENGTHS = np.array([[1], [16], [17], [100], [0]])  # around a page of 16; a request that has nothing


def decoding(dtype: str, heads: int = 4, kv_heads: int = 2, dim: int = 32, v_dim: int = 0, **fields: Any) -> Call:
    return make_call(0, dtype, len(LENGTHS), heads, kv_heads, 1, 100, dim, v_dim, ends=LENGTHS, **fields)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("page", [16, 64, *(pytest.param(each, marks=pytest.mark.slow) for each in (8, 256))])
def test_requests_of_many_lengths(dtype: str, page: int) -> None:
    check(decoding(dtype), page)


@pytest.mark.parametrize(
    "call",
    [
        decoding("f32", heads=8, kv_heads=1),
        pytest.param(decoding("f32", heads=3, kv_heads=3, dim=40, v_dim=24), marks=pytest.mark.slow),
        decoding("bf16", heads=6, kv_heads=2, dim=64, sinks=np.linspace(-3, 3, 6, dtype=np.float32)),
        pytest.param(decoding("f32", sinks=np.float32([3e38, -3e38, 100, -100])), marks=pytest.mark.slow),
        decoding("f32", softcap=2.0, scale=-1.5),
        pytest.param(decoding("f32", scale=-0.7), marks=pytest.mark.slow),
        decoding("f32", starts=LENGTHS - 20),
        pytest.param(decoding("f32", starts=LENGTHS - 1), marks=pytest.mark.slow),
    ],
    ids=["one KV head", "odd sizes", "sinks", "large sinks", "softcap, negative scale", "negative scale", "window 20",
         "window 1"],
)  # fmt: skip
def test_features(call: Call) -> None:
    check(call, 16)


def test_a_chunk_of_rows_with_ranges_of_their_own() -> None:
    rng = np.random.default_rng(0)
    call = make_call(1, "f32", 3, 4, 2, 9, 70, 16, starts=rng.integers(-3, 60, (3, 9)), ends=rng.integers(0, 71, (3, 9)))
    check(call, 8)


def test_requests_may_share_pages() -> None:
    call = decoding("f32")
    call.k[:, :, :32], call.v[:, :, :32] = call.k[:1, :, :32], call.v[:1, :, :32]
    check(call, 16, share=2)


@pytest.mark.parametrize("junk", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_other_requests_pages_and_the_rest_of_a_page_never_leak(junk: float) -> None:
    call = decoding("f32")
    assert torch.equal(paged(call, 16, junk=junk), paged(call, 16))


@pytest.mark.parametrize("where", [pytest.param("k", marks=pytest.mark.slow), "v"])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_and_no_other_head(where: str) -> None:
    call = decoding("f32", heads=4, kv_heads=2)
    call = dataclasses.replace(call, **{where: getattr(call, where).clone()})
    clean = paged(call, 16)
    getattr(call, where)[3, 1, 20, 3] = float("nan")  # request 3 sees key 20, through its second KV head
    out = paged(call, 16)
    assert out[3, 2:].isnan().any(-1).all()
    out[3, 2:] = clean[3, 2:]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("page", [16, 128, 1024])
def test_each_page_in_use_is_copied_once(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pipeline copies from HBM, by the blocks' indices: those that differ from the step before."""
    lengths, starts = np.array([1, 900, 0, 129, 40]), np.array([0, 300, 0, 0, 39])
    in_use = int(np.sum(-(-lengths // page) - np.minimum(starts, lengths) // page))
    most, kv_heads, dim = 1024 // page, 2, 16
    given: dict[str, Any] = {}

    def capture(kernel: Any, *, grid_spec: Any, out_shape: Any, **_: Any) -> Any:
        def call(*operands: Any) -> Any:
            given.update(spec=grid_spec, operands=operands)
            return jnp.zeros(out_shape.shape, out_shape.dtype)

        return call

    monkeypatch.setattr(sys.modules["range_attention.paged"].pl, "pallas_call", capture)
    pool = jnp.zeros((5 * most, page, kv_heads, dim))
    range_attention.paged(
        jnp.zeros((5, 4, 1, dim)), pool, pool, jnp.arange(5 * most, dtype=jnp.int32).reshape(5, most),
        jnp.asarray(starts)[:, None], jnp.asarray(lengths)[:, None], None,
        scale=1.0, softcap=0.0, precision="highest", vmem_bytes=0, interpret=True,
    )  # fmt: skip
    spec = given["spec"]
    scalars = [np.asarray(each) for each in given["operands"][: spec.num_scalar_prefetch]]
    pages = [each for each in spec.in_specs if each.block_shape == (1, page * kv_heads, dim)]
    copied: list[int] = []
    for block in pages:
        before = None
        for b in range(5):
            for j in range(int(spec.grid[1])):
                now = int(block.index_map(b, j, *scalars)[0])
                copied += [now] * (now != before)
                before = now
    # Keys and values. A pipeline of n pages begins with n blocks, in use or not.
    idle = len(pages) - 2
    assert 2 * in_use <= len(copied) <= 2 * in_use + idle
    print(f"page {page}: {in_use} pages in use, {len(copied)} copies of keys and values, {len(pages) // 2} pages a step")


@pytest.mark.slow
@pytest.mark.parametrize("page", [8, 16])
def test_checking_interpreter(page: int) -> None:
    """Races, reads of memory that nobody wrote, blocks used before their copy is done."""
    call = decoding("f32", dim=16, starts=LENGTHS - 50)
    plain = check(call, page)
    for seed in (0, 1):
        hostile = pltpu.InterpretParams(
            detect_races=True, num_cores_or_threads=2, random_seed=seed,
            uninitialized_memory="nan", out_of_bounds_reads="raise", dma_execution_mode="on_wait",
        )  # fmt: skip
        torch.testing.assert_close(check(call, page, interpret=hostile), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(block_table=jnp.zeros((1, 2), jnp.int32)), "block_table"),
        (dict(k_pages=jnp.zeros((4, 8, 2, 16))), "do not fit"),
        (dict(q=jnp.zeros((2, 3, 1, 32))), "multiple"),
        (dict(v_pages=jnp.zeros((4, 8, 2, 32), jnp.float8_e4m3fn)), "float8_e4m3fn"),
        (dict(softcap=-1.0), "softcap"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], text: str) -> None:
    pool = jnp.zeros((4, 8, 2, 32))
    given = dict(
        q=jnp.zeros((2, 4, 1, 32)), k_pages=pool, v_pages=pool, block_table=jnp.zeros((2, 2), jnp.int32),
        starts=jnp.zeros((2, 1), jnp.int32), ends=jnp.ones((2, 1), jnp.int32), sinks=None, scale=1.0, softcap=0.0,
        precision="highest", vmem_bytes=0, interpret=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=text):
        range_attention.paged(**given | changes)
