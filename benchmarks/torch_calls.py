"""torch's scaled_dot_product_attention as torch_tpu takes it best, under names that a worker process can import by path."""

# No `from __future__ import annotations`: torch_tpu wants annotations as objects.
from typing import Any

import torch
import torch.nn.functional as F


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool
) -> torch.Tensor:
    """No mask where `is_causal` tells, grouped KV heads as they are."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def sdpa_and_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> tuple[Any, ...]:
    """Causal: out, dq, dk, dv, by the two operations that autograd runs for SDPA on a TPU."""
    aten = torch.ops.aten
    out, lse, _, _, rows, keys, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    unused = torch.zeros(1, dtype=torch.int64, device=q.device)
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse, unused, unused, None, None, None, rows, keys, 0.0, True
    )
    return out, *gradients


def range_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This package's op, causal, as `tpu_attention` calls it on a TPU."""
    from tpu_kernels.attention import installed_specs
    from tpu_kernels.tuning import tuning_for

    installed_specs()
    tuning = tuning_for("tpu", "forward")
    return torch.ops.tpu_kernels.range_attention_forward(
        q, k, v, None, None, q.shape[-1] ** -0.5, 0.0, True, False, "default",
        tuning.block_q, tuning.block_kv, tuning.vmem_bytes,
    )  # fmt: skip
