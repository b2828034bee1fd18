"""Search for block sizes that beat a kernel's own choice, and the table that keeps them (tpu_kernels/tuning.py).

Only calls whose mask kind says what is seen are tuned: full, causal, and decode on a cache. Ranges of other kinds look alike
from outside, and have different best sizes.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
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
# The kernel's own choice stays where it is not slower by more than this.
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


def best(shape: Shape, target: str, results: Iterable[tuple[Task, Figure]], today: datetime.date) -> Row | None:
    """The row for the shape, or None where the kernel's own choice is as good.

    Sizes whose VMEM need leaves no slack do not count. Figures that were measured carry no VMEM; they did run.
    """
    budget = VMEM_SHARE * tuning_of(target).vmem_bytes
    timed = [(task, figure) for task, figure in results if figure.seconds is not None]
    own = next((figure for task, figure in timed if _blocks(task) == (0, 0)), None)
    fitting = [(task, figure) for task, figure in timed if figure.vmem_bytes <= budget and _blocks(task) != (0, 0)]
    if own is None or own.seconds is None or not fitting:
        return None
    task, figure = min(fitting, key=lambda pair: pair[1].seconds or 0.0)
    assert figure.seconds is not None
    if figure.seconds > (1 - WORTH) * own.seconds:
        return None
    q, kv = _blocks(task)
    return Row(
        generation=target,
        call=call_of(shape),
        block_q=q,
        block_kv=kv,
        milliseconds=round(figure.seconds * 1e3, 4),
        untuned_milliseconds=round(own.seconds * 1e3, 4),
        how=figure.how,
        compiler=f"libtpu {version('libtpu')}",
        kernel=kernel_digest(OURS)[:12],
        date=today.isoformat(),
    )


def _blocks(task: Task) -> tuple[int, int]:
    assert task.candidate is not None and isinstance(task.candidate.job, aot.FunctionJob)
    static = task.candidate.job.static
    return int(static["block_q"] or 0), int(static["block_kv"] or 0)


HEAD = """# Block sizes faster than the kernel's own choice, by class of call: written by `python -m benchmarks tune`.
# A call takes the row of its class (generation, function, dtype, mask, head sizes in lanes) whose lengths are nearest.
"""


def write(path: Path, target: str, tuned: dict[Call, Row | None]) -> None:
    """Put the results into the table: rows of the tuned classes and lengths are replaced or dropped, others stay."""
    calls = set(tuned)
    kept = [row for row in load_table(path) if row.generation != target or row.call not in calls]
    rows = [*kept, *(row for row in tuned.values() if row is not None)]
    rows.sort(key=lambda row: tuple(map(str, row.key[:4])) + row.key[4:])
    text = HEAD
    for row in rows:
        fields = dataclasses.asdict(row)
        text += "\n[[row]]\n"
        for name, value in {"generation": fields.pop("generation"), **fields.pop("call"), **fields}.items():
            text += f'{name} = "{value}"\n' if isinstance(value, str) else f"{name} = {value}\n"
    path.write_text(text, encoding="utf-8")
    load_table(path)
