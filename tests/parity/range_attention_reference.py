"""What the range-attention kernel is held against: float64 attention written out, and torch's own CPU attention.

Nothing here comes from the kernel. The visible set of each row is spelled out as a dense bool mask.
"""

import dataclasses
import functools
import itertools
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
import torch  # noqa: E402

import range_attention  # noqa: E402
from range_attention import blocks, ranges  # noqa: E402

__all__ = [
    "TWO_KERNELS", "Call", "blocks", "check", "check_gradients", "check_lse", "forget_programs", "hold_output", "make_call",
    "output_gradient", "range_attention", "ranges", "reference", "reference_gradients", "run", "run_function",
    "run_gradients", "run_with_lse",
]  # fmt: skip

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}
# Rounding the output once, in units of the largest output: below this, errors cannot be told from luck.
OUTPUT_ROUNDING = {"f32": 2.0**-22, "bf16": 2.0**-9}
# Gradients are sums of products of rounded numbers: two roundings.
GRADIENT_ROUNDING = {"f32": 2.0**-21, "bf16": 2.0**-8}
# backward's way where VMEM has no room for all keys of a head; the emulation has it.
TWO_KERNELS = {"vmem_bytes": 1}


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


def forget_programs() -> None:
    """Frees every compiled emulation."""
    _jitted.cache_clear()
    jax.clear_caches()


def run(call: Call, function: str = "forward", **options: Any) -> torch.Tensor:
    """The kernel, emulated on CPU. options: block_q, block_kv, precision, vmem_bytes, interpret."""
    return torch.from_dlpack(run_function(function, _arrays(call), _static(call, **options))).clone()


def run_gradients(
    call: Call, do: torch.Tensor, dlse: torch.Tensor | None = None, *, forward: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """out, lse, dq, dk, dv and, with sinks, dsinks of the kernels, emulated on CPU. forward: out and lse, where known."""
    made = run_with_lse(call, **options) if forward is None else dict(forward)
    grads = [_to_jax(made["out"]), _to_jax(made["lse"]), _to_jax(do), None if dlse is None else _to_jax(dlse)]
    found = run_function("backward", [*_arrays(call), *grads], _static(call, **options))
    names = ("dq", "dk", "dv", "dsinks")
    return made | {name: torch.from_dlpack(x).clone() for name, x in zip(names, found, strict=True) if x is not None}


def run_with_lse(call: Call, **options: Any) -> dict[str, torch.Tensor]:
    """out and lse of forward_with_lse, emulated on CPU."""
    made = run_function("forward_with_lse", _arrays(call), _static(call, **options))
    return {name: torch.from_dlpack(x).clone() for name, x in zip(("out", "lse"), made, strict=True)}


def _static(
    call: Call, *, block_q: int = 0, block_kv: int = 0, precision: str = "highest", vmem_bytes: int = 0,
    interpret: Any = True,
) -> dict[str, Any]:  # fmt: skip
    return dict(
        scale=float(call.scale), softcap=float(call.softcap), block_q=block_q, block_kv=block_kv,
        precision=precision, vmem_bytes=vmem_bytes, interpret=interpret,
    )  # fmt: skip


def _to_jax(x: torch.Tensor) -> jax.Array:
    return jax.dlpack.from_dlpack(x.contiguous())


def _arrays(call: Call) -> list[jax.Array | None]:
    arrays = [_to_jax(x) for x in (call.q, call.k, call.v)]
    arrays += [jnp.asarray(call.starts, jnp.int32), jnp.asarray(call.ends, jnp.int32)]
    return arrays + [None if x is None else jnp.asarray(x) for x in (call.valid, call.sinks)]


def run_function(function: str, arrays: list[jax.Array | None], static: dict[str, Any]) -> Any:
    if static["interpret"] is True:
        return jax.block_until_ready(_jitted(function, **static)(*arrays))
    # The checking interpreter keeps state of its own between host callbacks: not under an outer jit.
    return jax.block_until_ready(getattr(range_attention, function)(*arrays, **static))


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
    v = call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
    p = torch.softmax(torch_scores(call), -1)[..., : v.shape[2]].masked_fill(~mask, 0.0)
    return p.to(v.dtype) @ v


def torch_scores(call: Call) -> torch.Tensor:
    """Scores in float32, hidden ones -inf, the sink's as a last column."""
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    s = call.q.float() @ k.float().transpose(2, 3) * call.scale
    if call.softcap:
        s = call.softcap * torch.tanh(s / call.softcap)
    s = s.masked_fill(~torch.from_numpy(call.mask)[:, None], -torch.inf)
    if call.sinks is None:
        return s
    return torch.cat([s, torch.as_tensor(call.sinks).float()[None, :, None, None].expand(*s.shape[:3], 1)], -1)


def allowed_error(call: Call, expected: torch.Tensor) -> float:
    """Twice the error of torch's attention on the same input, plus one rounding of the largest output."""
    dtype = "f32" if call.q.dtype == torch.float32 else "bf16"
    theirs = (torch_attention(call).double() - expected).nan_to_num(nan=0.0).abs().max().item()
    return 2 * theirs + OUTPUT_ROUNDING[dtype] * expected.abs().max().item()


def check(call: Call, function: str = "forward", **options: Any) -> torch.Tensor:
    """Runs the kernel, holds it against the reference, and returns its output."""
    out = run(call, function, **options)
    hold_output(call, out)
    return out


def hold_output(call: Call, out: torch.Tensor) -> None:
    """Raises AssertionError where `out` is not the call's attention."""
    expected = reference(call)
    assert out.dtype == call.q.dtype and out.shape == expected.shape
    error = (out.double() - expected).abs().max().item()
    allowed = allowed_error(call, expected)
    assert error <= allowed, f"out: max error {error:.3e}, allowed {allowed:.3e}"
    rows_without_keys = torch.from_numpy(~call.mask.any(-1))[:, None, :, None].expand_as(out)
    assert (out[rows_without_keys] == 0).all()


# --- gradients -----------------------------------------------------------------------------------------------------


def output_gradient(call: Call, seed: int = 0) -> torch.Tensor:
    """A normal gradient of the output, in the call's dtype."""
    size = (*call.q.shape[:3], call.v.shape[-1])
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + 1000)).to(call.q.dtype)


