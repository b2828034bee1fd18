"""Search for block sizes that beat a kernel's own choice, and the table that keeps them (tpu_kernels/tuning.py).

Only calls whose mask kind says what is seen are tuned: full, causal, and decode on a cache. Ranges of other kinds look alike
from outside, and have different best sizes.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

from tpu_kernels.offdevice import aot
from tpu_kernels.tuning import Call, Row, load_table, tuning_of

from .estimate import Figure, Task
from .implementations import IMPLEMENTATIONS, OURS, Candidate, kernel_digest, tuning_call, version
from .shapes import Shape

BLOCK_Q = (128, 256, 512, 1024, 2048)
BLOCK_KV = (512, 1024, 2048, 4096, 8192)
# Of the VMEM budget; the rest is for what the compiler spills under other masks, with sinks or softcap.
VMEM_SHARE = 0.75
# The kernel's own choice stays where it is not slower by more than this; nor may a shape become slower by it.
WORTH = 0.02


class CannotTuneError(ValueError):
    """The shape is of no class that a table can have."""


def call_of(shape: Shape) -> Call:
    """How the table knows the shape's calls.

    Raises:
        CannotTuneError: for training, and for ranges of which the request does not say what kind they are.
    """
    if shape.pass_ == "training":
        raise CannotTuneError(f"{shape.name}: the two kernels of training have one pair of sizes here, and are not tuned")
    if shape.sees not in ("causal", "full", "filled"):
        raise CannotTuneError(f"{shape.name}: a {shape.sees} mask reaches the kernel as ranges, as any other does")
    made: Call = tuning_call(shape)
    return made


def tasks(shape: Shape, target: str) -> list[Task]:
    """The kernel's own choice first, then every pair of sizes that fits the lengths."""
    call = call_of(shape)
    implementation = IMPLEMENTATIONS[OURS]
    (given,) = implementation.candidates(shape, target)
    assert isinstance(given.job, aot.FunctionJob)
    block_q = (0,) if call.function == "decode" else _fitting(BLOCK_Q, shape.q_len)
    pairs = [(0, 0), *((q, kv) for q in block_q for kv in _fitting(BLOCK_KV, shape.kv_len))]
    found = []
    for q, kv in pairs:
        static = {**given.job.static, "block_q": q, "block_kv": kv, "vmem_bytes": tuning_of(target).vmem_bytes}
        label = f"q {q}, kv {kv}" if q or kv else "its own choice"
        candidate = Candidate(label, dataclasses.replace(given.job, static=static), given.values)
        found.append(Task(shape, implementation, candidate))
    return found


def _fitting(sizes: Sequence[int], length: int) -> list[int]:
    """Those up to the length, and the next one: it is one block then."""
    return [size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] < length]


def best(target: str, results: Sequence[Sequence[tuple[Task, Figure]]], today: datetime.date) -> Row | None:
    """The row for shapes of one class and lengths, from the results of each; sizes 0 where the kernel's own choice is as
    good, so that no neighbour's sizes are taken there. None where the kernel's own choice has no time.

    Sizes that make one of the shapes slower, or whose VMEM need leaves no slack, do not count. Figures that were measured
    carry no VMEM; they did run.
    """
    budget = VMEM_SHARE * tuning_of(target).vmem_bytes
    times: dict[tuple[int, int], list[float]] = {}
    for figures in results:
        for task, figure in figures:
            if figure.seconds is not None and (figure.vmem_bytes <= budget or _blocks(task) == (0, 0)):
                times.setdefault(_blocks(task), []).append(figure.seconds)
    own = times.get((0, 0), [])
    if len(own) < len(results):
        return None
    better = {
        sizes: sum(found)
        for sizes, found in times.items()
        if len(found) == len(own) and all(each <= (1 + WORTH) * mine for each, mine in zip(found, own, strict=True))
    }
    q, kv = min(better, key=lambda sizes: better[sizes])
    if better[q, kv] > (1 - WORTH) * sum(own):
        q, kv = 0, 0
    task, figure = results[0][0]
    return Row(
        generation=target,
        call=call_of(task.shape),
        block_q=q,
        block_kv=kv,
        milliseconds=round(better[q, kv] * 1e3, 4),
        untuned_milliseconds=round(sum(own) * 1e3, 4),
        how=figure.how,
        compiler=f"libtpu {version('libtpu')}",
        kernel=kernel_digest(OURS)[:12],
        date=today.isoformat(),
    )


def _blocks(task: Task) -> tuple[int, int]:
    assert task.candidate is not None and isinstance(task.candidate.job, aot.FunctionJob)
    static = task.candidate.job.static
    return int(static["block_q"] or 0), int(static["block_kv"] or 0)


HEAD = """# Block sizes faster than the kernel's own choice, or 0 where it stays: written by `python -m benchmarks tune`.
# A call takes the row of its class (generation, function, dtype, mask, head sizes in lanes) whose lengths are nearest,
# within twice and half.
"""


def write(path: Path, found: Row) -> None:
    """Put a row into the table, in place of one of its class and lengths; others stay."""
    rows = [*(row for row in load_table(path) if row.key != found.key), found]
    rows.sort(key=lambda row: tuple(map(str, row.key[:4])) + row.key[4:])
    text = HEAD
    for row in rows:
        fields = dataclasses.asdict(row)
        text += "\n[[row]]\n"
        for name, value in {"generation": fields.pop("generation"), **fields.pop("call"), **fields}.items():
            text += f'{name} = "{value}"\n' if isinstance(value, str) else f"{name} = {value}\n"
    path.write_text(text, encoding="utf-8")
    load_table(path)
