"""The range mask as a tensor: encoding and decoding, and that no other integer mask is taken for one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels.mask_encoding import (
    check_range_mask_shape,
    decode_ranges,
    encode_ranges,
    expand_range_mask,
    is_range_shape,
)

LENGTHS = st.one_of(st.integers(1, 10), st.sampled_from([31, 32, 33, 127, 128, 129, 256, 300]))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), LENGTHS, st.booleans(), st.integers(0, 2**31))
def test_expansion_is_the_definition(batch, q_len, kv_len, with_validity, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(-5, kv_len + 5, (batch, q_len), generator=generator)
    ends = torch.randint(-5, kv_len + 5, (batch, q_len), generator=generator)
    valid = torch.rand(batch, kv_len, generator=generator) < 0.5 if with_validity else None
    mask = encode_ranges(starts, ends, valid, kv_len)
    assert mask.dtype == torch.int32 and is_range_shape(mask.shape, q_len, kv_len)
    assert mask.shape[-1] != kv_len
    want = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        for r in range(q_len):
            for k in range(kv_len):
                inside = int(starts[b, r]) <= k < int(ends[b, r])
                want[b, 0, r, k] = inside and (valid is None or bool(valid[b, k]))
    assert torch.equal(expand_range_mask(mask, q_len, kv_len), want)
    back_starts, back_ends, back_valid = decode_ranges(mask, q_len, kv_len)
    assert torch.equal(back_starts.long(), starts.clamp(0, kv_len))
    assert torch.equal(back_ends.long(), ends.clamp(0, kv_len))
    assert (back_valid is None) == (valid is None)
    assert valid is None or torch.equal(back_valid, valid)


def test_every_bit_of_a_word_survives():
    valid = torch.eye(130, dtype=torch.bool)
    ends = torch.full((130, 1), 130)
    assert torch.equal(expand_range_mask(encode_ranges(ends * 0, ends, valid, 130), 1, 130)[:, 0, 0], valid)


def test_known_bytes():
    mask = encode_ranges(torch.tensor([[0, 1]]), torch.tensor([[1, 3]]), torch.tensor([[True, False, True]]), 3)
    assert mask.tolist() == [[[[0b101, 0, 0, 0], [0, 1, 0, 0], [1, 3, 0, 0]]]]
    assert encode_ranges(torch.tensor([[0]]), torch.tensor([[2]]), None, 2).tolist() == [[[[0, 2, 0]]]]


@pytest.mark.parametrize("kv_len", [1, 2, 3, 4, 5, 128, 129])
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_a_mask_of_pairs_is_never_a_range_mask(q_len, kv_len):
    assert not is_range_shape((2, 1, q_len, kv_len), q_len, kv_len)
    assert not is_range_shape((2, 4, q_len, 2), q_len, kv_len)


def test_a_sliced_range_mask_is_refused():
    mask = encode_ranges(torch.zeros(1, 6), torch.full((1, 6), 9), torch.ones(1, 9).bool(), 9)
    for sliced in (mask[:, :, -6:], mask[:, :, -1:], mask[:, 0], mask[..., :2]):
        with pytest.raises(ValueError, match="not a range mask for 6 queries and 9 keys"):
            check_range_mask_shape(sliced.shape, 6, 9)
