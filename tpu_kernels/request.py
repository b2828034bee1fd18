"""AttentionRequest: the facts of one attention call that decide where it runs. Reading it reads no tensor value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MaskKind = Literal["none", "causal", "ranges", "ranges+validity", "dense_bool", "dense_float"]


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """What one call asks for. Shapes follow the kernel contract: query [batch, q_heads, q_len, head_dim],
    key [kv_batch, kv_heads, kv_len, head_dim], value [kv_batch, kv_heads, kv_len, v_head_dim].

    mask: "none" every query sees every key; "causal" query i sees keys 0..i (top-left); "ranges" a range mask;
        "ranges+validity" one with key validity; "dense_bool"/"dense_float" a 4-D mask with an element for each pair.
    selected_keys: the model selects the keys of each query by index (sparse attention); the selection is in the mask.
    paged: keys lie in pages found by a block table; kv_len is what the table can hold.
    transformed: torch.func or forward-mode AD differentiates the call.
    unknown: names of keyword arguments this package does not know, sorted.
    """

    batch: int
    kv_batch: int
    mask_batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: str
    mask: MaskKind
    softcap: bool
    sinks: bool
    position_bias: bool
    dropout: bool
    needs_grad: bool
    output_attentions: bool
    selected_keys: bool
    unknown: tuple[str, ...]
    disabled: bool
    paged: bool = False
    transformed: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads
