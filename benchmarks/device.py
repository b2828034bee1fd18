"""Times on the attached TPU: every implementation in turn, round after round, medians and spread.

A sample is the time of n calls less that of one, over n - 1: launch latency and the copy that waits for the device drop
out. On CPU the same code runs, emulated, to be tested; those times say nothing about a TPU and are called what they are.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tpu_kernels import bridge, ops
from tpu_kernels.attention import installed_specs
from tpu_kernels.offdevice import aot
from tpu_kernels.tuning import attached_chip, generation

from . import peers, torch_calls
from .estimate import Figure, Task
from .implementations import BASE, OURS, CannotError, range_mask
from .shapes import Shape

ROUNDS = 11
_SAMPLE_SECONDS = 0.05
_MOST_CALLS = 200
# Output of bfloat16 kernels, relative to the largest value: more is another function, not another rounding.
_TOLERANCE = 0.03

Call = Callable[[], Any]
Clock = Callable[[], float]


def how(device: str) -> str:
    """What figures of this device are called."""
    return attached_chip() if device == "tpu" else "CPU, emulated"


def run(
    todo: Iterable[Task],
    device: str = "tpu",
    *,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Figure]:
    """A figure for each task; the tasks of one shape are timed together."""
    by_shape: dict[str, list[Task]] = {}
    for task in todo:
        by_shape.setdefault(task.shape.name, []).append(task)
    for same in by_shape.values():
        yield from _run_shape(same, device, rounds, clock, progress)


def _run_shape(
    todo: Sequence[Task], device: str, rounds: int, clock: Clock, progress: Callable[[str], None]
) -> Iterator[Figure]:
    inputs = make_inputs(todo[0].shape, device)
    figures = [_blank(task, device) for task in todo]
    calls: dict[int, Call] = {}
    outputs: dict[int, torch.Tensor] = {}
    for index, task in enumerate(todo):
        progress(f"{task}: first run")
        try:
            if task.candidate is None:
                raise CannotError(task.refusal)
            call = callable_of(task, inputs, device)
            outputs[index] = _first(call()).float().cpu()
            calls[index] = call
        # Whatever a peer raises where it cannot do a shape is its result, as with compilers' refusals.
        except Exception as error:  # noqa: BLE001
            text = str(error) if isinstance(error, CannotError) else f"{type(error).__name__}: {error}"
            figures[index] = dataclasses.replace(figures[index], error=text)
    base = next((outputs[index] for index in outputs if todo[index].implementation.name == BASE), None)
    for index in list(calls):
        if base is not None and not todo[index].shape.sinks:
            off = float((outputs[index] - base).abs().max() / base.abs().max())
            if not off <= _TOLERANCE:
                del calls[index]
                figures[index] = dataclasses.replace(figures[index], error=f"its output is off SDPA's by {off:.2g}")
    samples = interleaved(calls, rounds, clock, lambda turn: progress(f"{todo[0].shape.name}: round {turn} of {rounds}"))
    for index, (times, enqueued) in samples.items():
        seconds, spread = median_and_spread(times)
        # Below the time that the host takes to ask for it, the device's own is not seen.
        note = "bound by the host" if enqueued > 0.8 * seconds else ""
        figures[index] = dataclasses.replace(figures[index], seconds=seconds, spread=spread, note=note)
    yield from figures


def interleaved(
    calls: dict[int, Call], rounds: int, clock: Clock, tell: Callable[[int], None] = lambda turn: None
) -> dict[int, tuple[list[float], float]]:
    """Call -> (seconds of one call in each round, median seconds the host takes to enqueue one)."""
    samples: dict[int, list[float]] = {index: [] for index in calls}
    enqueued: dict[int, list[float]] = {index: [] for index in calls}
    counts = {}
    for index, call in calls.items():
        _time(call, 1, clock)  # warm
        once, _ = _time(call, 1, clock)
        counts[index] = max(3, min(_MOST_CALLS, round(_SAMPLE_SECONDS / max(once, 1e-9))))
    order = list(calls)
    for turn in range(rounds):
        tell(turn + 1)
        for index in order[turn % max(len(order), 1) :] + order[: turn % max(len(order), 1)]:
            one, _ = _time(calls[index], 1, clock)
            many, asked = _time(calls[index], counts[index], clock)
            samples[index].append((many - one) / (counts[index] - 1))
            enqueued[index].append(asked / counts[index])
    return {index: (times, statistics.median(enqueued[index])) for index, times in samples.items()}


def _time(call: Call, count: int, clock: Clock) -> tuple[float, float]:
    """(seconds until `count` calls are done, until they are all asked for)."""
    started = clock()
    for _ in range(count):
        out = call()
    asked = clock()
    # A value on the host is the one sure sign that the device is done: programs run in order.
    _first(out).flatten()[:1].cpu()
    return clock() - started, asked - started


def median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    """(median, half of the range of the middle half as a share of it)."""
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (middle,) * 3
    return middle, (high - low) / 2 / middle if middle else 0.0


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, (tuple, list)) else out


def _blank(task: Task, device: str) -> Figure:
    label = task.candidate.label if task.candidate else ""
    return Figure(task.shape.name, task.implementation.name, generation(), label, None, how=how(device))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random tensors of a shape, on the device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None  # row ranges
    dense: torch.Tensor  # the same as numbers to add
    sinks: torch.Tensor | None
    grad_out: torch.Tensor


def make_inputs(shape: Shape, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(torch.bfloat16).to(device)

    ranges = range_mask(shape)
    starts, ends = (torch.from_numpy(each).to(device) for each in shape.ranges())
    keys = torch.arange(shape.kv_len, device=device)
    seen = (keys >= starts[:, None]) & (keys < ends[:, None])
    dense = torch.zeros(seen.shape, dtype=torch.bfloat16, device=device).masked_fill(~seen, float("-inf"))
    batch = shape.batch if shape.pass_ == "decode" else 1
    return Inputs(
        random(shape.batch, shape.q_heads, shape.q_len, shape.head_dim),
        random(shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim),
        random(shape.batch, shape.kv_heads, shape.kv_len, shape.v_head_dim),
        None if ranges is None else torch.from_numpy(ranges).to(device),
        dense.expand(batch, 1, *dense.shape).contiguous(),
        random(shape.q_heads) if shape.sinks else None,
        random(shape.batch, shape.q_heads, shape.q_len, shape.v_head_dim),
    )


def function_of(task: Task, inputs: Inputs, device: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, arguments) of the task's call."""
    shape, name = task.shape, task.implementation.name
    if name == OURS:
        return _ours(task, inputs)
    if name == BASE:
        return _sdpa(shape, inputs, device)
    if name == "sdpa-transformers":
        return _sdpa_transformers(shape, inputs)
    return _peer(task, inputs, device)


