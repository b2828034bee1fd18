"""The ways that the forward kernel takes through its tiles: chains, endings, triangles, bands, steps of several blocks.

Emulated on CPU against float64 attention. Each test of a way also shows that the call takes it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from range_attention_reference import Call, check, make_call, range_attention, ranges, reference, run
from range_attention_reference import blocks as block_sizes

from tpu_kernels.chip import tracing_for
from tpu_kernels.offdevice.targets import TARGETS

LANES = block_sizes.LANES


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


def causal(batch: int, length: int, width: int = 0) -> dict[str, Any]:
    ends = np.tile(np.arange(1, length + 1), (batch, 1))
    return dict(starts=np.maximum(ends - width, 0) if width else np.zeros_like(ends), ends=ends)


def known(call: Call, block_q: int = 0, block_kv: int = 0) -> dict[str, np.ndarray]:
    """What the kernel is told about the call: entries per block of query rows (bands: per group of rows)."""
    q_len, kv_len = call.q.shape[2], call.k.shape[2]
    dims = call.q.shape[3], call.v.shape[3], call.q.element_size()
    blocks, _ = block_sizes.choose_blocks(q_len, kv_len, *dims, block_q, block_kv, 0)
    assert q_len % blocks.rows == 0 or call.q.shape[0] == 1
    rows = -(-q_len // (blocks.rows * blocks.subs)) * blocks.rows * blocks.subs
    pad = ((0, 0), (0, rows - q_len))
    starts, ends = (jnp.pad(x, pad) for x in ranges.clamp_ranges(jnp.asarray(call.starts), jnp.asarray(call.ends), kv_len))
    bounds = ranges.block_bounds(starts, ends, None, kv_len=kv_len, rows=blocks.rows, tile=blocks.tile)
    found = {"lo": bounds.lo, "hi": bounds.hi, "blocks": jnp.asarray(blocks)}
    if blocks.rows == blocks.tile:
        found["triangle"] = ranges.triangular(starts, ends, bounds, blocks.tile)
    if blocks.kv > ranges.BAND <= blocks.tile:
        found["band"] = ranges.bands(starts, ends, bounds, blocks.rows, blocks.tile, blocks.kv)
    if blocks.subs > 1 and blocks.kv > blocks.tile:
        found["pair"] = ranges.pairs(bounds, found.get("triangle"), blocks.subs)
    return {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), slow(128, "bf16"), slow(64, "f32")])
def test_triangles_after_none_one_and_two_full_tiles(dim: int, dtype: str) -> None:
    call = make_call(0, dtype, 1, 2, 1, 1536, 1536, dim, **causal(1, 1536))
    told = known(call)
    assert told["triangle"].tolist() == [1, 1, 1] and told["hi"].tolist() == [1, 2, 3]
    check(call)


def test_triangles_of_several_documents() -> None:
    """Documents of 512 keys: every block of rows is one triangle, and begins where it is not first."""
    rows = np.arange(1536)[None]
    call = make_call(1, "bf16", 1, 1, 1, 1536, 1536, 64, starts=rows // 512 * 512, ends=rows + 1)
    assert known(call)["triangle"].tolist() == [1, 1, 1]
    check(call)


@pytest.mark.parametrize(("dtype", "valid"), [("bf16", False), thorough("bf16", True), slow("f32", False)])
def test_chains_of_full_tiles(dtype: str, valid: bool) -> None:
    """From 1 to 17 full tiles before the end of what a block of rows sees: chains of eight, four and two, and one left.

    Blocks go in pairs in bfloat16, but for those of calls with validity.
    """
    tiles = np.array([17, 16, 14, 13, 9, 8, 6, 1])
    ends = np.repeat(tiles * LANES, LANES)[None]
    call = make_call(4, dtype, 1, 1, 1, ends.size, 17 * LANES, 64, starts=np.zeros_like(ends), ends=ends)
    call.valid = np.ones((1, 17 * LANES), bool) if valid else None
    blocks = block_sizes.Blocks(*known(call, LANES, 17 * LANES)["blocks"])
    assert (blocks.rows, blocks.kv, blocks.tile) == (LANES, 17 * LANES, LANES)
    check(call, block_q=LANES, block_kv=17 * LANES)


@pytest.mark.parametrize("block_kv", [640, 384, slow(896)])
def test_block_sizes_of_which_only_small_tiles_are_a_part(block_kv: int) -> None:
    """A wish of 640 keys makes tiles of 128: fewer keys than a band, so there are none."""
    check(make_call(5, "bf16", 1, 1, 1, 1100, 1100, 64, **causal(1, 1100, width=100)), block_kv=block_kv)


@pytest.mark.parametrize("shift", [slow(1), 37, slow(128)])
def test_no_triangle_when_the_diagonal_lies_elsewhere(shift: int) -> None:
    """Rows of a group that end outside its square: the upper half may not be dropped, nor the lower taken unmasked."""
    mask = causal(1, 1024)
    mask["ends"] = np.clip(mask["ends"] + shift, 0, 1024)
    call = make_call(2, "bf16", 1, 1, 1, 1024, 1024, 64, **mask)
    assert not known(call)["triangle"][0]
    check(call)


@pytest.mark.parametrize("length", [slow(1500), 600, slow(1030)])
def test_last_tile_past_the_last_key(length: int) -> None:
    """Rows that see all keys, of which the last tile holds fewer: full tiles and a masked one go with the output."""
    check(make_call(3, "bf16", 1, 2, 2, length, length, 64))
    check(make_call(3, "bf16", 1, 2, 1, length, length, 128, **causal(1, length)))


@pytest.mark.parametrize(("length", "dtype"), [(1100, "bf16"), slow(1024, "bf16"), slow(1024, "f32"), slow(1100, "f32")])
def test_bands(length: int, dtype: str) -> None:
    sinks = torch.tensor([0.5, -2.0, 30.0, -torch.inf])
    call = make_call(4, dtype, 1, 4, 2, length, length, 64, **causal(1, length, 128), sinks=sinks)
    band = known(call)["band"]
    assert (band >= 0).mean() > 0.6
    check(call)


def test_bands_with_softcap_and_bands_around_the_row() -> None:
    rows = np.arange(1024)[None]
    call = make_call(5, "bf16", 1, 1, 1, 1024, 1024, 128, starts=rows - 60, ends=rows + 61, softcap=20.0)
    assert (known(call)["band"] < 0).all()  # three groups of keys wide
    check(call)
    call = make_call(5, "bf16", 1, 1, 1, 1024, 1024, 128, starts=rows // 128 * 128 - 64, ends=rows + 1, softcap=20.0)
    assert (known(call)["band"] >= 0).all()
    check(call)


def test_bands_in_several_key_blocks() -> None:
    call = make_call(6, "bf16", 1, 2, 1, 1536, 1536, 64, **causal(1, 1536, 128))
    told = known(call, block_q=256, block_kv=512)
    groups = told["band"].reshape(-1, 2)
    assert (groups >= 0).all(-1).any() and (groups < 0).all(-1).any()  # some blocks of rows lie across two key blocks
    check(call, block_q=256, block_kv=512)


def test_bands_beside_rows_without_keys() -> None:
    mask = causal(1, 1024, 128)
    mask["starts"][:, 100:300] = mask["ends"][:, 100:300]
    mask["starts"][:, 512:640] = 9
    mask["ends"][:, 512:640] = 3
    call = make_call(7, "bf16", 1, 1, 1, 1024, 1024, 64, **mask)
    assert (known(call)["band"] >= 0).all()
    check(call)


@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), slow(128, "f32")])
@pytest.mark.parametrize("mask", [slow("causal"), slow("window"), slow("documents"), "holes", "some rows see nothing"])
def test_several_steps_of_several_blocks(mask: str, dim: int, dtype: str) -> None:
    """18 blocks of rows in 2 steps, 3 key blocks: sums wait for the next key block while other rows are worked on."""
    rows, length = 2304, 1536
    fields: dict[str, Any] = causal(2, rows, 300 if mask == "window" else 0)
    if mask == "documents":
        first = np.repeat([0, 7, 700, 1000], [7, 693, 300, 1304])
        fields["starts"] = np.tile(first, (2, 1))
    elif mask == "holes":
        fields["valid"] = np.random.default_rng(0).random((2, length)) < 0.5
        fields["valid"][0, 500:1100] = False
    elif mask == "some rows see nothing":
        fields["ends"][0, 128:900] = 0
        fields["ends"][1, 1024:] = 0
    call = make_call(8, dtype, 2, 2, 1, rows, length, dim, sinks=torch.tensor([1.0, -1.0]), **fields)
    blocks = known(call, block_q=128, block_kv=512)["blocks"]
    assert blocks.tolist() == [128, 512, 512, 10]  # the last step has fewer
    check(call, block_q=128, block_kv=512)


@pytest.mark.parametrize(("dim", "length"), [(64, 2048), slow(128, 2048), thorough(64, 4096)])
def test_pairs_that_end_together(dim: int, length: int) -> None:
    call = make_call(10, "bf16", 1, 2, 1, length, length, dim, **causal(1, length))
    pairs = known(call)["pair"].tolist()
    assert pairs == [2 * i + 1 if i % 2 == 0 else 0 for i in range(length // 512)]
    check(call)


@pytest.mark.parametrize(("keys", "ends"), [(2048, True), thorough(2560, True), slow(2100, False)])
def test_pairs_that_see_every_key(keys: int, ends: bool) -> None:
    """Four tiles end with the pair; a fifth, or one that is not filled, is left to each block by itself."""
    call = make_call(11, "bf16", 1, 2, 1, 1024, keys, 64, sinks=torch.tensor([1.0, -1.0]))
    assert known(call)["pair"].tolist() == [8, 0]
    check(call)


@pytest.mark.parametrize("tiles", [4, slow(6), slow(14), thorough(16)])
def test_long_runs_of_pairs(tiles: int) -> None:
    """Key blocks of 17 tiles of 128 keys: pairs in chains of eight, four and two, and what is left to each by itself."""
    keys = 17 * 128
    fields = dict(starts=np.zeros((1, 256), int), ends=np.full((1, 256), tiles * 128 + 60))
    call = make_call(15, "bf16", 1, 1, 1, 256, keys, 64, **fields)
    assert known(call, 128, keys)["pair"].tolist() == [2 * tiles, 0]
    check(call, block_q=128, block_kv=keys)


def test_no_pairs_of_rows_that_begin_apart_or_share_little() -> None:
    for mask in (causal(1, 2048, 700), dict(starts=np.zeros((1, 1024), int), ends=np.full((1, 1024), 1000))):
        length = mask["ends"].shape[1]
        assert not known(make_call(12, "bf16", 1, 1, 1, length, 2048, 64, **mask))["pair"].any()


@pytest.mark.parametrize("mask", ["causal", thorough("full"), slow("ends apart")])
def test_pairs_over_several_key_blocks_and_steps(mask: str) -> None:
    """Key blocks of 5 or 7 tiles of 128: sums of every block of rows wait, and pairs stop at each key block's end."""
    rows, keys = 2304, 1536
    fields: dict[str, Any] = {} if mask == "full" else causal(1, rows)
    if mask == "ends apart":
        fields["ends"] = np.repeat(np.arange(18)[::-1] * 85 + 60, 128)[None]
    call = make_call(13, "bf16", 1, 2, 1, rows, keys, 64, **fields)
    check(call, block_q=128, block_kv=640 if mask == "full" else 896)


