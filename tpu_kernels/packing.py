"""Documents packed in one row that see each other, which transformers lets happen without a word.

It keeps documents apart where `position_ids` restart, but only in calls with neither an attention mask nor a cache.
"""

from __future__ import annotations

import torch
from transformers.masking_utils import is_tracing

from .mask_encoding import decode_ranges

WARNING = (
    "position_ids restart within a row, as for packed documents, but the mask lets each document see those before it. "
    "transformers keeps them apart only without attention_mask and without a cache: leave attention_mask out and pass "
    "use_cache=False, or pass a 4-D mask of your own."
)


def is_readable(positions: object, mask: torch.Tensor | None) -> bool:
    """Whether these are plain values, [B, Q] positions of several queries beside a range mask or none."""
    return (
        isinstance(positions, torch.Tensor)
        and positions.dim() == 2
        and positions.shape[1] > 1
        and (mask is None or mask.dtype == torch.int32)
        and not is_tracing(positions)
    )


def documents_mix(positions: torch.Tensor, mask: torch.Tensor | None, q_len: int, kv_len: int) -> torch.Tensor:
    """Whether a row at which positions restart sees the token before it.

    Args:
        positions: integer [B or 1, Q]. mask: a range mask, or None where a query sees what lies before it.

    Returns:
        Bool, 0-d, on the tensors' device.
    """
    restarts = positions[:, 1:] < positions[:, :-1]
    if mask is None:
        return restarts.any()
    starts, ends, valid = decode_ranges(mask, q_len, kv_len)
    # A query's own slot: the newest keys are the queries', but for the free tail of a static cache, where each causal row
    # ends one key later than the last. Ranges end before trailing padding, whose positions mean nothing.
    newest = torch.arange(q_len, device=mask.device, dtype=ends.dtype) + (kv_len - q_len)
    own = torch.minimum(ends - 1, newest)
    sees = (starts < own)[:, 1:] & ((ends[:, 1:] > ends[:, :-1]) | (ends > newest)[:, 1:])
    if valid is not None:  # leading padding and holes
        slot = own[:, 1:].clamp(min=1).long()
        sees = sees & valid.gather(1, slot) & valid.gather(1, slot - 1)
    return (restarts & sees).any()
