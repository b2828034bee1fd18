"""An interpreter of the scalar core of a compiled TPU program, for its cycle count.

libtpu can write down the VLIW program that it schedules for a TensorCore: one bundle a cycle, issued in order,
no caches, no branch prediction. In the pass "packed-bundles-post-ra" empty bundles are still explicit, so a
bundle's address is its cycle. Vector work has fixed latency, and the schedule holds it already; what is left to
know is which way the branches go and how long DMAs are waited for. So the scalar core is executed for real (grid
loops, predicated regions, scalar-prefetch operands in SMEM, semaphores) and DMAs are queued on one HBM channel.
Where two cores share the work of a device, the first one is followed.

A value that is not known (data read back from vectors, contents of arrays) is tracked as unknown; an opcode that
is not known gives an unknown value. Neither matters until a branch, the size of a DMA or a semaphore depends on it:
then the program is refused, with the reason.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Bundles that still issue after a taken branch, by generation. Checked against the region marks of each program.
BRANCH_DELAY = {"v4": 1, "v5e": 4, "v5p": 4, "v6e": 4, "tpu7x": 6}
# Unit of a DMA's size, in bytes.
GRANULE_BYTES = {"v4": 512, "v5e": 32, "v5p": 32, "v6e": 32, "tpu7x": 32}

_HBM_LATENCY_SECONDS = 0.5e-6
# On-chip copies: cycles until the first byte, bytes a cycle.
_CHIP_LATENCY, _CHIP_BYTES_PER_CYCLE = 100, 512.0


class UnsupportedProgramError(RuntimeError):
    """The program, or the format of its dump, is not one that the interpreter understands."""


class DmaModel(NamedTuple):
    """What a DMA costs.

    bytes_per_cycle: of HBM. latency: cycles from the last byte's turn to its arrival. granule: bytes.
    """

    bytes_per_cycle: float
    latency: float
    granule: int

    @classmethod
    def of(cls, *, hbm_bytes_per_second: float, clock_hz: float, granule: int) -> DmaModel:
        return cls(hbm_bytes_per_second / clock_hz, _HBM_LATENCY_SECONDS * clock_hz, granule)


class Piece(NamedTuple):
    """One straight piece of the program: first bundle, cycles a pass, passes, and its matrix-unit slots a pass."""

    start: int
    cycles: int
    passes: int
    matmul: int


@dataclasses.dataclass(frozen=True)
class Execution:
    """One run of a program.

    Attributes:
        cycles: issued bundles, empty ones included.
        stall_cycles: waited for DMAs, on top.
        moved_bytes: "hbm_to_vmem" and the like -> bytes.
        units: unit -> share of its slots that the issued bundles occupy (0 to 1).
        paths: the pieces that ran, longest total first.
    """

    cycles: int
    stall_cycles: float
    moved_bytes: Mapping[str, int]
    units: Mapping[str, float]
    paths: tuple[Piece, ...]

    @property
    def hbm_bytes(self) -> int:
        """Bytes that went over HBM, both ways."""
        return sum(size for kind, size in self.moved_bytes.items() if "hbm" in kind)


class _Unknown(int):
    """A value that is not known: arithmetic spreads it, a decision that depends on it raises.

    An int, so that generated code can treat it as one; abs() of it is 0, which keeps the 32-bit wrap away from it.
    """

    def _spread(self, *_: Any) -> _Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _spread
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _spread
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = _spread
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _spread  # type: ignore[assignment]
    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        raise UnsupportedProgramError("a branch, a DMA or a semaphore depends on a value that is not known here")


UNKNOWN = _Unknown()

# Symbolic addresses: an operand's or an allocation's base is far outside 32 bits, so that it survives arithmetic.
_SYMBOLIC = 1 << 40
_OPERAND_BIT, _OPERAND_SHIFT = 1 << 90, 60
_ALLOCATION_SHIFT = 44


def _wrap(value: int) -> int:
    """To signed 32 bits, unless symbolic or unknown."""
    if value is UNKNOWN or abs(value) >= _SYMBOLIC:
        return value
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _unsigned(value: int) -> int:
    return value if abs(value) >= _SYMBOLIC else value & 0xFFFFFFFF


def _shift_left(value: int, by: int) -> int:
    return value << by if abs(value) >= _SYMBOLIC else _wrap((value << by) & 0xFFFFFFFF)


def _multiply(a: int, b: int) -> int:
    return a * b if abs(a) >= _SYMBOLIC or abs(b) >= _SYMBOLIC else _wrap((a * b) & 0xFFFFFFFF)


def _multiply_high(a: int, b: int) -> int:
    """The upper half of an unsigned product."""
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else _wrap((_unsigned(a) * _unsigned(b)) >> 32)


def _shift_right(value: int, by: int) -> int:
    return value >> by if abs(value) >= _SYMBOLIC else _wrap((value & 0xFFFFFFFF) >> by)


def _divide(a: int, b: int) -> int:
    if a is UNKNOWN or b is UNKNOWN or b == 0:
        return UNKNOWN
    quotient = abs(a) // abs(b)
    return quotient if (a >= 0) == (b >= 0) else -quotient


def _remainder(a: int, b: int) -> int:
    quotient = _divide(a, b)
    return UNKNOWN if quotient is UNKNOWN else a - quotient * b


def _smaller(a: int, b: int) -> int:
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else min(a, b)


def _larger(a: int, b: int) -> int:
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else max(a, b)


def _leading_zeros(a: int) -> int:
    return UNKNOWN if a is UNKNOWN else 32 - (a & 0xFFFFFFFF).bit_length()


def _choose(condition: Any, if_true: Any, if_false: Any) -> Any:
    return UNKNOWN if condition is UNKNOWN else if_true if condition else if_false


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# Opcode, or opcode up to its type -> Python for arguments a, b.
_ARITHMETIC = {
    "sadd": "v if abs(v := {a} + {b}) < 2147483648 else wrap(v)",
    "ssub": "v if abs(v := {a} - {b}) < 2147483648 else wrap(v)",
    "smul": "multiply({a}, {b})",
    "smulhi.u32": "multiply_high({a}, {b})",
    "scalar_lea": "v if abs(v := {a} + {b}) < 2147483648 else wrap(v)",
    "sshll": "shift_left({a}, {b})",
    "sshra": "{a} >> {b}",
    "sshrl": "shift_right({a}, {b})",
    "sand": "{a} & {b}",
    "sor": "{a} | {b}",
    "sxor": "{a} ^ {b}",
    "smin": "smaller({a}, {b})",
    "smax": "larger({a}, {b})",
    "sdiv": "divide({a}, {b})",
    "srem": "remainder({a}, {b})",
    "sclz": "leading_zeros({a})",
    "smov": "{a}",
    "pmov": "{a}",
    "int_to_ptr": "{a}",
    "ptr_to_int": "{a}",
    "por": "{a} | {b}",
    "pand": "{a} & {b}",
    "pxor": "{a} ^ {b}",
    "pnand": "({a} & {b}) ^ 1",
    "pnor": "({a} | {b}) ^ 1",
    "pneg": "{a} ^ 1",
}  # fmt: skip
# Without effect on control flow or time beyond their bundle.
_IGNORED = (
    "sfence", "cfence", "cst", "cld", "shalt", "inlined_call", "compiler-scheduling-barrier", "strace",
)  # fmt: skip
_SYNC = {"vsyncadd": "sync_add", "vsyncpa": "sync_set", "vsyncset": "sync_set"}
_HELPERS: dict[str, Any] = {
    "wrap": _wrap, "unsigned": _unsigned, "shift_left": _shift_left, "shift_right": _shift_right, "multiply": _multiply,
    "multiply_high": _multiply_high,
    "divide": _divide, "remainder": _remainder, "smaller": _smaller, "larger": _larger, "leading_zeros": _leading_zeros,
    "choose": _choose, "abs": abs, "UNKNOWN": UNKNOWN, "__builtins__": {},
}  # fmt: skip

_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +([A-Z ,:]*?) *:?[> ]*\{(.*)\}\s*$")
_OPERATION = re.compile(r"^(?:%([A-Za-z0-9_]+) = )?([a-z_][a-z_0-9.\-]*)\s*(.*)$")
_BRANCH = re.compile(r"sbr\.rel\s*(?:\((!?)%(\w+)\))?[ ,]*target bundleno = (\d+)")
_PREDICATE = re.compile(r"^\((!?)%([A-Za-z0-9_]+)(?:, ([^()]*))?\)\s*,?\s*")
_TRAILING_PREDICATE = re.compile(r"\s\((!?)%([A-Za-z0-9_]+)\)(?=,|\s|$)")
_OPERAND = re.compile(r"shape: (\w+)\[([\d,]*)\].*?index: (\d+), kind: (\w+)")
_REGISTER = re.compile(r"^%([A-Za-z0-9_]+)$")
_CORE_ID = "megacore core id"  # how the dump remarks on a load of the number of the core it runs on
_LITERAL = re.compile(r"^(?:\$?0x([0-9a-f]+)|(-?\d+))$")
_FLOAT = re.compile(r"^-?(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)$")  # on their way to the vector unit


class Operand(NamedTuple):
    """An array or scalar that the program is called with."""

    space: str  # hbm, vmem, smem, cmem; "" for a scalar in a register
    shape: str  # "bf16[16,4096,128]"
    number: int
    kind: str  # input or output


class _Step(NamedTuple):
    """One operation as Python: `target` register (or "") gets `code`; `when` is the register test, `uses` are read."""

    target: str
    code: str
    when: str
    uses: tuple[str, ...]


class _Source(NamedTuple):
    """A straight piece: bundles [start, end), what they do, and where its branch goes (-1: on to the next piece)."""

    start: int
    end: int
    phis: list[tuple[str, str, str]]
    steps: list[_Step]
    branch: int


class _Block(NamedTuple):
    start: int
    end: int
    code: Callable[..., None]
    branch: int  # target bundle; -1 when the block falls through


class Program:
    """A parsed program.

    Args:
        text: the dump of pass "packed-bundles-post-ra".
        delay: bundles that issue after a taken branch.
        utilisation: the dump "hlo-static-per-bundle-utilization" of the same program, for `Execution.units`.

    Raises:
        UnsupportedProgramError: for a dump that does not look as expected.
    """

    def __init__(self, text: str, delay: int, utilisation: str = "") -> None:
        self._delay = delay
        self.operands: dict[str, Operand] = {}
        self.unknown_opcodes: collections.Counter[str] = collections.Counter()
        self._allocations: dict[str, int] = {}
        self._bundles, marks = _bundles(text)
        self._branches = self._find_branches()
        self._check_delay(marks)
        self._units, self._capacity, self._rows = _utilisation(utilisation)
        if self._rows and len(self._rows) < len(self._bundles):
            raise UnsupportedProgramError(
                f"the utilisation table has {len(self._rows)} rows for {len(self._bundles)} bundles"
            )
        self._registers: dict[str, int] = {}
        self._divisions: dict[str, int] = {}  # how many results of each are read
        self._blocks = self._compile()
        for name, results in self._divisions.items():
            if results != 2:
                raise UnsupportedProgramError(f"{results} results of the division %{name} are read, not two")
        self._by_start = {block.start: index for index, block in enumerate(self._blocks)}
        for at, (_, target) in self._branches.items():
            if target not in self._by_start:
                raise UnsupportedProgramError(f"the branch in bundle {at:#x} goes to {target:#x}, which is not there")

    def __len__(self) -> int:
        """Bundles."""
        return len(self._bundles)

    def _find_branches(self) -> dict[int, tuple[tuple[bool, str] | None, int]]:
        """Bundle -> ((negated, predicate) or None, target bundle)."""
        found = {}
        for at, (_, operations) in enumerate(self._bundles):
            for operation in operations:
                if "sbr." not in operation:
                    continue
                match = _BRANCH.search(operation)
                if match is None or at in found:
                    raise UnsupportedProgramError(f"bundle {at:#x} branches in an unknown way: {operation[:120]}")
                predicate = (match.group(1) == "!", match.group(2)) if match.group(2) else None
                found[at] = (predicate, int(match.group(3)))
        return found

    def _check_delay(self, marks: Mapping[int, str]) -> None:
        """Regions begin right behind a branch's delay slots; a dump that disagrees is of another machine."""
        for at in self._branches:
            behind = at + self._delay + 1
            inside = [each for each in range(at + 1, behind) if "Start" in marks.get(each, "")]
            if inside and "Start" not in marks.get(behind, ""):
                raise UnsupportedProgramError(
                    f"the branch in bundle {at:#x} has other than {self._delay} delay slots (a region starts in "
                    f"{inside[0]:#x}): is the dump of another generation?"
                )

    def _compile(self) -> list[_Block]:
        count = len(self._bundles)
        leaders = {0}
        for at, (_, target) in self._branches.items():
            leaders |= {target, at + self._delay + 1}
        leaders |= {at for at, (tag, _) in enumerate(self._bundles) if tag}
        starts = sorted(each for each in leaders if each < count)
        sources = [self._source(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]
        # A register that lives inside one piece becomes a local variable of it.
        readers: dict[str, set[int]] = collections.defaultdict(set)
        writers: collections.Counter[str] = collections.Counter()
        for number, source in enumerate(sources):
            for phi in source.phis:
                writers[phi[0]] += 2
                for name in phi[1:]:
                    readers[name].add(-1)
            for step in source.steps:
                for name in step.uses:
                    readers[name].add(number)
                if step.target:
                    writers[step.target] += 1
        blocks = []
        for number, source in enumerate(sources):
            made: set[str] = set()
            early: set[str] = set()  # read before they are made: values of an earlier turn
            for step in source.steps:
                early |= set(step.uses) - made
                made.add(step.target)
            inside = {name for name in made if name and writers[name] == 1 and readers[name] <= {number}}
            blocks.append(self._block(source, inside - early))
        return blocks

    def _source(self, start: int, end: int) -> _Source:
        steps: list[_Step] = []
        phis: list[tuple[str, str, str]] = []
        branch, decision = -1, None
        for at in range(start, end):
            for operation in self._bundles[at][1]:
                if " = sphi " in operation or " = pphi " in operation:
                    phis.append(_phi(operation, at))
                else:
                    steps += self._translate(operation, at - start)
            if at in self._branches:
                if branch >= 0 or at + self._delay + 1 != end:
                    raise UnsupportedProgramError(f"the delay slots of the branch in bundle {at:#x} overlap others")
                predicate, branch = self._branches[at]
                test = "1" if predicate is None else f"@{predicate[1]}@" + (" ^ 1" if predicate[0] else "")
                decision = _Step("", f"machine.taken = {test}", "", () if predicate is None else (predicate[1],))
        if phis and self._bundles[start][0] not in {"LB", "LH"}:
            raise UnsupportedProgramError(f"bundle {start:#x} has phis but is no loop header")
        # Decided where the piece ends: the scalar that a branch tests is made before it, never in its delay slots.
        return _Source(start, end, phis, [*steps, decision] if decision else steps, branch)

    def _block(self, source: _Source, local: set[str]) -> _Block:
        def place(match: re.Match[str]) -> str:
            name = match.group(1)
            return f"x_{name}" if name in local else f"R[{self._registers.setdefault(name, len(self._registers))}]"

        lines = []
        if source.phis:
            targets = ", ".join(f"@{target}@" for target, _, _ in source.phis)
            for choice, values in (("if machine.back", 2), ("else", 1)):
                lines.append(f"{choice}: {targets}, = {', '.join(f'@{phi[values]}@' for phi in source.phis)},")
        for step in source.steps:
            text = f"@{step.target}@ = {step.code}" if step.target else step.code
            lines.append(f"if {step.when}: {text}" if step.when else text)
        code = "def block(R, machine, SM):\n    " + "\n    ".join(lines or ["pass"])
        code = re.sub(r"@(\w+)@", place, code)
        namespace: dict[str, Any] = {}
        exec(compile(code, f"<bundles {source.start:#x} to {source.end:#x}>", "exec"), _HELPERS, namespace)
        return _Block(source.start, source.end, namespace["block"], source.branch)

    def _translate(self, operation: str, offset: int) -> list[_Step]:
        """Python for one operation; vector work gives none."""
        match = _OPERATION.match(operation)
        if match is None:
            raise UnsupportedProgramError(f"an operation of unknown form: {operation[:120]}")
        target, opcode, rest = match.group(1) or "", match.group(2), match.group(3)
        family = opcode.split(".")[0]
        if family == "inlined_call_operand":
            return [self._operand(target, opcode, rest)]
        scalar = target.startswith(("s", "p"))
        if opcode.startswith("v") and not scalar and family not in _SYNC:
            if family.startswith(("vwait", "vsync")) and not opcode.endswith(".trace"):
                raise UnsupportedProgramError(f"opcode {opcode} waits in a way that is not modelled")
            if family == "vdelay":
                raise UnsupportedProgramError("opcode vdelay takes time that is not modelled")
            return []
        if family == "sbr" or (family in _IGNORED and not scalar):
            return []
        if rest.endswith(_CORE_ID):
            if family == "sld":
                return [_Step(target, "0", "", ())]
            rest = rest.removesuffix(_CORE_ID)
        rest = re.sub(r"\[(?:resolvable|thread):[^\]]*\]\s*", "", rest)
        when, otherwise = "", None
        predicate = _PREDICATE.match(rest)
        if predicate:
            rest = rest[predicate.end() :]
            otherwise = predicate.group(3)
        else:
            predicate = _TRAILING_PREDICATE.search(rest)
            if predicate:
                rest = rest[: predicate.start()] + rest[predicate.end() :]
        if predicate:
            when = f"@{predicate.group(2)}@" + (" ^ 1" if predicate.group(1) else "")
        named = dict(re.findall(r"(\w+)=\s*([^,]+)", rest)) if family == "dma" else {}
        arguments = [re.sub(r"^\w+=\s*", "", each) for each in _arguments(rest)]

        def step(code: str, into: str = target) -> list[_Step]:
            nonlocal when
            test = when
            if otherwise is not None:
                # "(predicate, value), ...": the operation's result where the predicate holds, else the value.
                code, test = f"choose({when}, {code}, {self._value(otherwise)})", ""
            elif when and into:  # keeps its value, or loses it where the predicate is not known
                code, test = f"choose({when}, {code}, @{into}@)", ""
            uses = tuple(dict.fromkeys(re.findall(r"@(\w+)@", f"{code} {test}")))
            return [_Step(into, code, test, uses)]

        arithmetic = _ARITHMETIC.get(opcode) or _ARITHMETIC.get(family)
        if arithmetic or (family == "scmp" and scalar):
            a, b = (self._value(arguments[index]) if index < len(arguments) else "0" for index in (0, 1))
            if arithmetic:
                return step(arithmetic.format(a=a, b=b))
            sign = _COMPARISONS.get(opcode.split(".")[1])
            if sign is None or len(arguments) != 2:
                raise UnsupportedProgramError(f"a comparison of unknown form: {operation[:120]}")
            return step(f"unsigned({a}) {sign} unsigned({b})" if ".u32" in opcode else f"{a} {sign} {b}")
        if family == "scalar_select":
            test, if_true, if_false = (self._value(each) for each in arguments[:3])
            return step(f"choose({test}, {if_true}, {if_false})")
        if family == "sld":
            return step(f"SM.get({self._value(_memory(arguments[0], 'smem', operation))}, UNKNOWN)")
        if family == "sst":
            place, value = _split_store(rest, operation)
            address, value = self._value(_memory(place, "smem", operation)), self._value(value)
            if not when:
                return step(f"SM[{address}] = {value}", "")
            code = f"machine.store({when}, {address}, {value})"
            return [_Step("", code, "", tuple(dict.fromkeys(re.findall(r"@(\w+)@", code))))]
        if opcode.startswith("dma.done"):
            if len(arguments) < 2:
                raise UnsupportedProgramError(f"a DMA wait of unknown form: {operation[:120]}")
            return step(f"machine.wait({offset}, {self._value(arguments[0])}, {self._value(arguments[1])})", "")
        if family == "dma":
            kind = opcode.removeprefix("dma.")
            understood = ("_to_" in kind or kind == "general") and {"size_in_granules", "dst_syncflagno"} <= set(named)
            if not understood or len(arguments) < 4:
                raise UnsupportedProgramError(f"a DMA of unknown form: {operation[:160]}")
            values = ", ".join(self._value(arguments[index]) for index in (0, 1, 2, 3))
            return step(f"machine.dma({kind!r}, {offset}, {values})", "")
        if family in _SYNC:
            values = ", ".join(self._value(each) for each in arguments[:2])
            return step(f"machine.{_SYNC[family]}({values})", "")
        if family == "sdivrem":
            a, b = (self._value(each) if ".s32" in opcode else f"unsigned({self._value(each)})" for each in arguments[:2])
            self._divisions[target] = 0
            return step(f"divide({a}, {b})", f"{target}_0") + step(f"remainder({a}, {b})", f"{target}_1")
        if opcode == "spop.drf":  # first a division's quotient, then its remainder
            division = arguments[0].removeprefix("%")
            if division not in self._divisions:
                raise UnsupportedProgramError(f"a result of no division: {operation[:120]}")
            self._divisions[division] += 1
            return step(f"@{division}_{self._divisions[division] - 1}@")
        if family == "spop":
            return step("machine.popped")
        if scalar:
            self.unknown_opcodes[opcode] += 1
            return [_Step(target, "UNKNOWN", "", ())]
        raise UnsupportedProgramError(f"opcode {opcode} is not known: {operation[:120]}")

    def _operand(self, target: str, opcode: str, rest: str) -> _Step:
        match = _OPERAND.search(rest)
        if match is None:
            raise UnsupportedProgramError(f"an operand of unknown form: {rest[:120]}")
        dtype, sizes, index, kind = match.groups()
        space = opcode.partition(".")[2].rstrip(".")
        space = space if space in {"hbm", "vmem", "smem", "cmem"} else ""
        operand = self.operands[target] = Operand(space, f"{dtype}[{sizes}]", int(index), kind)
        if space:
            return _Step(target, str(_operand_base(operand)), "", ())
        return _Step(target, f"machine.scalar({operand.number})", "", ())

    def _value(self, text: str) -> str:
        """Python for an argument: register, literal, allocation, or a sum of them in brackets."""
        text = re.sub(r"\s+\[#\w+\]$", "", text.strip())
        if text.startswith("[") and text.endswith("]"):
            return "(" + " + ".join(self._value(part) for part in text[1:-1].split(" + ")) + ")"
        if register := _REGISTER.match(text):
            return f"@{register.group(1)}@"
        if literal := _LITERAL.match(text):
            value = int(literal.group(1), 16) if literal.group(1) else int(literal.group(2))
            return str(value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value)
        if text == "0.0":  # the one number whose bits are the same as an integer's
            return "0"
        if _FLOAT.match(text):
            return "UNKNOWN"
        if text.startswith("#"):
            number = self._allocations.setdefault(text, len(self._allocations))
            return str((number + 1) << _ALLOCATION_SHIFT)
        raise UnsupportedProgramError(f"an argument of unknown form: {text[:80]!r}")

    def run(
        self,
        model: DmaModel,
        inputs: Mapping[int, Sequence[int]] | None = None,
        *,
        popped: int | None = None,
        seconds: float = 60.0,
    ) -> Execution:
        """Execute the program.

        Args:
            model: what DMAs cost.
            inputs: index of an input operand -> its 32-bit words, for those that control flow depends on.
            popped: what every scalar that the vector unit hands back is taken for; None: it is not known.
            seconds: wall time after which to give up.

        Raises:
            UnsupportedProgramError: when control flow depends on something unknown, or it took too long.
        """
        machine = _Machine(self, model, dict(inputs or {}), UNKNOWN if popped is None else popped)
        registers: list[Any] = [UNKNOWN] * len(self._registers)
        counts = [0] * len(self._blocks)
        blocks, index, memory = self._blocks, 0, machine.memory
        deadline = time.monotonic() + seconds
        for turn in itertools.count():
            if index >= len(blocks):
                break
            start, end, code, branch = blocks[index]
            machine.taken = 0
            try:
                code(registers, machine, memory)
                taken = branch >= 0 and bool(machine.taken)
            except UnsupportedProgramError as error:
                opcodes = f"; unknown opcodes: {', '.join(self.unknown_opcodes)}" if self.unknown_opcodes else ""
                raise UnsupportedProgramError(f"{error} (bundles {start:#x} to {end:#x}{opcodes})") from None
            counts[index] += 1
            machine.cycle += end - start
            machine.back = taken and branch <= start
            index = self._by_start[branch] if taken else index + 1
            if not turn & 0x3FF and time.monotonic() > deadline:
                raise UnsupportedProgramError(f"interpreting took longer than {seconds:.0f} s ({turn} pieces run)")
        return self._report(counts, machine)

    def _report(self, counts: Sequence[int], machine: _Machine) -> Execution:
        total = 0
        used: collections.Counter[str] = collections.Counter()
        paths = []
        matrix = self._units.index("MATMUL") if "MATMUL" in self._units else -1
        for count, block in zip(counts, self._blocks, strict=True):
            if not count:
                continue
            length = block.end - block.start
            total += count * length
            sums = [sum(column) for column in zip(*self._rows[block.start : block.end], strict=True)]
            used.update({unit: count * each for unit, each in zip(self._units, sums, strict=False)})
            paths.append(Piece(block.start, length, count, sums[matrix] if matrix >= 0 and sums else 0))
        units = {
            unit: used[unit] / (capacity * total)
            for unit, capacity in zip(self._units, self._capacity, strict=True)
            if total and capacity
        }
        paths.sort(key=lambda each: -each.cycles * each.passes)
        return Execution(total, machine.stall, dict(machine.moved), units, tuple(paths))


class _Machine:
    """Time, scalar memory, semaphores and DMAs of one run. Generated code calls it."""

    def __init__(self, program: Program, model: DmaModel, inputs: dict[int, Sequence[int]], popped: Any) -> None:
        self.cycle = 0.0  # at which the current piece started, stalls included
        self.stall = 0.0
        self.taken: Any = 0
        self.popped = popped
        self.back = False
        self.memory: dict[int, int] = {}
        self.moved: collections.Counter[str] = collections.Counter()
        self._model, self._inputs = model, inputs
        self._hbm_free = 0.0
        self._arrivals: dict[int, collections.deque[tuple[float, int]]] = collections.defaultdict(collections.deque)
        self._flags: collections.Counter[int] = collections.Counter()
        self._spaces = {_operand_base(each) >> _OPERAND_SHIFT: each.space for each in program.operands.values()}
        for operand in program.operands.values():
            if operand.space == "smem" and operand.kind == "input" and operand.number in inputs:
                self._fill(_operand_base(operand), inputs[operand.number])

    def scalar(self, index: int) -> int:
        words = self._inputs.get(index)
        return words[0] if words else UNKNOWN

    def store(self, condition: Any, address: int, value: int) -> None:
        """A predicated store to SMEM."""
        self.memory[address] = _choose(condition, value, self.memory.get(address, UNKNOWN))

    def dma(self, kind: str, offset: int, source: int, size: int, target: int, flag: int) -> None:
        if size is UNKNOWN or flag is UNKNOWN:
            bool(UNKNOWN)
        moved = size * self._model.granule
        if kind == "general":  # its addresses tell where; what is no operand is scratch, on the chip
            kind = "_to_".join(self._spaces.get(_operand_key(each), "vmem") for each in (source, target))
        self.moved[kind] += moved
        now = self.cycle + offset
        if kind.endswith("_to_smem"):
            if target is UNKNOWN:
                bool(UNKNOWN)
            words = self._inputs.get(_operand_key(source) ^ (_OPERAND_BIT >> _OPERAND_SHIFT))
            known = list(words) if words is not None else []
            self._fill(target, known + [UNKNOWN] * (moved // 4 - len(known)))
        if "hbm" in kind:
            self._hbm_free = max(now, self._hbm_free) + moved / self._model.bytes_per_cycle
            done = self._hbm_free + self._model.latency
        else:
            done = now + _CHIP_LATENCY + moved / _CHIP_BYTES_PER_CYCLE
        self._arrivals[flag].append((done, size))

    def wait(self, offset: int, flag: int, amount: int) -> None:
        if flag is UNKNOWN or amount is UNKNOWN:
            bool(UNKNOWN)
        now = ready = self.cycle + offset
        arrivals, have = self._arrivals[flag], self._flags[flag]
        while have < amount:
            if not arrivals:
                raise UnsupportedProgramError("it waits for a DMA that it did not start")
            done, size = arrivals.popleft()
            have, ready = have + size, max(ready, done)
        self._flags[flag] = have
        self.cycle += ready - now
        self.stall += ready - now

    def sync_add(self, flag: int, amount: int) -> None:
        if flag is UNKNOWN or amount is UNKNOWN:
            bool(UNKNOWN)
        self._flags[flag] += amount

    def sync_set(self, flag: int, amount: int) -> None:
        if flag is UNKNOWN:
            bool(UNKNOWN)
        self._flags[flag] = amount

    def _fill(self, target: int, words: Iterable[int]) -> None:
        self.memory.update(enumerate(words, target))


def _bundles(text: str) -> tuple[list[tuple[str, list[str]]], dict[int, str]]:
    """([(tag, operations)] by address, address -> region marks)."""
    head = text.find("= control target key end")
    if head < 0:
        raise UnsupportedProgramError("the dump has no 'control target key': is it pass packed-bundles-post-ra?")

    def comment(match: re.Match[str]) -> str:
        inside = match.group(1).strip()
        if re.fullmatch(r"\w+=", inside):  # the name of the argument that follows
            return inside
        if inside.startswith(_CORE_ID):
            return f" {_CORE_ID}"
        # Region marks stand behind a bundle's brace or in front of it; kept apart by a sign that is in no program.
        return f"\x00{inside}\x00" if "region" in inside and "\n" not in inside else ""

    body = re.sub(r"/\*(.*?)\*/", comment, text[text.index("\n", head) :], flags=re.DOTALL)
    bundles: list[tuple[str, list[str]]] = []
    marks: dict[int, str] = {}
    for line in body.splitlines():
        if not line.strip():
            continue
        found = "".join(re.findall("\x00(.*?)\x00", line))
        match = _BUNDLE.match(re.sub("\x00.*?\x00", "", line))
        if match is None or int(match.group(1), 16) != len(bundles):
            raise UnsupportedProgramError(f"bundle {len(bundles):#x} is not where it should be: {line.strip()[:120]!r}")
        if found:
            marks[len(bundles)] = found
        operations = [each.strip() for each in match.group(3).split(";;")]
        bundles.append((match.group(2).strip(" :,"), [each for each in operations if each]))
    return bundles, marks


def _phi(operation: str, at: int) -> tuple[str, str, str]:
    """(register, its value on entry, its value from the turn before)."""
    match = re.match(r"^%(\w+) = [sp]phi %(\w+), %(\w+)$", operation)
    if match is None:
        raise UnsupportedProgramError(f"bundle {at:#x} has a phi of unknown form: {operation[:120]}")
    return match.group(1), match.group(2), match.group(3)


def _utilisation(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    """(unit names, slots a bundle, used slots by bundle)."""
    if not text:
        return [], [], []
    lines = text.splitlines()
    units = [each.strip() for each in lines[1].split(",")]
    capacity = [int(each) for each in lines[2].split()]
    rows = [[int(each) for each in line.split()] for line in lines[4:] if line.strip()]
    if len(units) != len(capacity) or any(len(row) != len(units) for row in rows):
        raise UnsupportedProgramError("the utilisation table's columns do not match its header")
    return units, capacity, rows


def _arguments(text: str) -> list[str]:
    """Split at commas outside brackets."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return [each for each in [*found, current.strip()] if each]


def _memory(text: str, space: str, operation: str) -> str:
    """The address inside "[smem:...]"."""
    if not (text.startswith(f"[{space}:") and text.endswith("]")):
        raise UnsupportedProgramError(f"an address of unknown form: {operation[:120]}")
    return text[len(space) + 2 : -1]


def _split_store(rest: str, operation: str) -> tuple[str, str]:
    """The two parts of "[smem:[...]] %value"."""
    depth = 0
    for index, letter in enumerate(rest):
        depth += (letter == "[") - (letter == "]")
        if letter == "]" and depth == 0:
            return rest[: index + 1], re.sub(r"^\w+=\s*", "", rest[index + 1 :].strip(" ,"))
    raise UnsupportedProgramError(f"a store of unknown form: {operation[:120]}")


def _operand_base(operand: Operand) -> int:
    return _OPERAND_BIT | ((operand.number + (1 << 16 if operand.kind == "output" else 0)) << _OPERAND_SHIFT)


def _operand_key(address: int) -> int:
    """What `_operand_base(operand) >> _OPERAND_SHIFT` is for the operand that an address (in bytes, or in units of 16
    bytes) lies in; 0 where it lies in none."""
    shift = -1 if address is UNKNOWN else address.bit_length() - _OPERAND_BIT.bit_length()
    return address >> shift >> _OPERAND_SHIFT if shift >= 0 else 0
