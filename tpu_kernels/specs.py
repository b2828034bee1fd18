"""What kernels can do and where they come from: KernelSpec, read from kernel_specs/*/spec.toml. Routing reads only these."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MASKS = ("none", "ranges", "ranges+validity", "dense_bool", "dense_float")
_DEVICES = ("tpu", "cpu")
_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
# kernel-builder's rule for kernel names, a Hub repository, and a full commit id.
_KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class SpecError(ValueError):
    """A spec.toml that cannot be read; names file, key, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a kernel's build comes from. hub "" means the copy packaged here; else "org/name" with a pin.

    revision is a commit (wins over version); version N means the Hub branch vN. trusted: load it although the Hub does
    not count its publisher among the trusted ones.
    """

    hub: str = ""
    revision: str = ""
    version: int = 0
    trusted: bool = False


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
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}. Every kernel folder has a spec.toml.") from error
    except ValueError as error:  # tomllib's and the decoder's
        raise SpecError(f"{path} is not valid TOML: {error}") from error
    _known(path, "the file", document, {"kernel", "source", "capabilities", "functions"})
    kernel = _table(path, document, "kernel", {"name": str, "module": str, "version": int, "summary": str})
    _matches(path, "kernel.name", kernel["name"], _KERNEL_NAME, "lower-case letters, digits and dashes")
    if not kernel["module"].isidentifier():
        raise SpecError(f"{path}: kernel.module = {kernel['module']!r} must be a Python identifier.")
    _at_least(path, "kernel.version", kernel["version"], 0)
    capabilities = _table(
        path, document, "capabilities", {field.name: _toml_type(field.type) for field in fields(Capabilities)}
    )
    for key, allowed in (
        ("dtypes", _DTYPES), ("masks", _MASKS), ("devices", _DEVICES), ("generations", _GENERATIONS)
    ):  # fmt: skip
        if not capabilities[key]:
            raise SpecError(f"{path}: capabilities.{key} is empty; allowed: {', '.join(allowed)}.")
        for value in capabilities[key]:
            if value not in allowed:
                raise SpecError(f"{path}: capabilities.{key} has {value!r}; allowed: {', '.join(allowed)}.")
        capabilities[key] = tuple(capabilities[key])
    _at_least(path, "capabilities.max_head_dim", capabilities["max_head_dim"], 1)
    functions = _functions(path, document)
    lacking = {"forward_with_lse", "backward"} - {function.name for function in functions}
    if capabilities["gradients"] and lacking:
        raise SpecError(f"{path}: capabilities.gradients = true needs [functions.{min(lacking)}].")
    return KernelSpec(
        **kernel,
        source=_source(path, document),
        capabilities=Capabilities(**capabilities),
        functions=functions,
        folder=folder.resolve(),
    )


def _source(path: Path, document: dict[str, Any]) -> Source:
    table = _table(
        path, document, "source", {field.name: _toml_type(field.type) for field in fields(Source)}, required=False
    )
    source = Source(**table)
    _at_least(path, "source.version", source.version, 0)
    if source.revision:
        _matches(path, "source.revision", source.revision, COMMIT, "a full commit id, 40 or 64 hexadecimal digits")
    if source.hub:
        _matches(path, "source.hub", source.hub, _REPOSITORY, 'a Hub repository, "org/name"')
        if not (source.revision or source.version):
            raise SpecError(
                f"{path}: source.hub = {source.hub!r} needs a pin: source.revision (a commit) or source.version."
            )
    return source


def _functions(path: Path, document: dict[str, Any]) -> tuple[KernelFunction, ...]:
    functions = document.get("functions")
    if not isinstance(functions, dict) or "forward" not in functions:
        raise SpecError(f"{path}: [functions.forward] is missing; every kernel has a forward.")
    made = []
    for name in functions:
        if not name.isidentifier():
            raise SpecError(f"{path}: [functions.{name}]: {name!r} must be a Python identifier.")
        table = _table(path, functions, name, {"max_packed_rows": int}, required=False, parent="functions.")
        made.append(KernelFunction(name, **table))
        _at_least(path, f"functions.{name}.max_packed_rows", made[-1].max_packed_rows, 0)
    return tuple(made)


def _matches(path: Path, key: str, value: str, pattern: re.Pattern[str], allowed: str) -> None:
    if not pattern.fullmatch(value):
        raise SpecError(f"{path}: {key} = {value!r} must be {allowed}.")


def _at_least(path: Path, key: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise SpecError(f"{path}: {key} = {value} must be at least {lowest}.")


def _toml_type(annotation: Any) -> type:
    return {"bool": bool, "int": int, "str": str}.get(str(annotation), list)


def _known(path: Path, where: str, table: dict[str, Any], allowed: set[str]) -> None:
    if unknown := sorted(set(table) - allowed):
        raise SpecError(f"{path}: {where} has unknown {', '.join(unknown)}; allowed: {', '.join(sorted(allowed))}.")


def _table(
    path: Path,
    document: dict[str, Any],
    name: str,
    types: dict[str, type],
    *,
    required: bool = True,
    parent: str = "",
) -> dict[str, Any]:
    """Table `name` of `document` with values of the given types. required: every key must be there."""
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise SpecError(f"{path}: {parent}{name} = {table!r} must be a table, [{parent}{name}].")
    _known(path, f"[{parent}{name}]", table, set(types))
    for key, kind in types.items():
        if key not in table:
            if required:
                raise SpecError(f"{path}: [{parent}{name}] lacks {key} ({kind.__name__}).")
            continue
        if type(table[key]) is not kind:
            raise SpecError(f"{path}: {parent}{name}.{key} = {table[key]!r} must be a {kind.__name__}.")
    return dict(table)
