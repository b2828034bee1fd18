"""Block sizes and memory budgets by TPU generation, and by class of call where a kernel's table has one.

A kernel's table is the file tuning.toml beside its spec.toml, written by `python -m benchmarks tune`: block sizes that are
faster than the kernel's own choice, or 0 where they are not, each with what says so. Other calls get its own choice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Scoped VMEM a kernel may plan with, in bytes: the core's VMEM (jax's TpuInfo; v4 16 MiB, v5e 128, v5p 64, v6e 128,
# tpu7x 64) less room for the compiler's own spills. v5e is kept at 64 MiB, the smaller of two published figures.
_MIB = 1 << 20
_VMEM_BYTES = {"v4": 14 * _MIB, "v5e": 56 * _MIB, "v5p": 56 * _MIB, "v6e": 100 * _MIB, "tpu7x": 56 * _MIB}

# Device names as torch_tpu 0.2 gives them (it reads the PCI bus and opens no device).
_GENERATIONS = {"TPU v4": "v4", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e", "TPU v7": "tpu7x"}


TABLE = "tuning.toml"  # in a kernel's folder


@dataclass(frozen=True, slots=True)
class Tuning:
    """Static arguments of a kernel function. 0 lets the kernel choose."""

    block_q: int = 0
    block_kv: int = 0
    vmem_bytes: int = 0


def attached_chip() -> str:
    """torch_tpu's name of the attached TPU ("TPU v6e"), "" where there is none. No device is opened."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "tpu":
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_tpu calls get_device_name experimental
        return str(torch.tpu.get_device_name())  # type: ignore[attr-defined]


@functools.cache
def generation() -> str:
    """The TPU generation that kernels are built for: TPU_KERNELS_TARGET, else the attached chip's, else ""."""
    if target := os.environ.get("TPU_KERNELS_TARGET"):
        if target not in _VMEM_BYTES:
            raise ValueError(f"TPU_KERNELS_TARGET={target!r} is not one of {', '.join(_VMEM_BYTES)}.")
        return target
    return _GENERATIONS.get(attached_chip(), "")


@dataclass(frozen=True, slots=True)
class Call:
    """What of a call decides its block sizes.

    function, dtype: names ("forward", "bfloat16"). mask: "none", "causal" or "ranges". rows: query rows that share a KV
    block: q_len, in decode times the query heads of a KV head.
    """

    function: str
    dtype: str
    mask: str
    head_dim: int
    v_head_dim: int
    rows: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: sizes for calls like `call` on a generation, and where they come from.

    milliseconds, untuned_milliseconds: time with these sizes and with the kernel's own choice, summed where several calls
        of the benchmarks are of this class and these lengths (a cache may be filled or not). how: "static schedule" or
    the chip that measured. compiler: libtpu's version. kernel: digest of the kernel's source. date: ISO.
    """

    generation: str
    call: Call
    block_q: int
    block_kv: int
    milliseconds: float
    untuned_milliseconds: float
    how: str
    compiler: str
    kernel: str
    date: str

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for rows of one class and size: only one of them could be reached."""
        return (*_class(self.generation, self.call), self.call.rows, self.call.kv_len)


_REACH = 1.0  # octaves; further away, what was best there says little


class TuningError(ValueError):
    """A table that cannot be used; names the file, the row and the field."""


def _class(generation: str, call: Call) -> tuple[Any, ...]:
    """What must be alike for sizes to carry over: VMEM need does not depend on lengths, but on all of this."""
    lanes = tuple(-(-size // 128) for size in (call.head_dim, call.v_head_dim))
    return (generation, call.function, call.dtype, call.mask, *lanes)


def load_table(path: Path) -> tuple[Row, ...]:
    """The rows of a table; none where there is no such file.

    Raises:
        TuningError: for a row with a wrong field, or two rows of which one could never be reached.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    try:
        listed = tomllib.loads(text).get("row", [])
    except tomllib.TOMLDecodeError as error:
        raise TuningError(f"{path}: {error}") from error
    rows: dict[tuple[Any, ...], Row] = {}
    for number, fields in enumerate(listed, 1):
        where = f"{path}, row {number}"
        try:
            call = Call(**{each.name: fields.pop(each.name) for each in dataclasses.fields(Call)})
            row = Row(call=call, **fields)
        except (KeyError, TypeError) as error:
            raise TuningError(f"{where}: missing or unknown field ({error})") from None
        if row.generation not in _VMEM_BYTES:
            raise TuningError(f"{where}: generation {row.generation!r} is not one of {', '.join(_VMEM_BYTES)}")
        for name in ("rows", "kv_len", "head_dim", "v_head_dim"):
            size = getattr(call, name)
            if not isinstance(size, int) or size < 1:
                raise TuningError(f"{where}: {name} is {size!r}; it must be a positive integer")
        for name in ("block_q", "block_kv"):
            size = getattr(row, name)
            if not isinstance(size, int) or size < 0:
                raise TuningError(f"{where}: {name} is {size!r}; it must be a size, or 0 for the kernel's choice")
        if row.key in rows:
            raise TuningError(f"{where}: a row before it is of the same class and sizes, so one is never reached")
        rows[row.key] = row
    return tuple(rows.values())


def nearest(rows: tuple[Row, ...], generation: str, call: Call) -> Row | None:
    """The row of the call's class whose lengths are nearest, in factors; None where none is within twice and half."""

    def distances(row: Row) -> tuple[float, float]:
        return abs(math.log2(row.call.rows / call.rows)), abs(math.log2(row.call.kv_len / call.kv_len))

    alike = [row for row in rows if _class(row.generation, row.call) == _class(generation, call)]
    near = [row for row in alike if max(distances(row)) <= _REACH]
    return min(near, key=lambda row: sum(distances(row)), default=None)


_table = functools.cache(load_table)


def tuning_of(generation: str, table: Path | None = None, call: Call | None = None) -> Tuning:
    """Block sizes and VMEM budget on a TPU generation ("" is the smallest).

    Args:
        table: the kernel's table. call: the call; without both, the kernel chooses the sizes.
    """
    vmem_bytes = _VMEM_BYTES.get(generation, 0)
    row = nearest(_table(table), generation, call) if table is not None and call is not None else None
    return Tuning(vmem_bytes=vmem_bytes) if row is None else Tuning(row.block_q, row.block_kv, vmem_bytes)


@functools.cache
def tuning_for(device: str, function: str, table: Path | None = None, call: Call | None = None) -> Tuning:
    """`tuning_of` the generation that kernels are built for on "tpu"; on "cpu" (emulated) the kernel chooses.

    function: the kernel function, where there is no `call`.
    """
    if device != "tpu":
        return Tuning()
    return tuning_of(generation(), table, call)
