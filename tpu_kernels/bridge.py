"""A kernel's JAX functions as torch sees them: emulated on CPU through dlpack, and on TPU through torch_tpu.

Importing this module imports jax.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from .chip import tracing_for
from .interrupts import interrupts_wait
from .offdevice.targets import TARGETS
from .tuning import generation

KernelFunction = Callable[..., Any]


def keep_jax_off_the_tpu() -> None:
    """Make jax trace on the CPU backend, unless the user chose a platform.

    The first trace opens jax's default backend. On a TPU host that would be the TPU, which torch_tpu holds.
    """
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


def read_mask(
    mask: jax.Array | None, batch: int, q_len: int, kv_len: int, causal: bool, has_validity: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Unpack a range mask (encoding: mask_encoding.py) into starts, ends int32 [B, Q] and validity int32 [B, KV] or None."""
    if mask is None:
        rows = jnp.arange(q_len, dtype=jnp.int32)
        ends = jnp.minimum(rows + 1, kv_len) if causal else jnp.full((q_len,), kv_len, jnp.int32)
        return jnp.zeros((batch, q_len), jnp.int32), jnp.broadcast_to(ends, (batch, q_len)), None
    rows = mask[:, 0]
    starts, ends = rows[:, -q_len:, 0], rows[:, -q_len:, 1]
    if not has_validity:
        return starts, ends, None
    words = rows[:, :-q_len, :4].reshape(batch, -1, 1)
    bits = (words >> jnp.arange(32, dtype=jnp.int32)) & 1
    return starts, ends, bits.reshape(batch, -1)[:, :kv_len]


def _read_ranges(
    q: jax.Array, k: jax.Array, mask: jax.Array | None, causal: bool, has_validity: bool
) -> tuple[tuple[jax.Array | None, ...], dict[str, Any]]:
    """A range mask as starts, ends and validity."""
    return read_mask(mask, q.shape[0], q.shape[2], k.shape[2], causal, has_validity), {}


def _read_causal(
    q: jax.Array, k: jax.Array, mask: jax.Array | None, causal: bool, has_validity: bool
) -> tuple[tuple[jax.Array | None, ...], dict[str, Any]]:
    """No ranges: the function is told `causal` instead."""
    return (None, None, None), {"causal": causal}


def _read_pairs(
    q: jax.Array, k: jax.Array, mask: jax.Array | None, causal: bool, has_validity: bool
) -> tuple[tuple[jax.Array | None, ...], dict[str, Any]]:
    """A mask with an element for each pair: a bool one, or a float one that is added to the scores."""
    assert mask is not None
    if mask.dtype == jnp.bool_:
        return (mask, None), {}
    return (None, mask if mask.dtype in (jnp.float32, jnp.bfloat16) else mask.astype(jnp.float32)), {}


def facing_torch(
    function: KernelFunction, *, interpret: bool, results: int = 1, read: Callable[..., Any] = _read_ranges
) -> Callable[..., Any]:
    """A forward function behind its op's flat signature: tensors first, then statics (torch_tpu's jax_op rules).

    read: makes of the op's mask what the function takes in its place, and further keyword arguments.
    """

    def call(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None,
        sinks: jax.Array | None,
        scale: float,
        softcap: float,
        causal: bool,
        has_validity: bool,
        precision: str,
        block_q: int,
        block_kv: int,
        vmem_bytes: int,
    ) -> Any:
        seen, more = read(q, k, mask, causal, has_validity)
        return function(
            q,
            k,
            v,
            *seen,
            sinks,
            scale=scale,
            softcap=softcap,
            block_q=block_q,
            block_kv=block_kv,
            precision=precision,
            vmem_bytes=vmem_bytes,
            interpret=interpret,
            **more,
        )

    call.__annotations__ = _annotations(call, results)
    return call


def facing(function: str, ranges: bool = True) -> Callable[..., Callable[..., Any]]:
    """What puts the kernel function of this name behind its op's signature. ranges: whether the kernel takes row ranges;
    one that does not is told `causal` instead."""
    if function == "backward":
        return backward_facing_torch
    if function == "paged":
        return paged_facing_torch
    if function == "forward_dense":
        return functools.partial(facing_torch, read=_read_pairs)
    results = 2 if function == "forward_with_lse" else 1
    return functools.partial(facing_torch, results=results, read=_read_ranges if ranges else _read_causal)


def backward_facing_torch(function: KernelFunction, *, interpret: bool) -> Callable[..., Any]:
    """The backward function behind its op's flat signature. Without sinks their gradient is zeros [Hq]: an op has no
    optional results."""

    def call(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None,
        sinks: jax.Array | None,
        out: jax.Array,
        lse: jax.Array,
        grad_out: jax.Array,
        grad_lse: jax.Array | None,
        scale: float,
        softcap: float,
        causal: bool,
        has_validity: bool,
        precision: str,
        block_q: int,
        block_kv: int,
        vmem_bytes: int,
    ) -> Any:
        starts, ends, key_valid = read_mask(mask, q.shape[0], q.shape[2], k.shape[2], causal, has_validity)
        dq, dk, dv, dsinks = function(
            q,
            k,
            v,
            starts,
            ends,
            key_valid,
            sinks,
            out,
            lse,
            grad_out,
            grad_lse,
            scale=scale,
            softcap=softcap,
            block_q=block_q,
            block_kv=block_kv,
            precision=precision,
            vmem_bytes=vmem_bytes,
            interpret=interpret,
        )
        return dq, dk, dv, jnp.zeros((q.shape[1],), jnp.float32) if dsinks is None else dsinks

    call.__annotations__ = _annotations(call, 4)
    return call