def callable_of(task: Task, inputs: Inputs, device: str) -> Call:
    """The task's call, compiled by torch_tpu on a TPU."""
    function, arguments = function_of(task, inputs, device)
    if device == "tpu":
        function = torch.compile(function, backend="tpu", fullgraph=True, dynamic=False)

    def call() -> Any:
        with torch.no_grad():
            return function(*arguments)

    return call


def _ours(task: Task, inputs: Inputs) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    assert task.candidate is not None and isinstance(task.candidate.job, aot.FunctionJob)
    spec = next(each for each in installed_specs() if each.name == OURS)
    given = task.candidate.job.static
    static = [given[name] for name in OP_STATIC]
    if task.shape.pass_ == "training":
        forward, backward = (ops.op_for(spec, name) for name in ("forward_with_lse", "backward"))

        def step(q: Any, k: Any, v: Any, mask: Any, sinks: Any, grad_out: Any) -> tuple[Any, ...]:
            out, lse = forward(q, k, v, mask, sinks, *static)
            return out, *backward(q, k, v, mask, sinks, out, lse, grad_out, None, *static)

        return step, (inputs.q, inputs.k, inputs.v, inputs.mask, inputs.sinks, inputs.grad_out)
    op = ops.op_for(spec, str(given["function"]))

    def attention(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        return op(q, k, v, mask, sinks, *static)

    return attention, (inputs.q, inputs.k, inputs.v, inputs.mask, inputs.sinks)


# Arguments of the kernel's ops after the tensors (tpu_kernels/ops.py).
OP_STATIC = ("scale", "softcap", "causal", "has_validity", "precision", "block_q", "block_kv", "vmem_bytes")


def _sdpa(shape: Shape, inputs: Inputs, device: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if shape.pass_ == "training":
        if device != "tpu":
            raise CannotError("its backward operation is torch_tpu's, and there is no TPU")
        return torch_calls.sdpa_and_gradients, (inputs.q, inputs.k, inputs.v, inputs.grad_out)
    mask = None if shape.plain else inputs.dense
    causal = mask is None and shape.sees == "causal"

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch_calls.sdpa(q, k, v, mask, causal=causal)

    return attention, (inputs.q, inputs.k, inputs.v, mask)


def _sdpa_transformers(shape: Shape, inputs: Inputs) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = torch.nn.Module()
    module.is_causal = False
    module.num_key_value_groups = shape.q_heads // shape.kv_heads

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=shape.head_dim**-0.5)[0].transpose(1, 2)

    return attention, (inputs.q, inputs.k, inputs.v, None if shape.sees == "full" else inputs.dense)


_peer_ops: dict[tuple[str, str, bool], Callable[..., Any]] = {}


def _peer(task: Task, inputs: Inputs, device: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    assert task.candidate is not None and isinstance(task.candidate.job, aot.FunctionJob)
    job = task.candidate.job
    name = job.function.rpartition(":")[2]
    training = task.shape.pass_ == "training"
    key = (name, device, training)
    if key not in _peer_ops:
        _peer_ops[key] = peer_op(getattr(peers, name), device, training=training)
    op = _peer_ops[key]
    static = [job.static[each] if each != "interpret" else device != "tpu" for each in PEER_STATIC]

    def attention(q: Any, k: Any, v: Any, sinks: Any, grad_out: Any) -> Any:
        return op(q, k, v, sinks, grad_out, *static)

    return attention, (inputs.q, inputs.k, inputs.v, inputs.sinks, inputs.grad_out if training else None)


PEER_STATIC = ("sees", "window", "document", "block", "variant", "interpret")


def peer_op(function: Callable[..., Any], device: str, *, training: bool) -> Callable[..., Any]:
    """A function of peers.py on torch tensors; the arguments of PEER_STATIC follow the tensors by position."""
    import jax

    def call(q, k, v, sinks, grad_out, sees, window, document, block, variant, interpret):  # type: ignore[no-untyped-def]
        return function(q, k, v, sinks, grad_out, sees, window, document, block, variant, interpret)

    # torch_tpu evaluates annotations as objects.
    results = tuple[(jax.Array,) * 4] if training else jax.Array
    call.__annotations__ = {**typing.get_type_hints(function), "return": results}
    if device == "tpu":
        suffix = "_training" if training else ""
        return bridge.on_tpu(call, f"benchmarks::{function.__name__}{suffix}")
    return bridge.emulated(call, static=PEER_STATIC)
