"""How long a program takes by the compiler's own schedule, with no TPU: a "static schedule".

    with Estimator("v6e") as estimator:
        result = estimator.function(job, values={3: starts, 4: ends})
        print(result.seconds, result.stall_share, result.hbm_bytes)
        print(estimator.module(path).seconds)  # StableHLO text, such as torch_tpu emits

libtpu compiles the program and writes down its VLIW schedule, and `llo` executes its scalar core: trip counts,
skipped blocks and waits for DMAs come out, cycle by cycle. Figures are for comparing programs in one run. They do
not hold: launch of the program and of each kernel, refresh and contention of HBM (peak bandwidth is assumed, 0.5 us
latency), branches of a kernel on its data (what it reads back from vectors is taken for 0), memory bank conflicts,
misses of the instruction memory by very long kernels, clock throttling, and the second core of a chip. Clocks of v6e
and tpu7x are not published (see `targets`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from . import aot
from .emit import Emitter
from .llo import BRANCH_DELAY, GRANULE_BYTES, DmaModel, Execution, Program, UnsupportedProgramError
from .targets import Target, target

DUMP_VARIABLE = "TPU_KERNELS_SCHEDULE_DUMP"
# Only these two passes are written: a tenth of the dump.
_PASSES = "(packed-bundles-post-ra|pre-delay_hlo-static)"


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the compiled program, by its schedule.

    Attributes:
        name: in the optimised HLO.
        kernel: whether it is a Pallas kernel (else XLA's own code).
        calls: how many instructions of the program run this same code.
        cycles, stall_cycles, hbm_bytes: of one call.
        units: unit -> busy share of the issued cycles.
        paths: (first bundle, cycles a pass, passes, matrix-unit slots a pass), longest total first.
    """

    name: str
    kernel: bool
    calls: int
    cycles: int
    stall_cycles: float
    hbm_bytes: int
    units: Mapping[str, float]
    paths: tuple[tuple[int, int, int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What the schedule of a program says.

    Attributes:
        compiled: how the compilation went; when it failed, everything else is empty.
        refused: why no estimate is made of a program that compiled; empty when there is one.
        seconds: of the whole program: operations one after another, and `prefetch_bytes` at HBM's speed.
        operations: kernels and XLA's own operations.
        prefetch_bytes: copied between HBM and VMEM by XLA for whole operands, outside of operations. In a program
            of one kernel nothing hides them; in a model the work before it may.
        unseen: operations that compiled to nothing the dump shows; their time is missing.
    """

    compiled: aot.Compiled
    refused: str = ""
    seconds: float = 0.0
    operations: tuple[Operation, ...] = ()
    prefetch_bytes: int = 0
    unseen: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is an estimate."""
        return self.compiled.ok and not self.refused

    @property
    def error(self) -> str:
        """Why there is none."""
        return self.refused if self.compiled.ok else f"{self.compiled.stage}: {self.compiled.error}"

    @property
    def cycles(self) -> int:
        """Issued cycles of all operations."""
        return sum(each.calls * each.cycles for each in self.operations)

    @property
    def hbm_bytes(self) -> int:
        """Bytes over HBM, both ways."""
        return self.prefetch_bytes + sum(each.calls * each.hbm_bytes for each in self.operations)

    @property
    def stall_share(self) -> float:
        """Share of the operations' time that is spent waiting for DMAs."""
        stall = sum(each.calls * each.stall_cycles for each in self.operations)
        return stall / (self.cycles + stall) if stall else 0.0

    @property
    def kernels(self) -> tuple[Operation, ...]:
        """The Pallas kernels."""
        return tuple(each for each in self.operations if each.kernel)


class Estimator:
    """A worker process that emits, compiles and estimates for one target. One thread at a time; two Estimators are fine.

    `emitter` is the same worker's `emit.Emitter`.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout: float = 300.0,
        environment: Mapping[str, str] | None = None,
        on_stage: Callable[[str, str], None] | None = None,
    ) -> None:
        self.target = target(name)
        self._dump = tempfile.TemporaryDirectory(prefix="schedule")
        flags = [
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            f"--xla_jf_dump_to={self._dump.name}",
            "--xla_jf_dump_llo_text=true",
            f"--xla_jf_dump_llo_pass_label_regex={_PASSES}",
        ]
        dumping = {"LIBTPU_INIT_ARGS": " ".join(flags).strip(), DUMP_VARIABLE: self._dump.name}
        self.emitter = Emitter(name, timeout=timeout, environment={**(environment or {}), **dumping}, on_stage=on_stage)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def function(
        self, job: aot.FunctionJob, values: Mapping[int, Any] | None = None, timeout: float | None = None
    ) -> Schedule:
        """Compile and estimate `job` (for its own target, which must be this one).

        Args:
            job: the kernel function.
            values: position of an argument -> its values (anything numpy takes), for arguments that decide which
                blocks a kernel visits: starts, ends, lengths.
        """
        import numpy as np

        if target(job.target) != self.target:
            raise ValueError(f"the job is for {job.target}, this estimator for {self.target.name}")
        kind, payload = aot.request(job)
        with tempfile.TemporaryDirectory() as folder:
            paths = {}
            for position, array in (values or {}).items():
                path = Path(folder) / f"{position}.npy"
                np.save(path, np.asarray(array))
                paths[str(position)] = str(path)
            payload["values"] = paths
            return self._run(kind.replace("compile", "schedule"), payload, timeout)

    def module(self, path: Path, timeout: float | None = None) -> Schedule:
        """Compile and estimate StableHLO text. Kernels in it that read scalars made by the program are refused."""
        kind, payload = aot.request(aot.ModuleJob(path, self.target.name))
        return self._run(kind.replace("compile", "schedule"), payload, timeout)

    def _run(self, kind: str, payload: dict[str, Any], timeout: float | None) -> Schedule:
        outcome = self.emitter.call(kind, payload, timeout)
        found = dict(outcome.value)
        schedule = found.pop("schedule", {})
        compiled = aot.compiled(self.target.name, dataclasses.replace(outcome, value=found))
        operations = tuple(
            Operation(**{**each, "paths": tuple(tuple(path) for path in each["paths"])})
            for each in schedule.pop("operations", ())
        )
        return Schedule(compiled, operations=operations, unseen=tuple(schedule.pop("unseen", ())), **schedule)

    def close(self) -> None:
        """End the worker and remove its dumps."""
        self.emitter.close()
        self._dump.cleanup()


# --- in the worker ------------------------------------------------------------------------------------------------

Stage = Callable[[str], None]


def schedule_function(job: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A job of `Estimator.function`."""
    import numpy as np

    from . import compiler

    traced, lowered, seconds = compiler.lower_function(job, stage)
    values = {
        int(position): np.load(path).astype(job["arguments"][int(position)]["dtype"])  # numpy keeps no bfloat16 in files
        for position, path in job["values"].items()
    }
    present = [position for position, each in enumerate(job["arguments"]) if each is not None]
    scalars = scalar_operands(traced.jaxpr, [values.get(position) for position in present])
    dump = _Dump()
    value = compiler.compile_lowered(lowered, seconds, stage, job.get("keep_hlo"))
    return _estimated(value, dump, job, stage, scalars)


def schedule_module(job: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A job of `Estimator.module`."""
    from . import compiler

    dump = _Dump()
    return _estimated(compiler.compile_module(job, stage, with_hlo=True), dump, job, stage, {})


def _estimated(
    value: dict[str, Any], dump: _Dump, job: Mapping[str, Any], stage: Stage, scalars: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    stage("schedule")
    hlo = value.pop("hlo")
    try:
        found = estimate(hlo, dump.programs(), target(job["target"]), scalars)
    except UnsupportedProgramError as error:
        found = {"refused": str(error)}
    finally:
        dump.remove()
    return value | {"schedule": found}


class _Dump:
    """The files that libtpu writes from now on."""

    def __init__(self) -> None:
        folder = os.environ.get(DUMP_VARIABLE)
        if folder is None:
            raise RuntimeError(f"{DUMP_VARIABLE} is not set: run this in the worker of a schedule.Estimator")
        self._folder = Path(folder)
        self.remove()

    def remove(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()

    def programs(self) -> dict[str, tuple[Path, Path | None]]:
        """HLO operation -> (its bundles, its utilisation table)."""
        found = {}
        for path in sorted(self._folder.glob("*-packed-bundles-post-ra.txt")):
            match = re.fullmatch(r"(\d+)-(.*)-\d+-packed-bundles-post-ra\.txt", path.name)
            if match is None:
                continue
            stamp, name = match.groups()
            tables = [
                each
                for each in self._folder.iterdir()
                if each.name.startswith(f"{stamp}-{name}-") and each.name.endswith("hlo-static-per-bundle-utilization.txt")
            ]
            found[name] = (path, tables[0] if tables else None)
        return found


def estimate(
    hlo: str, programs: Mapping[str, tuple[Path, Path | None]], goal: Target, scalars: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Fields of `Schedule`, from the optimised HLO and the bundles of its operations.

    Args:
        scalars: kernel name -> values of its leading (scalar) operands, None where not known.

    Raises:
        UnsupportedProgramError: when the program, or one operation of it, cannot be followed.
    """
    instructions = list(entry_instructions(hlo))
    made_by = {each.name: each for each in instructions}
    dumped = {each.signature(made_by): each.name for each in instructions if each.name in programs}
    calls: dict[str, int] = {}
    unseen = []
    for each in instructions:
        if each.opcode in {"while", "conditional", "call"}:
            raise UnsupportedProgramError(f"the program has a {each.opcode} ({each.name}): how often it runs is not known")
        if each.free:
            continue
        # Operations of the same code are dumped once.
        name = each.name if each.name in programs else dumped.get(each.signature(made_by))
        if name is None:
            if each.is_kernel:
                raise UnsupportedProgramError(f"the compiler wrote no schedule for kernel {each.name}")
            unseen.append(each.name)
        else:
            calls[name] = calls.get(name, 0) + 1
    model = DmaModel.of(
        hbm_bytes_per_second=goal.hbm_bytes_per_second / goal.cores,
        clock_hz=goal.clock_hz,
        granule=GRANULE_BYTES[goal.name],
    )
    operations = []
    total = 0.0
    for name, count in calls.items():
        path, table = programs[name]
        instruction = made_by[name]
        inputs = {}
        if instruction.is_kernel:
            values = next((each for kernel, each in scalars.items() if _is_call_of(name, kernel)), ())
            if not values and len(scalars) == 1:  # a kernel without a name of its own
                values = scalars.get("", ())
            for index, each in enumerate(values):
                if each is not None:
                    inputs[index] = smem_words(each, made_by[instruction.operands[index]].layout)
        try:
            program = Program(path.read_text(), BRANCH_DELAY[goal.name], table.read_text() if table else "")
            # A Pallas kernel that asks something of its data gets 0, "no"; of XLA's own code nothing is assumed.
            execution = program.run(model, inputs, popped=0 if instruction.is_kernel else None)
        except UnsupportedProgramError as error:
            raise UnsupportedProgramError(f"{name}: {error}") from None
        operations.append(_operation(name, instruction.is_kernel, count, execution))
        total += count * (execution.cycles + execution.stall_cycles)
    prefetch = sum(each.copied_bytes for each in instructions)
    return {
        "seconds": total / goal.clock_hz + prefetch / goal.hbm_bytes_per_second,
        "operations": operations,
        "prefetch_bytes": prefetch,
        "unseen": unseen,
    }


def _operation(name: str, kernel: bool, calls: int, execution: Execution) -> dict[str, Any]:
    return {
        "name": name,
        "kernel": kernel,
        "calls": calls,
        "cycles": execution.cycles,
        "stall_cycles": execution.stall_cycles,
        "hbm_bytes": execution.hbm_bytes,
        "units": dict(execution.units),
        "paths": execution.paths[:20],
    }


def _is_call_of(instruction: str, kernel: str) -> bool:
    """Whether an HLO instruction is a call of the Pallas kernel named so ("splash.1" of "splash")."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", kernel) == re.sub(r"(\.\d+)+$", "", instruction)


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-<>]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s64": 64, "u64": 64, "f64": 64,
}  # fmt: skip
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "copy-start", "copy-done",
    "slice-start", "slice-done", "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip
_NO_CODE_TARGETS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the entry computation of an optimised HLO module."""

    name: str
    result: str  # its type, with layouts
    opcode: str
    operands: tuple[str, ...]
    call_target: str
    details: str

    @property
    def is_kernel(self) -> bool:
        return self.call_target == "tpu_custom_call"

    @property
    def free(self) -> bool:
        """Whether it takes no time of a core: no code, or scalars only (the scalar core does those between)."""
        if self.opcode in _FREE or self.call_target in _NO_CODE_TARGETS:
            return True
        return not self.is_kernel and all(not sizes for _, sizes, _ in _ARRAY.findall(self.result))

    @property
    def layout(self) -> str:
        """The layout of its (only) result, as HLO writes it: "1,0:T(8,128)S(1)"."""
        match = _ARRAY.search(self.result)
        return (match.group(3) or "") if match else ""

    @property
    def copied_bytes(self) -> int:
        """Bytes that an asynchronous copy between HBM and VMEM moves; 0 for anything else."""
        if self.opcode not in {"copy-start", "slice-start"}:
            return 0
        arrays = _ARRAY.findall(self.result)
        if not any("S(1)" in layout for _, _, layout in arrays[:2]):
            return 0
        dtype, sizes, _ = min(arrays[:2], key=lambda each: math.prod(int(size) for size in each[1].split(",") if size))
        return math.prod(int(size) for size in sizes.split(",") if size) * _ITEM_BITS.get(dtype, 32) // 8

    def signature(self, made_by: Mapping[str, Instruction]) -> tuple[str, ...]:
        """Equal for instructions that compile to the same code, as far as types tell."""
        operands = [made_by[each].result if each in made_by else "" for each in self.operands]
        return (self.opcode, self.call_target, self.result, self.details, *operands)


def entry_instructions(hlo: str) -> Iterator[Instruction]:
    """The instructions of an optimised HLO module's entry computation."""
    start = hlo.find("\nENTRY ")
    if start < 0:
        raise UnsupportedProgramError("the optimised HLO has no entry computation")
    for line in hlo[start + 1 :].splitlines()[1:]:
        if line.startswith("}"):
            # A kernel's attributes may hold line breaks and braces at their beginnings; the computation ends alone.
            if line == "}":
                return
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, result, opcode, rest = match.groups()
        inside = _inside_parentheses(rest)
        operands: list[str] = []
        if opcode not in {"parameter", "constant"}:
            operands = re.findall(r"%([\w.\-<>]+)", re.sub(r"/\*.*?\*/", "", inside))
        behind = rest[len(inside) :]
        call = re.search(r'custom_call_target="([^"]*)"', behind)
        details = re.search(r"(?:dimensions|slice)=\{[^}]*\}", behind)
        yield Instruction(
            name, result, opcode, tuple(operands), call.group(1) if call else "", details.group(0) if details else ""
        )


def _inside_parentheses(text: str) -> str:
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:index]
    return text


def smem_words(values: Any, layout: str) -> list[int]:
    """The 32-bit words of an integer array in memory, under an HLO layout.

    Args:
        values: an array of 8-, 16- or 32-bit integers or booleans.
        layout: "1,0:T(8,128)(4,1)": dimensions from minor to major, then tiles, each of the one before.
    """
    import numpy as np

    array = np.asarray(values)
    array = array.astype(np.uint8) if array.dtype == bool else array
    order, _, tiles = layout.partition(":")
    minor_to_major = [int(each) for each in order.split(",") if each]
    array = array.transpose(minor_to_major[::-1]) if minor_to_major else array
    for tile in re.findall(r"\(([\d,]+)\)", re.sub(r"S\(\d+\)", "", tiles)):
        sizes = [int(each) for each in tile.split(",")]
        array = array.reshape((1,) * (len(sizes) - array.ndim) + array.shape)
        lead = array.ndim - len(sizes)
        padding = [(0, 0)] * lead + [(0, -have % want) for have, want in zip(array.shape[lead:], sizes, strict=True)]
        array = np.pad(array, padding)
        split = [part for have, want in zip(array.shape[lead:], sizes, strict=True) for part in (have // want, want)]
        array = array.reshape(*array.shape[:lead], *split)
        axes = [*range(lead), *range(lead, array.ndim, 2), *range(lead + 1, array.ndim, 2)]
        array = array.transpose(axes)
    data = array.tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), np.int32)
    return [int(each) for each in words]


def scalar_operands(closed: Any, arguments: Sequence[Any]) -> dict[str, list[Any]]:
    """Values of the scalar operands (dynamic grid bounds, then scalar prefetch) of each Pallas call in a jaxpr.

    The part of the program that needs only constants and known arguments is computed on the CPU.

    Args:
        closed: a ClosedJaxpr.
        arguments: its arguments' values; None where not known.

    Returns:
        Kernel name -> values, None where not known. Kernels of one name must agree, else theirs are None.
    """
    import jax
    import numpy as np
    from jax.extend import core

    def walk(jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any], calls: list[tuple[str, list[Any]]]) -> list[Any]:
        """The known results of a jaxpr; `calls` gathers (kernel name, scalar operands) of its Pallas calls."""
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))

        def value(variable: Any) -> Any:
            return variable.val if isinstance(variable, core.Literal) else known.get(variable)

        for equation in jaxpr.eqns:
            values = [value(each) for each in equation.invars]
            name = equation.primitive.name
            if name == "pallas_call":
                grid = equation.params["grid_mapping"]
                count = grid.num_dynamic_grid_bounds + grid.num_index_operands
                calls.append((equation.params["name"] or "", values[:count]))
                continue
            inner = next((equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params), None)
            if inner is not None and name not in {"scan", "while", "cond"}:
                inner_jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "jaxpr") else (inner, ())
                results = walk(inner_jaxpr, consts, values, calls)
            elif all(each is not None for each in values):
                results = equation.primitive.bind(*values, **equation.params)
                results = results if equation.primitive.multiple_results else [results]
            else:
                continue
            known |= {key: each for key, each in zip(equation.outvars, results, strict=True) if each is not None}
        return [value(each) for each in jaxpr.outvars]

    names: list[str] = []

    def scalars(values: Sequence[Any]) -> list[list[Any]]:
        calls: list[tuple[str, list[Any]]] = []
        walk(closed.jaxpr, closed.consts, values, calls)
        names[:] = [name for name, _ in calls]
        return [operands for _, operands in calls]

    # One CPU program computes them all.
    found: dict[str, list[Any]] = {}
    kinds = [each.aval.dtype for each in closed.jaxpr.invars]  # numpy's files know no bfloat16
    computed = jax.jit(scalars)(
        [None if each is None else np.asarray(each).astype(kind) for each, kind in zip(arguments, kinds, strict=True)]
    )
    for name, operands in zip(names, computed, strict=True):
        mine = [None if each is None else np.asarray(each) for each in operands]
        if not _same(found.setdefault(name, mine), mine):
            found[name] = [None] * len(mine)
    return found


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    import numpy as np

    return len(first) == len(second) and all(
        a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in zip(first, second, strict=True)
    )
