"""The range-attention kernel, emulated on CPU, against float64 attention and torch's own CPU attention."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from range_attention_reference import Call, check, make_call, ranges, reference, run
from range_attention_reference import blocks as block_sizes

DTYPES = ("f32", "bf16")
FUNCTIONS = ("forward", "decode")


def causal(batch: int, q_len: int, kv_len: int) -> dict[str, Any]:
    """The last query sees the last key."""
    ends = np.broadcast_to(np.arange(q_len) + 1 + kv_len - q_len, (batch, q_len))
    return dict(starts=np.zeros((batch, q_len), int), ends=np.maximum(ends, 0))


def window(batch: int, q_len: int, kv_len: int, width: int) -> dict[str, Any]:
    ends = causal(batch, q_len, kv_len)["ends"]
    return dict(starts=ends - width, ends=ends)


def packed(batch: int, lengths: list[int]) -> dict[str, Any]:
    first = np.concatenate([np.full(n, sum(lengths[:i])) for i, n in enumerate(lengths)])
    rows = np.arange(sum(lengths))
    return dict(starts=np.tile(first, (batch, 1)), ends=np.tile(rows + 1, (batch, 1)))


def padded(pads: list[int], kv_len: int, side: str) -> np.ndarray:
    valid = np.ones((len(pads), kv_len), bool)
    for row, pad in zip(valid, pads, strict=True):
        if pad:
            row[slice(0, pad) if side == "left" else slice(kv_len - pad, None)] = False
    return valid


def scattered(seed: int, batch: int, q_len: int, kv_len: int) -> dict[str, Any]:
    """Any range at all, empty and inside-out ones and ones past the keys included."""
    rng = np.random.default_rng(seed)
    return dict(
        starts=rng.integers(-9, kv_len + 1, (batch, q_len)), ends=rng.integers(0, kv_len + 9, (batch, q_len))
    )


# --- masks ---------------------------------------------------------------------------------------------------------

MASKS: dict[str, dict[str, Any]] = {
    "causal": causal(2, 200, 200),
    "full": dict(starts=np.zeros((2, 200), int), ends=np.full((2, 200), 200)),
    "window 1": window(2, 200, 200, 1),
    "window 64": window(2, 200, 200, 64),
    "window 129": window(2, 200, 200, 129),
    "packed": packed(2, [5, 123, 1, 64, 7]),
    "left padding": {**causal(2, 200, 200), "valid": padded([150, 0], 200, "left")},
    "left padding of a whole tile and more": {
        **causal(2, 200, 200),
        "valid": padded([199, 128], 200, "left"),
    },
    "right padding": {**causal(2, 200, 200), "valid": padded([0, 77], 200, "right")},
    "right padding, full": {"valid": padded([190, 3], 200, "right")},
    "holes": {**causal(2, 200, 200), "valid": np.random.default_rng(0).random((2, 200)) < 0.6},
    "no key valid": {"valid": np.stack([np.zeros(200, bool), np.ones(200, bool)])},
    "scattered": scattered(1, 2, 200, 200),
    "scattered, holes": {
        **scattered(2, 2, 200, 200),
        "valid": np.random.default_rng(3).random((2, 200)) < 0.6,
    },
    "no row sees a key": dict(starts=np.full((2, 200), 9), ends=np.full((2, 200), 9)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(mask: str, dtype: str) -> None:
    call = make_call(0, dtype, 2, 4, 2, 200, 200, 64, **MASKS[mask])
    check(call, block_q=32, block_kv=128)


@pytest.mark.parametrize("mask", ["causal", "window 129", "left padding", "holes", "scattered"])
def test_blocks_chosen_by_the_kernel(mask: str) -> None:
    check(make_call(0, "f32", 2, 4, 2, 200, 200, 64, **MASKS[mask]))


def test_window_edges_by_one_hot_values() -> None:
    """Equal scores and one-hot values: the output row IS the visible set, divided by its size."""
    n = 40
    for width in (7, 8):
        call = make_call(0, "f32", 1, 1, 1, n, n, n, **window(1, n, n, width))
        call.q.zero_()
        call.v[0, 0] = torch.eye(n)
        out = run(call, block_q=8, block_kv=128)[0, 0]
        for row, key in itertools.product(range(n), range(n)):
            seen = row - width < key <= row
            assert out[row, key] == pytest.approx(1 / min(width, row + 1) if seen else 0, abs=1e-7), (
                row,
                key,
            )


def test_rows_whose_first_visited_tile_is_empty() -> None:
    """Neighbours make the block visit tiles in which these rows see nothing, before and after their own keys."""
    starts = np.zeros((1, 32), int)
    ends = np.full((1, 32), 130)
    starts[0, 8:16], ends[0, 8:16] = 300, 310  # two tiles in front of theirs
    ends[0, 16:24] = 0  # nothing at all
    starts[0, 24:], ends[0, 24:] = 5, 6  # nothing behind
    for sinks in (None, np.array([-3.0, 4.0], np.float32)):
        check(make_call(0, "f32", 1, 2, 1, 32, 400, 64, starts=starts, ends=ends, sinks=sinks), block_kv=128)


def test_rows_without_keys_beside_full_tiles() -> None:
    """A row without keys does not cost its neighbours the unmasked path, and still is exactly 0."""
    starts, ends = np.zeros((1, 32), int), np.full((1, 32), 256)
    ends[0, 3], starts[0, 9] = 0, 256
    call = make_call(0, "f32", 1, 2, 1, 32, 256, 64, starts=starts, ends=ends)
    out = check(call, block_kv=128)
    assert (out[:, :, [3, 9]] == 0).all()


def test_ranges_past_the_keys_are_cut() -> None:
    starts = np.array([[-(2**31), -5, 0, 250, 300, 2**31 - 1, 2**31 - 1, -1]])
    ends = np.array([[2**31 - 1, 3, 301, 999, 400, 2**31 - 1, -(2**31), 0]])
    for function in FUNCTIONS:
        check(make_call(0, "f32", 1, 2, 1, 8, 300, 64, starts=starts, ends=ends), function, block_kv=128)


# --- shapes --------------------------------------------------------------------------------------------------------


DIMS = [(40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)]
FAST_DIMS = [(40, 40), (72, 72), (192, 128), (256, 256)]


@pytest.mark.parametrize(
    "dim", [x if x in FAST_DIMS else pytest.param(x, marks=pytest.mark.slow) for x in DIMS]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dim: tuple[int, int], dtype: str) -> None:
    call = make_call(1, dtype, 1, 2, 1, 50, 150, *dim, **scattered(0, 1, 50, 150))
    check(call, block_q=32, block_kv=128)


@pytest.mark.parametrize("v_dim", [8, 64, 200])
def test_v_head_dim_differs(v_dim: int) -> None:
    check(make_call(1, "f32", 2, 2, 1, 60, 150, 64, v_dim, **causal(2, 60, 150)), block_kv=128)


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 7), (7, 7), (40, 7), (7, 40), (127, 127), (129, 129), (1, 577)]
)
def test_odd_lengths_full(lengths: tuple[int, int]) -> None:
    """Full attention with small scores: a key of padding that took part would show."""
    call = make_call(2, "f32", 1, 2, 1, *lengths, 64)
    check(call)


@pytest.mark.parametrize("dtype", DTYPES)
def test_577(dtype: str) -> None:
    check(make_call(2, dtype, 1, 4, 4, 577, 577, 72, scale=0.125))


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [*range(1, 21), 128, 129, 255, 256, 257, 513, 1000])
def test_every_length(q_len: int) -> None:
    for kv_len in (q_len, 2 * q_len + 1):
        check(make_call(q_len, "f32", 1, 2, 1, q_len, kv_len, 32))
        check(make_call(q_len, "f32", 1, 2, 1, q_len, kv_len, 32, **causal(1, q_len, kv_len)))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_head_groups(heads: tuple[int, int], function: str) -> None:
    call = make_call(3, "f32", 2, *heads, 3, 140, 64, **scattered(heads[0], 2, 3, 140))
    check(call, function, block_kv=128)


def test_heads_equal_length() -> None:
    """Heads and rows cannot be told apart by shape here: a swapped layout shows only in the numbers."""
    for function in FUNCTIONS:
        check(make_call(4, "f32", 2, 8, 8, 8, 8, 8, **causal(2, 8, 8)), function)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["holes", "softcap and sinks"])
def test_several_tiles_in_one_key_block(case: str, dtype: str) -> None:
    """2048 keys are one block of four tiles: unmasked at once, tile by tile at the edges."""
    fields: dict[str, Any] = causal(1, 300, 2300)
    if case == "holes":
        fields["valid"] = np.ones((1, 2300), bool)
        fields["valid"][0, [3, 1030, 1031, 2050]] = False
        fields["valid"][0, 512:1024] = False
    if case == "softcap and sinks":
        fields |= dict(softcap=3.0, sinks=np.array([0.0, 9.0], np.float32))
    check(make_call(5, dtype, 1, 2, 1, 300, 2300, 64, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_long(dtype: str) -> None:
    n = 4992
    check(make_call(6, dtype, 1, 2, 1, n, n, 64))
    check(make_call(6, dtype, 1, 2, 1, n, n, 64, **window(1, n, n, 1024)))


# --- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 5])
def test_decode_with_a_partly_filled_cache(dtype: str, q_len: int) -> None:
    filled = np.array([1 + q_len, 130, 384, 400])
    ends = filled[:, None] - np.arange(q_len)[::-1]
    call = make_call(7, dtype, 4, 8, 2, q_len, 400, 64, starts=np.zeros_like(ends), ends=ends)
    check(call, "decode", block_kv=128)
    check(dataclasses.replace(call, valid=padded([1, 37, 0, 300], 400, "left")), "decode", block_kv=128)


def test_decode_more_rows_than_one_block() -> None:
    """Past its intended size `decode` is only slow, not wrong; sinks then differ from row block to row block."""
    call = make_call(
        8, "f32", 1, 8, 1, 40, 140, 32, **causal(1, 40, 140), sinks=np.linspace(-4, 4, 8, dtype=np.float32)
    )
    check(call, "decode", block_q=128, block_kv=128)


# --- score arithmetic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_softcap(function: str, dtype: str) -> None:
    """Scores up to +-200, so that the cap bites; hidden keys stay hidden behind it."""
    fields = {**causal(2, 16, 140), "valid": padded([100, 0], 140, "left")}
    call = make_call(9, dtype, 2, 4, 2, 16, 140, 64, softcap=30.0, **fields)
    call.q.mul_(40)
    check(call, function, block_kv=128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_sinks(function: str, dtype: str) -> None:
    sinks = np.array([-5, 0, 5, 20, -5, 0, 5, -np.inf], np.float32)
    fields: dict[str, Any] = window(1, 130, 130, 128) if function == "forward" else window(1, 4, 130, 128)
    fields["ends"] = fields["ends"].copy()
    fields["ends"][0, 2] = -1  # a row without keys: the sink takes all the weight and gives nothing
    q_len = fields["ends"].shape[1]
    call = make_call(10, dtype, 1, 8, 2, q_len, 130, 64, sinks=sinks, **fields)
    check(call, function, block_kv=128)
    if dtype == "f32":
        check(dataclasses.replace(call, softcap=2.0), function, block_kv=128)


def test_sinks_alone() -> None:
    """One visible key with score 0 and a sink with logit 0 share the weight."""
    call = make_call(0, "f32", 1, 1, 1, 8, 8, 8, sinks=np.zeros(1, np.float32), ends=np.ones((1, 8), int))
    call.q.zero_()
    torch.testing.assert_close(run(call), call.v[:, :, :1].expand(1, 1, 8, 8) / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype: str) -> None:
    call = make_call(11, dtype, 1, 2, 1, 64, 200, 64, **causal(1, 64, 200))
    call.q.mul_(60)
    check(call, block_kv=128)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30])
def test_scales(scale: float) -> None:
    check(make_call(12, "f32", 1, 2, 1, 16, 140, 64, scale=scale, **causal(1, 16, 140)), block_kv=128)


def test_scale_is_not_rounded() -> None:
    """A query times 1 / sqrt(72), rounded to bfloat16, is off by up to 0.2 %: much, where scores reach 60."""
    call = make_call(13, "bf16", 1, 2, 1, 64, 64, 72)
    call.q.mul_(60)
    expected = reference(call)
    rounded = reference(dataclasses.replace(call, q=(call.q.float() * call.scale).bfloat16(), scale=1.0))
    assert (run(call).double() - expected).abs().mean() < 0.25 * (rounded - expected).abs().mean()


def test_three_pass_precision() -> None:
    """ "high" splits float32 into two bfloat16 parts: about 16 bits, between "default" on a TPU and "highest"."""
    call = make_call(14, "f32", 1, 2, 1, 64, 140, 64, **causal(1, 64, 140))
    error = (run(call, block_kv=128, precision="high").double() - reference(call)).abs().max().item()
    assert 1e-7 < error < 1e-4


# --- values that must not leak -------------------------------------------------------------------------------------

POISONS = [float("nan"), float("inf"), -float("inf"), 3e38]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("v_dim", [32, 48])
def test_hidden_slots_do_not_leak(v_dim: int, function: str, dtype: str) -> None:
    """Poison in keys and values that a row does not see leaves the row's every bit alone.

    Row 0 sees the fewest keys, so its neighbours DO see poison that it must be spared from.
    """
    fields = {**causal(2, 8, 300), "valid": padded([140, 0], 300, "left")}
    fields["starts"] = fields["starts"] + 5
    call = make_call(15, dtype, 2, 4, 2, 8, 300, 32, v_dim, **fields)
    clean = run(call, function, block_kv=128)
    mask = call.mask
    for row, poison in itertools.product((0, 7), POISONS):
        hidden = torch.from_numpy(~mask[:, row])[:, None, :, None]
        k, v = call.k.masked_fill(hidden, poison), call.v.masked_fill(hidden, poison)
        out = run(dataclasses.replace(call, k=k, v=v), function, block_kv=128)
        assert torch.equal(out[:, :, row], clean[:, :, row]), (row, poison)
        only_v = run(dataclasses.replace(call, v=v), function, block_kv=128)
        assert torch.equal(only_v[:, :, row], clean[:, :, row]), (row, poison)


@pytest.mark.parametrize("v_dim", [32, 48])
def test_visible_nan_shows(v_dim: int) -> None:
    """The other side: a NaN that a row does see is not swept under the carpet, in masked and in full tiles."""
    call = make_call(16, "f32", 1, 1, 1, 16, 300, 32, v_dim, **causal(1, 16, 300))
    for key in (2, 290):
        poisoned = dataclasses.replace(call, v=call.v.clone())
        poisoned.v[0, 0, key, 3] = float("nan")
        out = run(poisoned, block_kv=128)
        sees = torch.from_numpy(call.mask[0, :, key])
        assert out[0, 0, sees, 3].isnan().all() and not out[0, 0, ~sees].isnan().any()


def test_nan_query_rows_stay_alone() -> None:
    call = make_call(17, "f32", 1, 2, 1, 16, 140, 32, **causal(1, 16, 140))
    clean = run(call, block_kv=128)
    call.q[:, :, 5] = float("nan")
    out = run(call, block_kv=128)
    keep = [r for r in range(16) if r != 5]
    assert torch.equal(out[:, :, keep], clean[:, :, keep]) and out[:, :, 5].isnan().all()


# --- one row's result does not depend on its company ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_same_bits_in_any_batch(function: str, dtype: str) -> None:
    fields = {**scattered(4, 1, 9, 200), "valid": np.random.default_rng(5).random((1, 200)) < 0.8}
    alone = make_call(18, dtype, 1, 4, 2, 9, 200, 32, **fields)
    other = make_call(
        19, dtype, 1, 4, 2, 9, 200, 32, **{**causal(1, 9, 200), "valid": np.ones((1, 200), bool)}
    )
    expected = run(alone, function, block_kv=128)
    for position in (0, 2):
        calls = [other] * 3
        calls[position] = alone
        tensors = {n: torch.cat([getattr(c, n) for c in calls]) for n in "qkv"}
        arrays = {n: np.concatenate([getattr(c, n) for c in calls]) for n in ("starts", "ends", "valid")}
        out = run(Call(**tensors, **arrays, scale=alone.scale), function, block_kv=128)
        assert torch.equal(out[position], expected[0])


def test_padded_row_equals_the_row_alone() -> None:
    """The same 60 tokens, alone and behind 140 slots of left padding."""
    alone = make_call(20, "f32", 1, 4, 2, 60, 60, 32, **causal(1, 60, 60))
    fields = {**causal(1, 200, 200), "valid": padded([140], 200, "left")}
    behind = make_call(21, "f32", 1, 4, 2, 200, 200, 32, **fields)
    for name in "qkv":
        getattr(behind, name)[:, :, 140:] = getattr(alone, name)
    torch.testing.assert_close(run(behind, block_kv=128)[:, :, 140:], run(alone), rtol=2e-6, atol=2e-6)


def test_decode_equals_forward() -> None:
    fields = {**scattered(6, 2, 3, 200), "valid": np.random.default_rng(7).random((2, 200)) < 0.8}
    call = make_call(22, "f32", 2, 6, 2, 3, 200, 32, sinks=np.linspace(-2, 2, 6, dtype=np.float32), **fields)
    torch.testing.assert_close(run(call, "decode"), run(call, "forward"), rtol=1e-6, atol=1e-6)


# --- any ranges ----------------------------------------------------------------------------------------------------

SMALL = [  # function, batch, heads, KV heads, q_len, kv_len, dim, block_q, block_kv: few, since each is compiled once
    ("forward", 2, 2, 1, 9, 300, 8, 8, 128),
    ("forward", 1, 2, 2, 17, 140, 16, 16, 256),
    ("forward", 1, 1, 1, 8, 1100, 8, 0, 1024),
    ("decode", 3, 4, 2, 2, 300, 8, 0, 128),
]


@pytest.mark.thorough
@pytest.mark.parametrize("examples", [30, pytest.param(240, marks=pytest.mark.slow)])
def test_any_ranges(examples: int) -> None:
    settings(max_examples=examples, deadline=None, derandomize=True)(given(data=st.data())(any_ranges))()


def any_ranges(data: st.DataObject) -> None:
    function, batch, heads, kv_heads, q_len, kv_len, dim, block_q, block_kv = data.draw(
        st.sampled_from(SMALL)
    )
    # Edges of tiles are where things go wrong.
    slot = st.one_of(
        st.integers(-2, kv_len + 2), st.sampled_from([0, 127, 128, 129, 255, 256, kv_len - 1, kv_len])
    )
    rows = st.lists(slot, min_size=q_len, max_size=q_len)
    starts = np.array([data.draw(rows) for _ in range(batch)])
    ends = np.array([data.draw(rows) for _ in range(batch)])
    if data.draw(st.booleans()):  # mostly non-empty
        starts, ends = np.minimum(starts, ends), np.maximum(starts, ends)
    valid = None
    if data.draw(st.booleans()):
        valid = np.ones((batch, kv_len), bool)
        for b in range(batch):
            for _ in range(data.draw(st.integers(0, 3))):
                first = data.draw(slot)
                valid[b, max(first, 0) : max(first, 0) + data.draw(st.sampled_from([1, 5, 128, 260]))] = False
    call = make_call(
        0, "f32", batch, heads, kv_heads, q_len, kv_len, dim, starts=starts, ends=ends, valid=valid
    )
    check(call, function, block_q=block_q, block_kv=block_kv)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_block_bounds(data: st.DataObject) -> None:
    """Against the definition, tile by tile, from a dense mask."""
    kv_len, q_len, rows, tile = 37, 11, 4, 8
    slot = st.integers(-3, kv_len + 3)
    drawn = data.draw(st.lists(st.tuples(slot, slot), min_size=q_len, max_size=q_len))
    holes = data.draw(st.one_of(st.none(), st.lists(st.tuples(slot, slot), max_size=3)))
    valid = np.ones(kv_len, bool)
    for first, last in holes or []:
        valid[max(first, 0) : max(last, 0)] = False
    starts, ends = ranges.clamp_ranges(*(jnp.asarray(x)[None] for x in np.array(drawn).T), kv_len)
    bounds = ranges.block_bounds(
        starts, ends, None if holes is None else jnp.asarray(valid)[None], kv_len=kv_len, rows=rows, tile=tile
    )
    for i in range(-(-q_len // rows)):
        sets = [set(range(max(s, 0), min(e, kv_len))) for s, e in drawn[i * rows : (i + 1) * rows]]
        sets = [x for x in sets if x]
        for t in range(-(-kv_len // tile)):
            keys = set(range(t * tile, (t + 1) * tile))
            alive = {k for k in keys if k < kv_len and valid[k]}
            visited = bounds.lo[i] <= t < bounds.hi[i]
            if any(x & alive for x in sets):
                assert visited
            if visited and bounds.full_lo[i] <= t < bounds.full_hi[i]:
                assert all(keys <= x for x in sets)
            elif visited and sets and all(keys <= x for x in sets):
                raise AssertionError("a full tile was not found to be one")
            if bounds.tile_state is not None:
                if keys <= set(range(kv_len)):
                    expected = ranges.NONE_VALID if not alive else ranges.SOME_VALID
                    if alive == keys:  # how many tiles from here on are valid throughout
                        following = itertools.takewhile(lambda k: k < kv_len and valid[k], range(t * tile, kv_len + 1))
                        expected = len(list(following)) // tile
                    assert bounds.tile_state[t] == expected
        seen = set().union(*sets) if sets else set()
        if (
            seen
        ):  # nothing is visited before the first or after the last tile that has a visible key in its hull
            hull = (min(seen) // tile, max(seen) // tile + 1)
            assert hull[0] <= bounds.lo[i] and bounds.hi[i] <= hull[1] or bounds.lo[i] == bounds.hi[i] == 0
        else:
            assert bounds.lo[i] == bounds.hi[i] == 0


# --- block sizes and bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vmem", [16, 64, 128])
def test_chosen_blocks(vmem: int) -> None:
    for q_len, kv_len, dim, itemsize in itertools.product(
        (1, 7, 200, 577, 4096), (1, 200, 577, 8192), (64, 192, 512), (2, 4)
    ):
        blocks, limit = block_sizes.choose_blocks(q_len, kv_len, dim, dim, itemsize, 0, 0, vmem * 2**20)
        assert blocks.kv % blocks.tile == 0 and blocks.tile % block_sizes.LANES == 0
        assert blocks.rows % (32 // itemsize) == 0
        assert block_sizes.vmem_need(blocks, kv_len, dim, dim, itemsize) <= limit <= vmem * 2**20
        if min(q_len, kv_len) >= 4096 and dim == 64 and itemsize == 2:
            assert blocks.rows >= 512 and blocks.kv >= 512  # 128-blocks are many times slower


@pytest.mark.parametrize("blocks", [(8, 128), (100, 300), (1000, 1000), (24, 384)])
def test_wished_blocks(blocks: tuple[int, int]) -> None:
    fields = {**scattered(8, 1, 150, 500), "valid": np.random.default_rng(9).random((1, 500)) < 0.9}
    check(make_call(23, "f32", 1, 2, 1, 150, 500, 32, **fields), block_q=blocks[0], block_kv=blocks[1])


def test_bad_arguments() -> None:
    good = make_call(0, "f32", 1, 4, 2, 8, 16, 8)

    def refused(words: str, precision: str = "default", **changes: Any) -> None:
        with pytest.raises(ValueError, match=words):
            run(dataclasses.replace(good, **changes), precision=precision)

    refused("not a multiple", q=good.q[:, :3])
    refused("float32 or all bfloat16", k=good.k.bfloat16())
    refused("float32 or all bfloat16", q=good.q.half(), k=good.k.half(), v=good.v.half())
    refused("do not fit together", v=good.v[:, :, :9])
    refused("do not fit together", k=good.k[..., :4])
    refused("4 dimensions", q=good.q[0])
    refused("starts and ends", starts=good.starts[:, :5])
    refused("key_valid", valid=np.ones((1, 17), bool))
    refused("sinks", sinks=np.zeros(2, np.float32))
    refused("softcap", softcap=-1.0)
    refused("precision", precision="medium")
