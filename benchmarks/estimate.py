"""Estimates without a TPU: every candidate compiled for a generation, its time by the compiler's schedule.

Results are kept in a cache folder, so that a run that was stopped goes on, and a changed kernel costs only its own part.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tpu_kernels import offdevice
from tpu_kernels.builds import cache_dir
from tpu_kernels.offdevice import aot
from tpu_kernels.offdevice.schedule import Estimator, Schedule
from tpu_kernels.offdevice.targets import Target
from tpu_kernels.offdevice.targets import target as find_target

from .implementations import Candidate, CannotError, Implementation, kernel_digest, version
from .shapes import Shape

STATIC_SCHEDULE = "static schedule"
_FORMAT = 2  # of what the cache holds: counts up when a Figure is made in another way
_PATHS = 12
_ESTIMATOR = ("compiler.py", "llo.py", "schedule.py", "targets.py", "torch_trace.py")


@dataclasses.dataclass(frozen=True)
class Figure:
    """What is known of one implementation on one shape.

    Attributes:
        shape, implementation, target, label: what; the label is the candidate's.
        seconds: of one call; None with the reason in `error`.
        error: why there is no time.
        how: "static schedule", "TPU v6e" (measured), "CPU, emulated".
        spread: half of the range of the middle half of measured times, as a share of their median.
        note: what to know about the time.
        hbm_bytes: moved to and from HBM.
        vmem_bytes: of the hungriest kernel. temp_bytes: temporary HBM.
        matrix_busy: share of the time that matrix units are busy. stalled: share spent waiting for DMAs.
        block: (passes, cycles of a pass) of the piece of program that does the most products in one pass: a full block.
        block_busy: matrix units busy in it.
        units: unit -> busy share of issued cycles, of the operation that takes longest.
        paths: its pieces of program that most cycles go to: (passes, cycles of a pass, matrix-unit slots of a pass). A
            kernel's full, masked and skipped steps, its first and its last, are such pieces.
    """

    shape: str
    implementation: str
    target: str
    label: str
    seconds: float | None
    error: str = ""
    how: str = STATIC_SCHEDULE
    spread: float = 0.0
    note: str = ""
    hbm_bytes: int = 0
    vmem_bytes: int = 0
    temp_bytes: int = 0
    matrix_busy: float = 0.0
    stalled: float = 0.0
    block: tuple[int, int] = (0, 0)
    block_busy: float = 0.0
    units: Mapping[str, float] = dataclasses.field(default_factory=dict)
    paths: tuple[tuple[int, int, int], ...] = ()


class Estimates(Protocol):
    """What is used of `schedule.Estimator`."""

    target: Target
    emitter: Any

    def function(self, job: aot.FunctionJob, values: Mapping[int, Any] | None = None) -> Schedule: ...

    def module(self, path: Path) -> Schedule: ...


class Cache:
    """Figures by what they depend on: a folder of JSON files. A damaged file counts as missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def default_folder() -> Path:
        return cache_dir() / "benchmarks"

    def get(self, key: str) -> Figure | None:
        try:
            found = json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
            return Figure(**{**found, "block": tuple(found["block"]), "paths": tuple(map(tuple, found["paths"]))})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def put(self, key: str, figure: Figure) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="utf-8") as file:
            json.dump(dataclasses.asdict(figure), file)
        os.replace(file.name, self._folder / f"{key}.json")


@functools.cache
def _digest(*paths: Path) -> str:
    made = hashlib.sha256()
    for path in paths:
        made.update(path.read_bytes())
    return made.hexdigest()