def reference_gradients(call: Call, do: torch.Tensor, dlse: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """float64 lse [B, Hq, Q] and gradients, by the formulas, a head at a time.

    "dsinks terms" is the sum of the sizes of what dsinks is the sum of: both signs occur there.
    """
    q, k, v, do = (x.double() for x in (call.q, call.k, call.v, do))
    group = q.shape[1] // k.shape[1]
    mask = torch.from_numpy(call.mask)
    made = dict(lse=torch.zeros(q.shape[:3], dtype=torch.float64))
    made |= dict(dq=torch.zeros_like(q), dk=torch.zeros_like(k), dv=torch.zeros_like(v))
    if call.sinks is not None:
        made |= {name: torch.zeros(q.shape[1], dtype=torch.float64) for name in ("dsinks", "dsinks terms")}
    for h in range(q.shape[1]):
        kh, vh = k[:, h // group], v[:, h // group]
        s = call.scale * q[:, h] @ kh.transpose(1, 2)
        slope = torch.full_like(s, call.scale)
        if call.softcap:
            t = torch.tanh(s / call.softcap)
            s, slope = call.softcap * t, call.scale * (1 - t * t)
        s = s.masked_fill(~mask, -torch.inf)
        if call.sinks is not None:
            s = torch.cat([s, torch.full((*s.shape[:2], 1), float(call.sinks[h]), dtype=s.dtype)], -1)
        lse = torch.logsumexp(s, -1).masked_fill(~mask.any(-1), -torch.inf)
        made["lse"][:, h] = lse
        p = torch.exp(s - lse[..., None]).masked_fill(lse[..., None] == -torch.inf, 0.0)
        weights = p[..., : kh.shape[1]]
        # d loss / d weight, less its mean under the softmax; the sink's own weight counts nothing
        dp = do[:, h] @ vh.transpose(1, 2)
        mean = (weights * dp).sum(-1, keepdim=True)
        if dlse is not None:
            mean = mean - dlse[:, h, :, None].double()
        ds = weights * (dp - mean) * slope
        made["dq"][:, h] = ds @ kh
        made["dk"][:, h // group] += ds.transpose(1, 2) @ q[:, h]
        made["dv"][:, h // group] += weights.transpose(1, 2) @ do[:, h]
        if call.sinks is not None:
            made["dsinks"][h] = -(p[..., -1:] * mean).sum()
            made["dsinks terms"][h] = (p[..., -1:] * mean).abs().sum()
    return made


def torch_gradients(call: Call, do: torch.Tensor, dlse: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Of `torch_attention`, and of its lse where dlse is given, by autograd."""
    names = ["q", "k", "v"] + ([] if call.sinks is None else ["sinks"])
    inputs = {name: getattr(call, name) for name in names}
    inputs = {
        name: (torch.from_numpy(x.copy()) if name == "sinks" else x.clone()).requires_grad_() for name, x in inputs.items()
    }
    call = dataclasses.replace(call, **inputs)
    torch_attention(call).backward(do)
    if dlse is not None:  # a row without keys has a constant lse
        live = torch.from_numpy(call.mask.any(-1))[:, None]
        torch_scores(call).logsumexp(-1).backward(dlse * live)
    return {f"d{name}": x.grad for name, x in inputs.items()}


def check_gradients(
    call: Call, do: torch.Tensor | None = None, dlse: torch.Tensor | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Runs forward_with_lse and backward, holds every result against the reference, and returns them all.

    backward runs as one kernel and, as where VMEM is too small for that, as two.
    options: those of `run_gradients`.
    """
    do = output_gradient(call) if do is None else do
    made = run_gradients(call, do, dlse, **options)
    forward = {"forward": {name: made[name] for name in ("out", "lse")}}
    by_two = run_gradients(call, do, dlse, **(options | forward | TWO_KERNELS))
    expected, theirs = reference_gradients(call, do, dlse), torch_gradients(call, do, dlse)
    dtype = "f32" if call.q.dtype == torch.float32 else "bf16"
    dead = torch.from_numpy(~call.mask.any(-1))[:, None].expand(made["lse"].shape)
    unseen = torch.from_numpy(~call.mask.any(1))[:, None].expand(made["dk"].shape[:3])
    hold_output(call, made["out"])
    hold_lse(call, made["lse"], expected.pop("lse"))

    terms = expected.pop("dsinks terms", None)
    for made_by, (name, wanted) in itertools.product((made, by_two), expected.items()):
        got = made_by[name]
        source = call.sinks if name == "dsinks" else getattr(call, name[1:])
        source = torch.as_tensor(source)
        assert got.shape == source.shape and got.dtype == source.dtype
        error = (got.double() - wanted).abs().max().item()
        error_of_torch = (theirs[name].double() - wanted).nan_to_num(nan=0.0).abs().max().item()
        largest = (terms if name == "dsinks" else wanted.abs()).max().item()
        # Below float32's smallest normal number is 0 on TPUs, and in XLA's programs for CPUs.
        allowed = 2 * error_of_torch + GRADIENT_ROUNDING[dtype] * largest + torch.finfo(torch.float32).tiny
        assert error <= allowed, f"{name}: max error {error:.3e}, allowed {allowed:.3e}, largest {largest:.3e}"
    for by in (made, by_two):
        assert (by["dq"][dead] == 0).all() and (by["dk"][unseen] == 0).all() and (by["dv"][unseen] == 0).all()
    return made


def check_lse(call: Call, **options: Any) -> dict[str, torch.Tensor]:
    """Runs forward_with_lse, holds out and lse against the reference, and returns them."""
    made = run_with_lse(call, **options)
    hold_output(call, made["out"])
    hold_lse(call, made["lse"], reference_gradients(call, output_gradient(call))["lse"])
    return made


def hold_lse(call: Call, lse: torch.Tensor, expected: torch.Tensor) -> None:
    dead = torch.from_numpy(~call.mask.any(-1))[:, None].expand(lse.shape)
    assert lse.dtype == torch.float32 and (lse[dead] == -torch.inf).all()
    error = (lse.double() - expected)[~dead].abs().max().item() if not dead.all() else 0.0
    # Scores of float32 numbers: one rounding of the largest of them, and of what they are summed from.
    allowed = 2.0**-20 * max(1.0, expected[~dead].abs().max().item() if not dead.all() else 0.0)
    assert error <= allowed, f"lse: max error {error:.3e}, allowed {allowed:.3e}"
