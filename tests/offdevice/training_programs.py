"""The ops of training as torch functions to be emitted (a worker process imports them by path)."""

import torch

from tpu_kernels.attention import installed_specs
from tpu_kernels.tuning import tuning_for


def attention_and_gradients(q, k, v, mask, sinks, grad_out):
    """Out, and the gradients of q, k, v and the sinks. The two ops in turn: autograd needs a device."""
    installed_specs()
    static = (q.shape[-1] ** -0.5, 0.0, mask is None, mask is not None and mask.shape[2] != q.shape[2], "default")
    forward, backward = (tuning_for("tpu", name) for name in ("forward_with_lse", "backward"))
    blocks = [(each.block_q, each.block_kv, each.vmem_bytes) for each in (forward, backward)]
    ops = torch.ops.tpu_kernels
    out, lse = ops.range_attention_forward_with_lse(q, k, v, mask, sinks, *static, *blocks[0])
    return out, *ops.range_attention_backward(q, k, v, mask, sinks, out, lse, grad_out, None, *static, *blocks[1])
