"""What an eager attention call costs the host, apart from the kernel: medians of many calls, with the kernel stubbed.

The parts add up to less than the whole: what is left is reading the call, the look-up of its plan, and Python itself.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tpu_kernels import attention, ops
from tpu_kernels.offdevice.aot import Array
from tpu_kernels.offdevice.emit import Emitter, FunctionJob

BAR_MICROSECONDS = 60.0
_HEADS, _KV_HEADS, _KEYS, _DIM = 4, 2, 128, 64


@dataclasses.dataclass(frozen=True)
class Cost:
    """Median host time of something, in microseconds. bar: the most allowed, 0 for none."""

    what: str
    microseconds: float
    bar: float = 0.0


def median_microseconds(call: Callable[[], Any], calls: int) -> float:
    """Of `calls` calls one by one, after two to warm up."""
    call(), call()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def layer() -> torch.nn.Module:
    """What the attention functions read of an attention module."""
    module = torch.nn.Module()
    module.num_key_value_groups = _HEADS // _KV_HEADS
    module.is_causal = True
    module.layer_idx = 0
    return module


def decode_call(requires_grad: bool = False) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """((query, key, value), range mask) of a decode step."""
    query = torch.randn(1, _HEADS, 1, _DIM, requires_grad=requires_grad)
    key, value = (torch.randn(1, _KV_HEADS, _KEYS, _DIM) for _ in range(2))
    return (query, key, value), torch.tensor([0, _KEYS], dtype=torch.int32).reshape(1, 1, 1, 2)


def measure(calls: int = 3000) -> list[Cost]:
    """In a process that has not run a kernel yet: the ops are made with a stub in the kernel's place.

    Raises:
        RuntimeError: where a kernel has run, since its op cannot be stubbed any more.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tensors, mask = decode_call()
    with_grad, _ = decode_call(requires_grad=True)
    ran: list[str] = []

    def stub(spec: Any, function: str) -> Callable[..., Any]:
        def run(q: torch.Tensor, *_: object) -> Any:
            ran.append(function)
            return (torch.empty_like(q), q.new_empty(q.shape[:3])) if function == "forward_with_lse" else torch.empty_like(q)

        return run

    module, scale = layer(), _DIM**-0.5
    prompt = tuple(torch.randn(1, heads, 64, _DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
    dense = torch.ones(1, 1, 1, _KEYS, dtype=torch.bool)
    out = torch.empty_like(tensors[0])

    def ours(arguments: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> Callable[[], Any]:
        return lambda: attention.tpu_attention(module, *arguments, mask, scaling=scale)

    def theirs() -> Any:
        return sdpa_attention_forward(module, *tensors, dense, scaling=scale)

    def timed(call: Callable[[], Any]) -> float:
        return median_microseconds(call, calls)

    with mock.patch.object(ops, "_emulated", stub):
        with torch.no_grad():
            costs = [
                Cost("tpu_attention, decode, kernel stubbed", timed(ours(tensors, mask)), BAR_MICROSECONDS),
                Cost("tpu_attention, prefill, kernel stubbed", timed(ours(prompt, None)), BAR_MICROSECONDS),
            ]
            op = torch.ops.tpu_kernels.range_attention_decode
            static = (scale, 0.0, False, False, "default", 0, 0, 0)
            plan = next(iter(attention._plans.values()))
            costs += [
                Cost("  of it, settings and environment", timed(attention.settings)),
                Cost("  of it, count of explain()", timed(lambda: attention.LEDGER.count(module, plan.route, "", "cpu"))),
                Cost("  of it, torch's dispatch to the op, and the stub", timed(lambda: op(*tensors, mask, None, *static))),
                Cost("  of it, output as [B, Q, Hq, Dv]", timed(lambda: out.transpose(1, 2).contiguous())),
            ]
        costs.append(Cost("tpu_attention, a call that needs gradients, kernel stubbed", timed(ours(with_grad, mask))))
        if set(ran) != {"decode", "forward", "forward_with_lse"}:
            raise RuntimeError("a kernel has run in this process, so its op is no stub: measure in a fresh process")
    with torch.no_grad(), mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: out):
        costs.append(Cost("transformers' sdpa, decode, SDPA stubbed", timed(theirs)))
    attention.LEDGER.clear()
    return costs


def first_call(target: str) -> list[tuple[str, dict[str, float]]]:
    """Seconds that torch_tpu takes for the first call of a shape: (shape, {stage: seconds}); the process's first shape
    also imports the kernel. Once a shape and process; torch_tpu finds a compiled program again by its text."""
    found = []
    with Emitter(target) as emitter, tempfile.TemporaryDirectory() as folder:
        for length in (1024, 2048, 4096):
            q, k = (Array("bfloat16", (1, heads, length, 128)) for heads in (16, 8))
            job = FunctionJob(f"{Path(__file__).with_name('torch_calls.py')}:range_attention", (q, k, k))
            emitted = emitter.run(job, Path(folder))
            if not emitted.ok:
                raise RuntimeError(f"{emitted.stage}: {emitted.error}")
            compiled = emitter.compile(emitted.modules[0])
            if not compiled.ok:
                raise RuntimeError(f"{compiled.stage}: {compiled.error}")
            stages = {"trace and export": emitted.seconds["trace"], "compile": compiled.seconds["compile"]}
            found.append((f"[1, 16, {length}, 128]", stages))
    return found