def cache_key(implementation: Implementation, candidate: Candidate, target: str) -> str:
    """Changes with the program, the kernel's source, the versions and the estimator."""
    folder = Path(offdevice.__file__).parent
    parts = {
        "job": repr(candidate.job),
        "values": {str(place): _array_digest(each) for place, each in candidate.values.items()},
        "times": candidate.times,
        "target": target,
        "sources": _digest(*implementation.sources),
        "kernel": kernel_digest(implementation.kernel) if implementation.kernel else "",
        "versions": {name: version(name) for name in (*implementation.packages, "libtpu")},
        "estimator": [_FORMAT, _digest(*(folder / name for name in _ESTIMATOR))],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _array_digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Task:
    """One candidate to be estimated, or the reason why there is none."""

    shape: Shape
    implementation: Implementation
    candidate: Candidate | None
    refusal: str = ""

    def __str__(self) -> str:
        label = f", {self.candidate.label}" if self.candidate and self.candidate.label else ""
        return f"{self.shape.name}: {self.implementation.name}{label}"


def tasks(shapes: Iterable[Shape], implementations: Iterable[Implementation], target: str) -> list[Task]:
    """Everything to be estimated, shape by shape."""
    implementations = list(implementations)
    found = []
    for shape in shapes:
        for implementation in implementations:
            if missing := implementation.missing():
                found.append(Task(shape, implementation, None, f"not installed: {', '.join(missing)}"))
                continue
            try:
                candidates = implementation.candidates(shape, target)
            except CannotError as error:
                found.append(Task(shape, implementation, None, str(error)))
                continue
            found += [Task(shape, implementation, candidate) for candidate in candidates]
    return found


def run(
    todo: Iterable[Task],
    target: str,
    cache: Cache,
    *,
    estimator: Callable[[str], Any] = Estimator,
    anew: bool = False,
) -> Iterator[tuple[Task, Figure, bool]]:
    """(task, figure, whether it came from the cache), in order.

    Args:
        estimator: makes the Estimator, a context manager; only where something is not in the cache.
        anew: estimate also what is in the cache.
    """
    goal = find_target(target)
    made: Any = None
    try:
        for task in todo:
            if task.candidate is None:
                yield task, _figure(task, goal, None, task.refusal), True
                continue
            key = cache_key(task.implementation, task.candidate, goal.name)
            known = None if anew else cache.get(key)
            if known is not None:
                # Shapes may share a program: SDPA with one dense mask or another.
                name, label = task.implementation.name, task.candidate.label
                yield task, dataclasses.replace(known, shape=task.shape.name, implementation=name, label=label), True
                continue
            if made is None:
                made = estimator(goal.name)
            figure = _estimate(task, task.candidate, made)
            # A crash or a time limit may be the machine's; what the compiler says stays.
            if "worker process died" not in figure.error and "took longer" not in figure.error:
                cache.put(key, figure)
            yield task, figure, False
    finally:
        if made is not None:
            made.close()


def _estimate(task: Task, candidate: Candidate, estimator: Estimates) -> Figure:
    goal = estimator.target
    if isinstance(candidate.job, aot.FunctionJob):
        return _figure(task, goal, estimator.function(candidate.job, candidate.values), "")
    with tempfile.TemporaryDirectory() as folder:
        emitted = estimator.emitter.run(candidate.job, Path(folder))
        if not emitted.ok:
            return _figure(task, goal, None, f"torch_tpu's {emitted.stage}: {emitted.error}")
        figure = _figure(task, goal, estimator.module(emitted.modules[0]), "")
    if candidate.whole is None:
        return figure
    with tempfile.TemporaryDirectory() as folder:
        emitted = estimator.emitter.run(candidate.whole, Path(folder))
        compiled = estimator.emitter.compile(emitted.modules[0]) if emitted.ok else None
    if compiled is None or not compiled.ok:
        error = emitted.error if compiled is None else f"{compiled.stage}: {compiled.error}"
        return dataclasses.replace(figure, seconds=None, error=f"the whole call: {error}")
    return dataclasses.replace(figure, temp_bytes=compiled.temp_bytes, vmem_bytes=compiled.vmem_bytes)


def _figure(task: Task, goal: Target, schedule: Schedule | None, error: str) -> Figure:
    label = task.candidate.label if task.candidate else ""
    base = Figure(task.shape.name, task.implementation.name, goal.name, label, None, error)
    if schedule is None:
        return base
    times = task.candidate.times if task.candidate else 1.0
    base = dataclasses.replace(
        base, vmem_bytes=schedule.compiled.vmem_bytes, temp_bytes=schedule.compiled.temp_bytes, error=schedule.error
    )
    if not schedule.ok:
        return base
    longest = max(schedule.operations, key=lambda each: each.calls * (each.cycles + each.stall_cycles))
    issued = sum(each.calls * each.cycles * each.units.get("MATMUL", 0.0) for each in schedule.operations)
    _, cycles, passes, slots = max(longest.paths, key=lambda path: (path[3], -path[1]))
    return dataclasses.replace(
        base,
        seconds=schedule.seconds * times,
        hbm_bytes=round(schedule.hbm_bytes * times),
        matrix_busy=issued / goal.clock_hz / schedule.seconds,
        stalled=schedule.stall_share,
        block=(passes, cycles),
        block_busy=slots / (cycles * goal.mxus),
        units=longest.units,
        paths=tuple((passes, cycles, slots) for _, cycles, passes, slots in longest.paths[:_PATHS]),
    )
