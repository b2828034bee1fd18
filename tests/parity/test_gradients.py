"""forward_with_lse and backward, emulated on CPU, against float64 formulas and torch's own gradients."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gradient_statistics import FEATURES, SEEDS, gradient_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from range_attention_reference import (
    TWO_KERNELS,
    check_gradients,
    make_call,
    output_gradient,
    ranges,
    reference_gradients,
    run,
    run_gradients,
)
from range_attention_reference import blocks as block_sizes
from test_range_attention_kernel import MASKS, causal, packed, padded, scattered, window

DTYPES = ("f32", "bf16")
WAYS = [pytest.param({}, id="one kernel"), pytest.param(TWO_KERNELS, id="two kernels")]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(mask: str, dtype: str) -> None:
    check_gradients(make_call(0, dtype, 2, 4, 2, 200, 200, 64, **MASKS[mask]), block_q=128, block_kv=128)


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "feature", [each if each == "left padding" else pytest.param(each, marks=pytest.mark.slow) for each in FEATURES]
)
def test_errors_are_at_most_twice_those_of_torch(feature: str, dtype: str) -> None:
    """No rounding on top, as `check_gradients` allows for the luck of one sample: here there are enough of them.

    Beside attention written out, which softcap and sinks need, the largest error is left to `check_gradients`: that form is
    all but exact in rows with few keys, where the kernel errs as SDPA does (docs/gradient-errors.md).
    """
    assert len(SEEDS) >= 8
    by_sdpa = not FEATURES[feature].keys() & {"softcap", "sinks"}
    for name, errors in gradient_errors(feature, dtype).items():
        ours, theirs = errors["kernel"], errors["torch"]
        assert ours.rms <= 2 * theirs.rms, f"{name}: root mean square {ours.rms:.3e}, torch's {theirs.rms:.3e}"
        if by_sdpa:
            assert ours.largest <= 2 * theirs.largest, f"{name}: {ours.largest:.3e}, SDPA's {theirs.largest:.3e}"


def test_the_references_agree() -> None:
    """The formulas of the reference against float64 autograd of the attention they belong to."""
    call = make_call(1, "f32", 1, 4, 2, 20, 20, 16, softcap=2.0, sinks=np.array([0.5, -1, 2, 0]), **causal(1, 20, 20))
    do = output_gradient(call).double()
    q, k, v = (x.double().requires_grad_() for x in (call.q, call.k, call.v))
    sinks = torch.from_numpy(call.sinks).requires_grad_()
    s = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) * call.scale / 2)
    s = s.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    s = torch.cat([s, sinks[None, :, None, None].expand(1, 4, 20, 1)], -1)
    (torch.softmax(s, -1)[..., :20] @ v.repeat_interleave(2, 1)).backward(do)
    expected = dict(lse=s.logsumexp(-1).detach(), dq=q.grad, dk=k.grad, dv=v.grad, dsinks=sinks.grad)
    made = reference_gradients(call, do)
    assert made.keys() - {"dsinks terms"} == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(made[name], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["causal", pytest.param("left padding", marks=pytest.mark.slow)])
def test_blocks_chosen_by_the_kernel(mask: str) -> None:
    check_gradients(make_call(0, "f32", 2, 4, 2, 200, 200, 64, **MASKS[mask]))


@pytest.mark.parametrize("heads", [(4, 1), (6, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in [(2, 2), (8, 1)])])
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_head_groups(heads: tuple[int, int], dtype: str) -> None:
    """Every query head of a group adds to its KV head, over several query and key blocks."""
    call = make_call(3, dtype, 1, *heads, 260, 260, 16, **causal(1, 260, 260))
    check_gradients(call, block_q=128, block_kv=128)


def test_heads_equal_length() -> None:
    """Heads and rows cannot be told apart by shape here: a swapped layout shows only in the numbers."""
    check_gradients(make_call(4, "f32", 2, 8, 8, 8, 8, 8, **causal(2, 8, 8)))


DIMS = [(40, 40), (64, 64), (80, 80), (128, 128), (192, 128), (64, 200), (256, 256)]
FAST_DIMS = [(80, 80), (192, 128)]


@pytest.mark.parametrize("dim", [x if x in FAST_DIMS else pytest.param(x, marks=pytest.mark.slow) for x in DIMS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dim: tuple[int, int], dtype: str) -> None:
    check_gradients(make_call(1, dtype, 1, 2, 1, 50, 150, *dim, **scattered(0, 1, 50, 150)), block_kv=128)


@pytest.mark.parametrize("lengths", [(1, 1), (40, 7), (129, 577), pytest.param((7, 40), marks=pytest.mark.slow)])
def test_odd_lengths_full(lengths: tuple[int, int]) -> None:
    """Full attention with small scores: a key or a row of padding that took part would show."""
    check_gradients(make_call(2, "f32", 1, 2, 1, *lengths, 16))


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [*range(2, 21, 3), 127, 128, 255, 256, 257, 513])
def test_every_length(q_len: int) -> None:
    for kv_len in (q_len, 2 * q_len + 1):
        check_gradients(make_call(q_len, "f32", 1, 2, 1, q_len, kv_len, 32))
        check_gradients(make_call(q_len, "f32", 1, 2, 1, q_len, kv_len, 32, **causal(1, q_len, kv_len)))


@pytest.mark.parametrize("case", ["holes", pytest.param("window", marks=pytest.mark.slow)])
def test_several_tiles_in_one_key_block(case: str) -> None:
    """1024 keys are one block of two tiles; some tiles unmasked, some not, some not visited."""
    fields: dict[str, Any] = causal(1, 400, 1300) if case == "holes" else window(1, 400, 1300, 300)
    if case == "holes":
        fields["valid"] = np.ones((1, 1300), bool)
        fields["valid"][0, [3, 1030, 1031]] = False
        fields["valid"][0, 512:1024] = False
    check_gradients(make_call(5, "f32", 1, 2, 1, 400, 1300, 32, **fields), block_q=128)


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_pieces_of_several_tiles_and_blocks_of_rows(dtype: str) -> None:
    """Four blocks of rows and five tiles: two by two where both blocks see both tiles whole, by themselves elsewhere.

    In the first sequence no two blocks begin, end or are full alike; in the second all see all, but for a key not valid.
    """
    by_row = lambda *values: np.stack([np.repeat(values[:4], 128), np.repeat(values[4:], 512)])  # noqa: E731
    starts, ends = by_row(0, 0, 140, 150, 0), by_row(200, 430, 600, 400, 600)
    valid = np.ones((2, 600), bool)
    valid[1, 130] = False
    call = make_call(7, dtype, 2, 2, 1, 512, 600, 32, starts=starts, ends=ends, valid=valid)
    blocks, _ = block_sizes.choose_fused_blocks(512, 600, 32, 32, call.q.element_size(), 128, 128, 0)
    assert (blocks.rows, blocks.tile, blocks.subs) == (128, 128, 2)
    check_gradients(call, block_q=128, block_kv=128)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_long(dtype: str) -> None:
    n = 2500
    check_gradients(make_call(6, dtype, 1, 2, 1, n, n, 64, **causal(1, n, n)))
    check_gradients(make_call(6, dtype, 1, 2, 1, n, n, 64, **window(1, n, n, 700)))


# --- score arithmetic ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(dtype: str) -> None:
    """Scores up to +-100, so that the cap bites; hidden keys stay hidden behind it."""
    fields = {**causal(2, 16, 140), "valid": padded([100, 0], 140, "left")}
    call = make_call(9, dtype, 2, 4, 2, 16, 140, 64, softcap=30.0, **fields)
    call.q.mul_(20)
    check_gradients(call, block_kv=128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype: str) -> None:
    """Their gradient too; rows without keys, whose sink takes all the weight, add nothing to it."""
    sinks = np.array([-5, 0, 5, 2], np.float32)
    fields: dict[str, Any] = window(1, 130, 130, 100)
    fields["ends"] = fields["ends"].copy()
    fields["ends"][0, 2] = -1
    valid = np.ones((1, 130), bool)
    valid[0, :5] = False  # rows 0 to 4 have a range and no key in it
    made = check_gradients(make_call(10, dtype, 1, 4, 2, 130, 130, 64, sinks=sinks, valid=valid, **fields), block_kv=128)
    assert (made["lse"][:, :, :5] == -torch.inf).all()


@pytest.mark.thorough
def test_a_sink_without_weight() -> None:
    call = make_call(10, "f32", 1, 2, 1, 16, 16, 16, sinks=np.array([-np.inf, 1], np.float32), **causal(1, 16, 16))
    made = check_gradients(call)
    assert made["dsinks"][0] == 0 and made["dsinks"][1] != 0


@pytest.mark.thorough
def test_softcap_and_sinks_together() -> None:
    sinks = np.array([0.5, -1], np.float32)
    check_gradients(make_call(11, "f32", 1, 2, 1, 40, 150, 16, softcap=2.0, sinks=sinks, **scattered(3, 1, 40, 150)))


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [-0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_scales(scale: float) -> None:
    check_gradients(make_call(12, "f32", 1, 2, 1, 16, 140, 64, scale=scale, **causal(1, 16, 140)))


@pytest.mark.thorough
def test_large_scores() -> None:
    call = make_call(11, "f32", 1, 2, 1, 64, 200, 64, **causal(1, 64, 200))
    call.q.mul_(60)
    check_gradients(call, block_kv=128)


def test_gradient_of_lse() -> None:
    """A loss on lse itself (a z-loss, or merging attention over parts of the keys)."""
    sinks = np.array([0.5, -1, 0, 3], np.float32)
    call = make_call(13, "f32", 2, 4, 2, 40, 150, 32, sinks=sinks, **scattered(5, 2, 40, 150))
    dlse = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(5))
    made = check_gradients(call, dlse=dlse, block_kv=128)
    without = run_gradients(call, output_gradient(call), block_kv=128)
    assert not torch.allclose(made["dk"], without["dk"], atol=1e-2)


def test_three_pass_precision() -> None:
    call = make_call(14, "f32", 1, 2, 1, 64, 140, 64, **causal(1, 64, 140))
    do = output_gradient(call)
    made, expected = run_gradients(call, do, precision="high"), reference_gradients(call, do)
    for name in ("dq", "dk", "dv"):
        error = (made[name].double() - expected[name]).abs().max().item()
        assert 1e-7 < error < 2e-4, (name, error)


def test_output_is_that_of_forward() -> None:
    """The residual is one more output of the same kernel: not one bit of the first changes."""
    call = make_call(15, "bf16", 2, 4, 2, 40, 300, 64, **scattered(7, 2, 40, 300))
    assert torch.equal(run_gradients(call, output_gradient(call))["out"], run(call))


# --- what must not leak --------------------------------------------------------------------------------------------


def test_packed_documents_are_apart() -> None:
    """The gradient of one document with respect to another is 0, not small: blocks and tiles hold parts of both."""
    lengths = [90, 110]
    call = make_call(16, "f32", 1, 2, 1, 200, 200, 32, **packed(1, lengths))
    do = output_gradient(call)
    for document in (slice(0, 90), slice(90, 200)):
        only = torch.zeros_like(do)
        only[:, :, document] = do[:, :, document]
        made = check_gradients(call, only, block_q=128, block_kv=128)
        other = torch.ones(200, dtype=torch.bool)
        other[document] = False
        for name in ("dq", "dk", "dv"):
            assert (made[name][:, :, other] == 0).all() and (made[name][:, :, ~other] != 0).any()


POISONS = [float("nan"), float("inf"), -float("inf"), 3e38]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.thorough
@pytest.mark.parametrize("v_dim", [32, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_hidden_slots_do_not_leak(way: dict[str, int], v_dim: int, dtype: str) -> None:
    """Poison in keys and values that no row sees, and in queries that see no key, changes no bit of any gradient."""
    fields = {**causal(2, 140, 140), "valid": padded([60, 0], 140, "left")}
    fields["ends"] = fields["ends"].copy()
    fields["ends"][1, [0, 3, 139]] = 0
    call = make_call(17, dtype, 2, 4, 2, 140, 140, 32, v_dim, **fields)
    do = output_gradient(call)
    clean = run_gradients(call, do, block_q=128, block_kv=128, **way)
    dead_keys = torch.from_numpy(~call.mask.any(1))[:, None, :, None]
    dead_rows = torch.from_numpy(~call.mask.any(2))[:, None, :, None]
    assert dead_keys.sum() >= 60 and dead_rows.sum() == 63
    for poison in POISONS:
        poisoned = dataclasses.replace(
            call, q=call.q.masked_fill(dead_rows, poison), k=call.k.masked_fill(dead_keys, poison),
            v=call.v.masked_fill(dead_keys, poison),
        )  # fmt: skip
        made = run_gradients(poisoned, do.masked_fill(dead_rows, poison), block_q=128, block_kv=128, **way)
        for name, expected in clean.items():
            assert torch.equal(made[name], expected), (name, poison)
            assert name == "lse" or made[name].isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_poison_reaches_only_rows_and_keys_that_see_it(way: dict[str, int]) -> None:
    """A NaN that some rows see spreads to those rows and to the keys they see, and no further."""
    call = make_call(18, "f32", 1, 2, 1, 130, 130, 32, **window(1, 130, 130, 20))
    do = output_gradient(call)
    options = dict(block_q=128, block_kv=128, **way)
    clean = run_gradients(call, do, **options)
    mask = torch.from_numpy(call.mask[0])
    for what, at in itertools.product(("q", "k", "v", "do"), (3, 127)):
        tensors = {name: getattr(call, name).clone() for name in "qkv"} | {"do": do.clone()}
        tensors[what][:, :, at, 5] = float("nan")
        made = run_gradients(dataclasses.replace(call, **{name: tensors[name] for name in "qkv"}), tensors["do"], **options)
        rows = mask[:, at] if what in "kv" else torch.arange(130) == at
        keys = mask[rows].any(0)
        for name, reached in (("dq", rows), ("dk", keys), ("dv", keys)):
            assert torch.equal(made[name][:, :, ~reached], clean[name][:, :, ~reached]), (what, name)
            if not (what in "kv" and name != "dq"):  # keys seen only together with other keys may stay finite
                assert made[name][:, :, reached].isnan().any(-1).all(), (what, name)


# --- any ranges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_any_ranges(examples: int) -> None:
    settings(max_examples=examples, deadline=None, derandomize=True)(given(data=st.data())(any_ranges))()


def any_ranges(data: st.DataObject) -> None:
    batch, q_len, kv_len = 2, 150, 300
    slot = st.one_of(st.integers(-2, kv_len + 2), st.sampled_from([0, 127, 128, 129, 255, 256, kv_len - 1, kv_len]))
    runs = st.lists(st.tuples(slot, slot, st.integers(1, 60)), min_size=q_len, max_size=q_len)
    starts, ends = np.zeros((2, batch, q_len), int)
    for b in range(batch):  # runs of equal rows, so that full and empty tiles do occur
        drawn = [(s, e) for s, e, n in data.draw(runs) for _ in range(n)][:q_len]
        starts[b], ends[b] = np.array(drawn).T
    if data.draw(st.booleans()):
        starts, ends = np.minimum(starts, ends), np.maximum(starts, ends)
    valid = np.ones((batch, kv_len), bool)
    for b in range(batch):
        for _ in range(data.draw(st.integers(0, 3))):
            first = data.draw(slot)
            valid[b, max(first, 0) : max(first, 0) + data.draw(st.sampled_from([1, 5, 128, 260]))] = False
    call = make_call(0, "f32", batch, 2, 1, q_len, kv_len, 8, starts=starts, ends=ends, valid=valid)
    check_gradients(call, block_q=128, block_kv=128)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_query_bounds(data: st.DataObject) -> None:
    """Every query block that sees a key block is between its bounds, and the blocks at the bounds do see it."""
    kv_len, q_len, rows, tile, n = 37, 21, 4, 8, 2
    slot = st.integers(-3, kv_len + 3)
    drawn = np.array(data.draw(st.lists(st.tuples(slot, slot), min_size=2 * q_len, max_size=2 * q_len)))
    starts, ends = (jnp.asarray(x.reshape(2, q_len)) for x in drawn.T)
    starts, ends = ranges.clamp_ranges(starts, ends, kv_len)
    bounds = ranges.block_bounds(starts, ends, None, kv_len=kv_len, rows=rows, tile=tile, full_needs_every_row=True)
    q_blocks, kv_blocks = -(-q_len // rows), -(-kv_len // (n * tile))
    first, last = (np.asarray(x).reshape(2, kv_blocks) for x in ranges.query_bounds(bounds, 2, kv_blocks, n))
    lo, hi, full_lo, full_hi = (np.asarray(x).reshape(2, q_blocks) for x in bounds[:4])
    for b, c in itertools.product(range(2), range(kv_blocks)):
        tiles = set(range(c * n, c * n + n))
        seeing = [i for i in range(q_blocks) if tiles & set(range(lo[b, i], hi[b, i]))]
        assert (first[b, c], last[b, c]) == ((seeing[0], seeing[-1] + 1) if seeing else (0, 0))
    for b, i in itertools.product(range(2), range(q_blocks)):
        part = slice(i * rows, (i + 1) * rows)
        live = np.asarray(starts[b, part] < ends[b, part])
        if len(live) < rows or not live.all():
            assert full_lo[b, i] >= full_hi[b, i]


# --- block sizes and bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vmem", [14, 56, 100])
def test_chosen_blocks(vmem: int) -> None:
    for q_len, kv_len, dim, itemsize in itertools.product(
        (1, 7, 200, 577, 4096), (1, 200, 577, 8192), (64, 192, 512), (2, 4)
    ):
        blocks, limit = block_sizes.choose_backward_blocks(q_len, kv_len, dim, dim, itemsize, 0, 0, vmem * 2**20)
        assert blocks.kv % blocks.tile == 0 and blocks.tile % 128 == 0 and blocks.rows % 128 == 0
        assert block_sizes.backward_vmem_need(blocks, dim, dim, itemsize) <= limit <= vmem * 2**20
        if min(q_len, kv_len) >= 4096 and dim == 64 and itemsize == 2:
            assert blocks.rows >= 512 and blocks.kv >= 512
        sizes = (q_len, kv_len, dim, dim, itemsize, 0, 0, vmem * 2**20)
        if fused := block_sizes.choose_fused_blocks(*sizes):
            blocks, limit = fused
            assert blocks.kv >= kv_len and blocks.kv % blocks.tile == 0
            assert blocks.tile % 128 == 0 and blocks.rows % 128 == 0 and blocks.rows * (blocks.subs - 1) < q_len
            assert block_sizes.fused_vmem_need(blocks, dim, dim, itemsize) <= limit <= vmem * 2**20
        assert fused or kv_len * dim * itemsize > 200 * 512 * 2  # short keys always fit


def test_no_room_for_all_keys() -> None:
    assert block_sizes.choose_fused_blocks(8, 8, 8, 8, 4, 0, 0, **TWO_KERNELS) is None
    assert block_sizes.choose_fused_blocks(4096, 8192, 128, 128, 2, 0, 0, 14 * 2**20) is None
    assert block_sizes.choose_fused_blocks(4096, 8192, 128, 128, 2, 0, 0, 100 * 2**20) is not None


@pytest.mark.parametrize("blocks", [(8, 300), pytest.param((1000, 1000), marks=pytest.mark.slow)])
def test_wished_blocks(blocks: tuple[int, int]) -> None:
    call = make_call(23, "f32", 1, 2, 1, 150, 300, 16, **scattered(8, 1, 150, 300))
    check_gradients(call, block_q=blocks[0], block_kv=blocks[1])


def test_bad_arguments() -> None:
    call = make_call(0, "f32", 1, 4, 2, 8, 16, 8)
    good = output_gradient(call)
    with pytest.raises(ValueError, match=r"do must be float32 \(1, 4, 8, 8\)"):
        run_gradients(call, good[..., :4])
    with pytest.raises(ValueError, match="do must be float32"):
        run_gradients(call, good.bfloat16())
    with pytest.raises(ValueError, match="dlse must be float32"):
        run_gradients(call, good, torch.zeros(1, 4, 9))
    with pytest.raises(ValueError, match="not a multiple"):
        run_gradients(dataclasses.replace(call, q=call.q[:, :3]), good)
