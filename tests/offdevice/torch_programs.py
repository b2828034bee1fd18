"""Torch functions and small modules to be emitted, under names that a worker process can import by path."""

# No `from __future__ import annotations`: torch_tpu wants annotations as objects.
import functools

import jax
import torch
import torch.nn.functional as F

from tpu_kernels.offdevice.torch_trace import Program


def sdpa(q, k, v, mask=None, *, causal=False, gqa=False):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)


def sdpa_repeated(q, k, v):
    """GQA the way transformers' sdpa does it under torch.compile: K and V repeated."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def splash_attention(q, k, v):
    """Causal attention on the packaged splash-attention, as the attention function calls it."""
    from tpu_kernels import attention  # imports transformers, which the other programs do without

    out, _ = attention.tpu_attention(torch.nn.Identity(), q, k, v, None, kernels=("splash-attention",))
    return out


def attention_of_views(x, cache, *, layout):
    """tpu_attention, 4 query heads and 2 KV heads of size 64, on views as models make them. x: a projection
    [1, S, 12 * 64], of which queries are the first heads; cache: [1, 2, KV, 64]."""
    from tpu_kernels import attention

    heads = x.unflatten(-1, (12, 64))
    if layout == "parts of a projection":
        q, k, v = (each.transpose(1, 2) for each in (heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:8]))
    elif layout == "part of a cache":
        q, k, v = heads[:, :, :4].transpose(1, 2), cache[:, :, 5:-7], cache[:, :, 5:-7]
    elif layout == "length last":
        k = (cache * 2).mT.contiguous().mT
        q, v = heads[:, :, :4].permute(0, 3, 2, 1).contiguous().permute(0, 2, 3, 1), k
    elif layout == "part of a head":
        q, k, v = heads[..., :4, 8:40].transpose(1, 2), cache[..., 3:35], cache[..., 30:62]
    else:
        assert layout == "expanded"
        q, k, v = heads[:, :, :4].transpose(1, 2), *(each[:, :1].expand(-1, 2, -1, -1) for each in (cache, cache + 1))
    return attention.tpu_attention(torch.nn.Identity(), q, k, v, None)[0]


def scale_and_shift(x: jax.Array, y: jax.Array, factor: float) -> jax.Array:
    """Stands for a kernel: plain JAX, so that the module it is put into can also run on a CPU."""
    return jax.jit(lambda a, b: a * factor + b)(x, y)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[:, ::2], x[:, 1::2] * 2


@functools.cache
def _kernel_ops():
    """The torch ops that torch_tpu makes of the JAX functions; their names can be taken once a process."""
    return tuple(torch.tpu.pallas.jax_op(f"programs::{each.__name__}", each) for each in (scale_and_shift, split))


class Chained(torch.nn.Module):
    """Kernels whose inputs depend on other kernels' outputs, and a kernel with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 16))
        self.ops = _kernel_ops()

    def forward(self, x):
        call, halves = self.ops
        first = call(x * self.weight, x, 3.0)
        second = call(first + 1, first, 0.5)
        left, right = halves(second - x)
        return left + right, call(second, first, 3.0).sum(-1), left


def chained() -> Program:
    return Program(Chained(), (torch.empty(8, 16, device="meta"),))


class Breaks(torch.nn.Module):
    def forward(self, x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


def breaks() -> Program:
    return Program(Breaks(), (torch.empty(8, 128, device="meta"),))


def fails_to_build() -> Program:
    raise ValueError("no such geometry")


class _Attention(torch.nn.Module):
    """One attention call on a padded batch, mask and all, as a transformers model makes it."""

    def __init__(self, attention, mask, groups):
        super().__init__()
        self.attention, self.mask, self.num_key_value_groups = attention, mask, groups
        self.is_causal = True

    def forward(self, query, key, value, padding):
        mask = self.mask(
            batch_size=query.shape[0],
            q_length=query.shape[2],
            kv_length=key.shape[2],
            attention_mask=padding,
            allow_is_causal_skip=False,
            device=query.device,
        )
        # Heads first again: the turned copy belongs to the projection that follows.
        return self.attention(self, query, key, value, mask, scaling=0.1)[0].transpose(1, 2)


def padded_attention(*, implementation, batch, q_heads, kv_heads, length, head_dim) -> Program:
    """`implementation` "sdpa" or "tpu_attention"; causal, bfloat16."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    import tpu_kernels
    from tpu_kernels.attention import tpu_attention
    from tpu_kernels.masks import tpu_attention_mask

    tpu_kernels.register()
    pairs = {"sdpa": (sdpa_attention_forward, sdpa_mask), "tpu_attention": (tpu_attention, tpu_attention_mask)}
    with torch.device("meta"):
        query = torch.empty(batch, q_heads, length, head_dim, dtype=torch.bfloat16)
        key = torch.empty(batch, kv_heads, length, head_dim, dtype=torch.bfloat16)
        padding = torch.ones(batch, length, dtype=torch.bool)
    module = _Attention(*pairs[implementation], q_heads // kv_heads)
    return Program(module, (query, key, torch.empty_like(key), padding))
