"""What the range-attention kernel is held against: float64 attention written out, and torch's own CPU attention.

Nothing here comes from the kernel. The visible set of each row is spelled out as a dense bool mask.
"""

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "kernel_specs" / "range-attention" / "torch-ext"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import range_attention  # noqa: E402
import torch  # noqa: E402
from range_attention import blocks, ranges  # noqa: E402

__all__ = ["Call", "blocks", "check", "make_call", "range_attention", "ranges", "reference", "run"]

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}
# Rounding the output once, in units of the largest output: below this, errors cannot be told from luck.
OUTPUT_ROUNDING = {"f32": 2.0**-22, "bf16": 2.0**-9}


@dataclass
class Call:
    """One attention call: torch tensors for q, k, v; numpy for the rest. mask: bool [B, Q, KV], the truth."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: np.ndarray
    ends: np.ndarray
    valid: np.ndarray | None = None
    sinks: np.ndarray | None = None
    scale: float = 1.0
    softcap: float = 0.0

    @property
    def mask(self) -> np.ndarray:
        batch, q_len, kv_len = self.q.shape[0], self.q.shape[2], self.k.shape[2]
        mask = np.zeros((batch, q_len, kv_len), bool)
        for b in range(batch):
            for r in range(q_len):
                first, last = max(int(self.starts[b, r]), 0), min(int(self.ends[b, r]), kv_len)
                mask[b, r, first : max(first, last)] = True
        return mask if self.valid is None else mask & self.valid[:, None, :].astype(bool)


def make_call(
    seed: int, dtype: str, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, v_dim: int = 0,
    **fields: Any,
) -> Call:  # fmt: skip
    """Normal q, k, v; the scale is 1 / sqrt(dim) unless given; every row sees every key unless given."""
    g = torch.Generator().manual_seed(seed)
    sizes = (
        (batch, heads, q_len, dim),
        (batch, kv_heads, kv_len, dim),
        (batch, kv_heads, kv_len, v_dim or dim),
    )
    q, k, v = (torch.randn(size, generator=g).to(TORCH[dtype]) for size in sizes)
    fields.setdefault("scale", dim**-0.5)
    fields.setdefault("starts", np.zeros((batch, q_len), np.int32))
    fields.setdefault("ends", np.full((batch, q_len), kv_len, np.int32))
    return Call(q, k, v, **fields)


@functools.cache
def _jitted(function: str, **static: Any) -> Any:
    # Compiling the emulation is what these tests spend their time on: without LLVM's optimisations it takes half.
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(functools.partial(getattr(range_attention, function), **static), compiler_options=options)


def run(
    call: Call, function: str = "forward", *, block_q: int = 0, block_kv: int = 0, precision: str = "highest",
    vmem_bytes: int = 0, interpret: Any = True,
) -> torch.Tensor:  # fmt: skip
    """The kernel, emulated on CPU."""
    static = dict(
        scale=float(call.scale), softcap=float(call.softcap), block_q=block_q, block_kv=block_kv,
        precision=precision, vmem_bytes=vmem_bytes, interpret=interpret,
    )  # fmt: skip
    arrays = [jax.dlpack.from_dlpack(x.contiguous()) for x in (call.q, call.k, call.v)]
    arrays += [jnp.asarray(call.starts, jnp.int32), jnp.asarray(call.ends, jnp.int32)]
    arrays += [None if x is None else jnp.asarray(x) for x in (call.valid, call.sinks)]
    if interpret is True:
        out = _jitted(function, **static)(*arrays)
    else:  # the checking interpreter keeps state of its own between host callbacks: not under an outer jit
        out = getattr(range_attention, function)(*arrays, **static)
    return torch.from_dlpack(jax.block_until_ready(out)).clone()


def reference(call: Call) -> torch.Tensor:
    """float64 [B, Hq, Q, Dv], from the values as they are in the call's dtype."""
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    mask = torch.from_numpy(call.mask)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for h in range(heads):
        kh, vh = k[:, h // group], v[:, h // group]
        s = call.scale * q[:, h] @ kh.transpose(1, 2)
        if call.softcap:
            s = call.softcap * torch.tanh(s / call.softcap)
        s = s.masked_fill(~mask, -torch.inf)
        if call.sinks is not None:
            s = torch.cat([s, torch.full((*s.shape[:2], 1), float(call.sinks[h]), dtype=s.dtype)], -1)
        p = torch.softmax(s, -1)[..., : kh.shape[1]]
        p = p.masked_fill(~mask, 0.0)  # a row without keys: softmax of nothing is NaN, the output is 0
        out[:, h] = p @ vh
    return out


def torch_attention(call: Call) -> torch.Tensor:
    """Torch's CPU attention in the call's dtype; where SDPA cannot (softcap, sinks), eager with float32 scores."""
    mask = torch.from_numpy(call.mask)[:, None]
    if not call.softcap and call.sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            call.q, call.k, call.v, attn_mask=mask, scale=call.scale, enable_gqa=True
        )
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
    s = call.q.float() @ k.float().transpose(2, 3) * call.scale
    if call.softcap:
        s = call.softcap * torch.tanh(s / call.softcap)
    s = s.masked_fill(~mask, -torch.inf)
    if call.sinks is not None:
        sinks = torch.from_numpy(call.sinks).float()[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sinks], -1)
    p = torch.softmax(s, -1)[..., : k.shape[2]].masked_fill(~mask, 0.0)
    return p.to(call.v.dtype) @ v


def allowed_error(call: Call, expected: torch.Tensor) -> float:
    """Twice the error of torch's attention on the same input, plus one rounding of the largest output."""
    dtype = "f32" if call.q.dtype == torch.float32 else "bf16"
    theirs = (torch_attention(call).double() - expected).nan_to_num(nan=0.0).abs().max().item()
    return 2 * theirs + OUTPUT_ROUNDING[dtype] * expected.abs().max().item()


def check(call: Call, function: str = "forward", **options: Any) -> torch.Tensor:
    """Runs the kernel, holds it against the reference, and returns its output."""
    out = run(call, function, **options)
    expected = reference(call)
    assert out.dtype == call.q.dtype and out.shape == expected.shape
    error = (out.double() - expected).abs().max().item()
    allowed = allowed_error(call, expected)
    assert error <= allowed, f"max error {error:.3e}, allowed {allowed:.3e}"
    rows_without_keys = torch.from_numpy(~call.mask.any(-1))[:, None, :, None].expand_as(out)
    assert (out[rows_without_keys] == 0).all()
    return out