@pytest.mark.parametrize(("mask", "length", "block_q", "block_kv"), [
    ("causal", 1536, 128, 896), thorough("causal", 2048, 0, 0), thorough("full", 2304, 128, 2176),
])  # fmt: skip
def test_pairs_on_chips_with_narrow_matrix_units(
    mask: str, length: int, block_q: int, block_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of two tiles: the same sums in the same order as anywhere, so the same bits."""
    call = make_call(16, "bf16", 1, 1, 1, length, length, 64, **(causal(1, length) if mask == "causal" else {}))
    assert known(call, block_q, block_kv)["pair"].any()
    elsewhere = run(call, block_q=block_q, block_kv=block_kv)
    chains: list[list[int]] = []
    pairs = range_attention.forward_kernel.Pair
    made = pairs.__init__

    def spy(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        chains.append(self.chains)

    monkeypatch.setattr(pairs, "__init__", spy)
    with tracing_for(TARGETS["v5e"]):
        out = check(call, block_q=block_q, block_kv=block_kv)
    assert chains and all(each == [2] for each in chains)
    assert torch.equal(out, elsewhere)


@pytest.mark.parametrize("name", TARGETS)
def test_which_chips_have_narrow_matrix_units(name: str) -> None:
    narrow = range_attention.arithmetic.narrow_matrix_units
    assert not narrow()
    with tracing_for(TARGETS[name]):
        assert narrow() is (TARGETS[name].mxu_width == 128)


def test_a_pair_whose_last_tiles_hold_a_value_that_must_not_leak() -> None:
    clean = make_call(14, "bf16", 1, 1, 1, 2048, 2048, 64, **causal(1, 2048))
    v = clean.v.clone()
    v[0, 0, 2000, 3] = torch.nan
    call = Call(clean.q, clean.k, v, scale=clean.scale, starts=clean.starts, ends=clean.ends)
    out = run(call)
    assert torch.isfinite(out[:, :, :2000]).all() and not torch.isfinite(out[:, :, 2000:]).all(-1).any()


@pytest.mark.parametrize("bad", [torch.nan, slow(torch.inf)])
@pytest.mark.parametrize(("mask", "dim"), [("causal", 64), slow("causal", 128), ("window", 64), slow("full", 64)])
def test_values_reach_only_the_rows_that_see_them(mask: str, dim: int, bad: float) -> None:
    """One value of key 700 is not finite: its rows show it, in every head of the group, and no other row does."""
    length = 1030 if mask == "full" else 1024
    fields = {} if mask == "full" else causal(1, length, 128 if mask == "window" else 0)
    if mask == "full":
        fields = dict(starts=np.zeros((1, length), int), ends=np.full((1, length), length))
        fields["ends"][:, :600] = 700
    clean = make_call(9, "bf16", 2, 4, 1, length, length, dim, **{k: np.tile(x, (2, 1)) for k, x in fields.items()})
    v = clean.v.clone()
    v[1, 0, 700, 3] = bad
    call = Call(clean.q, clean.k, v, scale=clean.scale, starts=clean.starts, ends=clean.ends)
    sees = torch.from_numpy(call.mask[1, :, 700])
    assert sees.any() and not sees.all()
    out, expected = run(call), check(clean)
    assert torch.equal(out[0], expected[0])  # the other batch element, to the bit
    assert not torch.isfinite(out[1][:, sees]).all(-1).any()
    rest = (out[1][:, ~sees].double() - reference(clean)[1][:, ~sees]).abs().max().item()
    assert rest <= 2 * (expected.double() - reference(clean)).abs().max().item()


# --- what the kernel is told ---------------------------------------------------------------------------------------


@st.composite
def rows_and_keys(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int, int]:
    """(starts, ends [1, rows], kv_len, rows a block, key block): ranges that move with the rows, and some that do not."""
    rows = draw(st.sampled_from([128, 256, 512]))
    length = rows * draw(st.integers(1, 4))
    kv_len = draw(st.sampled_from([512, 1024, 1100]))
    slope, back, ahead = draw(st.integers(-300, 900)), draw(st.integers(0, 300)), draw(st.integers(0, 200))
    at = np.arange(length)[None] + slope
    starts, ends = at - back, at + ahead
    for _ in range(draw(st.integers(0, 2))):
        row = draw(st.integers(0, length - 1))
        starts[:, row], ends[:, row] = draw(st.integers(0, kv_len)), draw(st.integers(0, kv_len))
    return np.clip(starts, 0, kv_len), np.clip(ends, 0, kv_len), kv_len, rows, draw(st.sampled_from([512, 1024]))


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(rows_and_keys())
def test_bands_hold_all_that_their_rows_see(case: tuple[np.ndarray, np.ndarray, int, int, int]) -> None:
    starts, ends, kv_len, rows, kv = case
    told = [jnp.asarray(x, jnp.int32) for x in (starts, ends)]
    bounds = ranges.block_bounds(*told, None, kv_len=kv_len, rows=rows, tile=512)
    band = np.asarray(ranges.bands(*told, bounds, rows, 512, kv)).reshape(-1, rows // LANES)
    assert ((band >= 0).all(-1) | (band == -1).all(-1)).all()
    for block, group in zip(*np.nonzero(band >= 0), strict=True):
        first = int(bounds.lo[block]) * 512 // kv * kv + band[block, group] * LANES
        assert first // kv == (first + ranges.BAND - 1) // kv
        for row in range(block * rows + group * LANES, block * rows + (group + 1) * LANES):
            assert starts[0, row] >= ends[0, row] or (first <= starts[0, row] and ends[0, row] <= first + ranges.BAND)


@settings(max_examples=40, deadline=None)
@given(rows_and_keys())
def test_triangles_are_what_their_rows_see(case: tuple[np.ndarray, np.ndarray, int, int, int]) -> None:
    starts, ends, kv_len, rows, _ = case
    told = [jnp.asarray(x, jnp.int32) for x in (starts, ends)]
    bounds = ranges.block_bounds(*told, None, kv_len=kv_len, rows=rows, tile=rows)
    triangle = np.asarray(ranges.triangular(*told, bounds, rows))
    for block in np.nonzero(triangle)[0]:
        last = (int(bounds.hi[block]) - 1) * rows
        for row in range(block * rows, (block + 1) * rows):
            square = last + row % rows // LANES * LANES
            assert starts[0, row] >= ends[0, row] or (starts[0, row] <= last and square <= ends[0, row] <= square + LANES)


@settings(max_examples=60, deadline=None)
@given(rows_and_keys())
def test_pairs_see_whole_tiles_alike(case: tuple[np.ndarray, np.ndarray, int, int, int]) -> None:
    starts, ends, kv_len, rows, _ = case
    told = [jnp.asarray(x, jnp.int32) for x in (starts, ends)]
    tile = min(rows, 128)
    bounds = ranges.block_bounds(*told, None, kv_len=kv_len, rows=rows, tile=tile)
    triangle = ranges.triangular(*told, bounds, tile) if tile == rows else None
    subs = starts.shape[1] // rows
    if subs == 1:
        return
    for block, pair in enumerate(np.asarray(ranges.pairs(bounds, triangle, subs))):
        first, end = int(bounds.lo[block]), int(pair) // 2
        assert not pair or (block % subs % 2 == 0 and block % subs + 1 < subs and (end - first) % 2 == 0)
        for row in range(block * rows, (block + 2) * rows if pair else 0):
            live = starts[0, row] < ends[0, row]
            assert not live or end == first or (starts[0, row] <= first * tile and end * tile <= ends[0, row])
        if pair % 2:
            assert np.asarray(triangle)[block] and np.asarray(triangle)[block + 1]
            assert (int(bounds.hi[block]), int(bounds.hi[block + 1])) == (end + 1, end + 2)


def test_causal_rows_end_in_triangles() -> None:
    starts, ends = (jnp.asarray(x, jnp.int32) for x in causal(1, 2048).values())
    bounds = ranges.block_bounds(starts, ends, None, kv_len=2048, rows=512, tile=512)
    assert ranges.triangular(starts, ends, bounds, 512).tolist() == [1] * 4
    assert ranges.triangular(starts, jnp.minimum(ends + 1, 2048), bounds, 512).tolist() != [1] * 4


def test_key_blocks_of_a_step() -> None:
    lo, hi = jnp.asarray([0, 3, 0, 0, 5, 0]), jnp.asarray([2, 5, 0, 0, 9, 0])
    bounds = ranges.BlockBounds(lo, hi, lo, lo, None)
    first, end = ranges.step_bounds(bounds, 3, 2)
    assert first.tolist() == [0, 0, 2] and end.tolist() == [3, 0, 5]


@pytest.mark.parametrize(("length", "dim", "last"), [
    (4096, 64, True), (4096, 192, True), (577, 72, True), (4096, 128, False), (4096, 256, False), (1, 64, False),
    (64, 64, False), (4096, 8, False), (4096, 65, False),
])  # fmt: skip
def test_which_operands_lie_with_the_length_last(length: int, dim: int, last: bool) -> None:
    assert block_sizes.length_last(length, dim) == last
