"""What kernels can do and where they come from: KernelSpec, read from kernel_specs/*/spec.toml. Routing reads only these."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MASKS = ("none", "ranges", "ranges+validity", "dense_bool", "dense_float")
_DEVICES = ("tpu", "cpu")
_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


class SpecError(ValueError):
    """A spec.toml that cannot be read; names file, key, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a kernel's build comes from. hub "" means the copy packaged here; else "org/name" with a pin.

    revision is a commit (wins over version); version N means the Hub branch vN.
    """

    hub: str = ""
    revision: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which requests a kernel does exactly. See AttentionRequest for the terms."""

    dtypes: tuple[str, ...]
    masks: tuple[str, ...]
    max_head_dim: int
    gqa: bool
    v_head_dim_may_differ: bool
    softcap: bool
    sinks: bool
    dropout: bool
    position_bias: bool
    gradients: bool
    devices: tuple[str, ...]
    generations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """One function of a kernel module. max_packed_rows bounds q_len * (q_heads // kv_heads); 0 is no bound."""

    name: str
    max_packed_rows: int = 0


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel: a folder in Hub source layout plus its spec.toml."""

    name: str
    module: str
    version: int
    summary: str
    source: Source
    capabilities: Capabilities
    functions: tuple[KernelFunction, ...]
    folder: Path


def packaged_specs_dir() -> Path:
    """The kernel_specs folder: inside an installed package, or beside the package in a checkout.

    Raises:
        FileNotFoundError: when there is neither.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "kernel_specs", here.parent / "kernel_specs"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"kernel_specs is neither in {here} nor beside it. Reinstall tpu-kernels.")


@functools.cache
def load_specs(folder: Path | None = None) -> tuple[KernelSpec, ...]:
    """Every kernel in `folder` (default: the packaged ones), in order of name.

    Raises:
        SpecError: for a spec.toml that is malformed or says something unknown.
    """
    folder = packaged_specs_dir() if folder is None else folder
    return tuple(read_spec(path.parent) for path in sorted(folder.glob("*/spec.toml")))


def read_spec(folder: Path) -> KernelSpec:
    """The spec of one kernel folder. Raises SpecError."""
    path = folder / "spec.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not valid TOML: {error}") from error
    _known(path, "the file", document, {"kernel", "source", "capabilities", "functions"})
    kernel = _table(path, document, "kernel", {"name": str, "module": str, "version": int, "summary": str})
    capabilities = _table(
        path, document, "capabilities", {field.name: _toml_type(field.type) for field in fields(Capabilities)}
    )
    for key, allowed in (
        ("dtypes", _DTYPES), ("masks", _MASKS), ("devices", _DEVICES), ("generations", _GENERATIONS)
    ):  # fmt: skip
        for value in capabilities[key]:
            if value not in allowed:
                raise SpecError(f"{path}: capabilities.{key} has {value!r}; allowed: {', '.join(allowed)}.")
        capabilities[key] = tuple(capabilities[key])
    source = _table(path, document, "source", {"hub": str, "revision": str, "version": int}, required=False)
    if source.get("hub") and not (source.get("revision") or source.get("version")):
        raise SpecError(f"{path}: source.hub = {source['hub']!r} needs a pin: source.revision (a commit) or source.version.")
    functions = document.get("functions")
    if not isinstance(functions, dict) or "forward" not in functions:
        raise SpecError(f"{path}: [functions.forward] is missing; every kernel has a forward.")
    for name, table in functions.items():
        _known(path, f"[functions.{name}]", table, {"max_packed_rows"})
    return KernelSpec(
        **kernel,
        source=Source(**source),
        capabilities=Capabilities(**capabilities),
        functions=tuple(KernelFunction(name, **table) for name, table in functions.items()),
        folder=folder.resolve(),
    )


def _toml_type(annotation: Any) -> type:
    return {"bool": bool, "int": int}.get(str(annotation), list)


def _known(path: Path, where: str, table: dict[str, Any], allowed: set[str]) -> None:
    if unknown := sorted(set(table) - allowed):
        raise SpecError(f"{path}: {where} has unknown {', '.join(unknown)}; allowed: {', '.join(sorted(allowed))}.")


def _table(
    path: Path, document: dict[str, Any], name: str, types: dict[str, type], required: bool = True
) -> dict[str, Any]:
    table = document.get(name, {})
    _known(path, f"[{name}]", table, set(types))
    for key, kind in types.items():
        if key not in table:
            if required:
                raise SpecError(f"{path}: [{name}] lacks {key} ({kind.__name__}).")
            continue
        if type(table[key]) is not kind:
            raise SpecError(f"{path}: {name}.{key} = {table[key]!r} must be a {kind.__name__}.")
    return dict(table)