def paged_facing_torch(function: KernelFunction, *, interpret: bool) -> Callable[..., Any]:
    """The function on block tables behind its op's flat signature."""

    def call(
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        block_table: jax.Array,
        starts: jax.Array,
        ends: jax.Array,
        sinks: jax.Array | None,
        scale: float,
        softcap: float,
        precision: str,
        vmem_bytes: int,
    ) -> Any:
        return function(
            q, k_pages, v_pages, block_table, starts, ends, sinks,
            scale=scale, softcap=softcap, precision=precision, vmem_bytes=vmem_bytes, interpret=interpret,
        )  # fmt: skip

    call.__annotations__ = _annotations(call, 1)
    return call


_ANNOTATIONS = {
    **dict.fromkeys(("q", "k", "v", "out", "lse", "grad_out"), jax.Array),
    **dict.fromkeys(("k_pages", "v_pages", "block_table", "starts", "ends"), jax.Array),
    **dict.fromkeys(("mask", "sinks", "grad_lse"), jax.Array | None),
    **dict.fromkeys(("scale", "softcap"), float),
    **dict.fromkeys(("causal", "has_validity"), bool),
    "precision": str,
    **dict.fromkeys(("block_q", "block_kv", "vmem_bytes"), int),
}
STATIC = ("scale", "softcap", "causal", "has_validity", "precision", "block_q", "block_kv", "vmem_bytes")
PAGED_STATIC = ("scale", "softcap", "precision", "vmem_bytes")


def _annotations(call: Callable[..., Any], results: int) -> dict[str, Any]:
    """torch_tpu evaluates annotations as objects."""
    made: dict[str, Any] = {name: _ANNOTATIONS[name] for name in inspect.signature(call).parameters}
    return made | {"return": jax.Array if results == 1 else tuple[(jax.Array,) * results]}  # type: ignore[misc]


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    # dlpack refuses tensors that require grad, and expanded or step-sliced ones.
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


# XLA's program of one emulated kernel keeps some 10 MB and 200 to 500 memory mappings. Linux gives a process 65530 of
# these (vm.max_map_count), and aborts it inside XLA when they run out.
MOST_MAPPINGS = 30_000
_MOST_PROGRAMS = 256


def mappings() -> int:
    """How many memory mappings this process has; 0 where the system does not tell (it is no Linux)."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except FileNotFoundError:
        return 0


class _Programs:
    """The compiled emulations of all ops. When they are many, all are freed: shapes met again are compiled again."""

    def __init__(self) -> None:
        self._jitted: list[Any] = []
        self._made = self._looked = 0

    def jit(self, call: Callable[..., Any], static: tuple[str, ...]) -> Any:
        @functools.wraps(call)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self._made += 1
            return call(*args, **kwargs)

        jitted = jax.jit(traced, static_argnames=static)
        self._jitted.append(jitted)
        return jitted

    def bound(self) -> None:
        """To be called after each run; looks only where it compiled something."""
        if self._made == self._looked:
            return
        self._looked = self._made
        if self._made >= _MOST_PROGRAMS or mappings() > MOST_MAPPINGS:
            for each in self._jitted:
                each.clear_cache()
            self._made = self._looked = 0


_programs = _Programs()


@functools.cache
def _import_the_emulator() -> None:
    """Compile the least kernel there is: jax imports the parts that emulate one, and lower it, when it meets the first."""
    from jax.experimental import pallas as pl

    def copy(source: Any, target: Any) -> None:
        target[...] = source[...]

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with interrupts_wait(), jax.default_device(_cpu()):
        jax.jit(pl.pallas_call(copy, out_shape=x, interpret=True)).lower(x).compile()


def emulated(call: Callable[..., Any], static: tuple[str, ...] = STATIC) -> Callable[..., Any]:
    """A function that faces torch, on CPU tensors: Pallas' interpreter under jax.jit, one trace a shape and static.

    static: names of its parameters that are no tensors.
    """
    keep_jax_off_the_tpu()
    _import_the_emulator()
    jitted = _programs.jit(call, static)

    def run(*arguments: Any) -> Any:
        with interrupts_wait(), jax.default_device(_cpu()):
            made = jitted(*(_to_jax(each) if isinstance(each, torch.Tensor) else each for each in arguments))
        # jax computes asynchronously and torch knows of no event to wait for.
        made = jax.block_until_ready(made)
        _programs.bound()
        return jax.tree.map(torch.utils.dlpack.from_dlpack, made)

    return run


@functools.cache
def _cpu() -> jax.Device:
    return jax.devices("cpu")[0]


def on_tpu(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same on TPU tensors, through torch_tpu. `name` is the op name that torch_tpu registers ("ns::name")."""
    keep_jax_off_the_tpu()
    from torch.tpu.pallas import jax_op  # type: ignore[import-not-found]  # added to torch by torch_tpu

    chip = TARGETS.get(generation())

    # A trace alone: calls of what is compiled already are short, and pay for nothing.
    @functools.wraps(call)
    def traced(*arguments: Any, **statics: Any) -> Any:
        with interrupts_wait(), tracing_for(chip):
            return call(*arguments, **statics)

    return jax_op(name, traced)
