"""The range mask: which keys each query row sees, as one 4-D int32 tensor, and back.

Models hand a 4-D mask through untouched, and nothing else; so all of it is in one tensor. With Q query rows, KV keys:

* without validity: [B, 1, Q, W], W = 2 (3 when KV == 2); columns start, end, then zeros.
* with key validity: [B, 1, V + Q, W], V = ceil(KV / 128), W = 4 (5 when KV == 4). The first V rows hold bits: in row i,
  column c < 4, bit b says whether key 128 * i + 32 * c + b may be attended. The last Q rows are ranges as above.

Row r sees key k exactly when start <= k < end and k is valid. Indices count key slots of the tensor given to attention.
W never equals KV, so a user's own [B, 1, Q, KV] integer mask cannot be taken for one of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

_KEYS_PER_ROW = 128  # 4 words of 32 bits


def encode_ranges(starts: torch.Tensor, ends: torch.Tensor, valid: torch.Tensor | None, kv_len: int) -> torch.Tensor:
    """A range mask.

    Args:
        starts, ends: integer [B, Q]; row r sees keys starts[b, r] <= k < ends[b, r]. Clamped to [0, kv_len].
        valid: bool [B, kv_len], or None where every key may be attended.
        kv_len: number of keys.
    """
    ranges = torch.stack((starts, ends), -1).to(torch.int32).clamp(0, kv_len).unsqueeze(1)
    if valid is None:
        return F.pad(ranges, (0, _width(kv_len, False) - 2))
    batch = valid.shape[0]
    bits = F.pad(valid.to(torch.int32), (0, -kv_len % _KEYS_PER_ROW)).reshape(batch, 1, -1, 4, 32)
    shifts = torch.arange(32, device=valid.device, dtype=torch.int32)
    # The 32 bits of a word are disjoint, so the sum is their union; bit 31 is int32's sign.
    words = (bits << shifts).sum(-1, dtype=torch.int32)
    width = _width(kv_len, True)
    return torch.cat((F.pad(words, (0, width - 4)), F.pad(ranges, (0, width - 2))), 2)


def decode_ranges(
    mask: torch.Tensor, q_len: int, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(starts [B, Q], ends [B, Q], valid bool [B, KV] or None) of a range mask."""
    check_range_mask_shape(mask.shape, q_len, kv_len)
    ranges = mask[:, 0, -q_len:]
    starts, ends = ranges[..., 0], ranges[..., 1]
    if mask.shape[2] == q_len:
        return starts, ends, None
    words = mask[:, 0, :-q_len, :4].reshape(mask.shape[0], -1, 1)
    bits = (words >> torch.arange(32, device=mask.device, dtype=torch.int32)) & 1
    return starts, ends, bits.reshape(mask.shape[0], -1)[:, :kv_len].bool()


def expand_range_mask(mask: torch.Tensor, q_len: int, kv_len: int) -> torch.Tensor:
    """The same mask element by element: bool [B, 1, Q, KV], True where the row sees the key."""
    starts, ends, valid = decode_ranges(mask, q_len, kv_len)
    keys = torch.arange(kv_len, device=mask.device, dtype=torch.int32)
    seen = (keys >= starts[..., None]) & (keys < ends[..., None])
    if valid is not None:
        seen = seen & valid[:, None]
    return seen[:, None]


def is_range_shape(shape: Sequence[int], q_len: int, kv_len: int) -> bool:
    """Whether a 4-D int32 tensor of this shape is a range mask for Q = q_len, KV = kv_len."""
    if len(shape) != 4 or shape[1] != 1:
        return False
    if shape[2] == q_len:
        return shape[3] == _width(kv_len, False)
    return shape[2] == _validity_rows(kv_len) + q_len and shape[3] == _width(kv_len, True)


def check_range_mask_shape(shape: Sequence[int], q_len: int, kv_len: int) -> None:
    """Raise ValueError, saying what is wrong, when an int32 mask of this shape is not a range mask."""
    if is_range_shape(shape, q_len, kv_len):
        return
    plain = f"[B, 1, {q_len}, {_width(kv_len, False)}]"
    with_validity = f"[B, 1, {_validity_rows(kv_len) + q_len}, {_width(kv_len, True)}]"
    raise ValueError(
        f"int32 attention_mask {tuple(shape)} is not a range mask for {q_len} queries and {kv_len} keys (expected {plain}, "
        f"or {with_validity} with key validity). If it is a mask of your own, use bool (True = attend). If a model sliced "
        "or indexed the mask it was given, use attn_implementation='sdpa' for it and report the model type."
    )


def _width(kv_len: int, validity: bool) -> int:
    if validity:
        return 5 if kv_len == 4 else 4
    return 3 if kv_len == 2 else 2


def _validity_rows(kv_len: int) -> int:
    return -(-kv_len // _KEYS_PER_ROW)
