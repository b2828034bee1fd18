"""What kernels can do and where they come from: KernelSpec, read from spec.toml files. Routing reads only these.

Kernels are packaged here (kernel_specs/*/spec.toml), named by the environment variable TPU_KERNELS_SPECS, or declared by
installed packages under the entry point group "tpu_kernels.specs". A spec.toml is data; reading it runs nothing.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MASKS = ("none", "ranges", "ranges+validity", "dense_bool", "dense_float")
_DEVICES = ("tpu", "cpu")
_FUNCTIONS = ("forward", "decode", "paged", "forward_with_lse", "backward", "forward_dense")
_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
# kernel-builder's rule for kernel names, a Hub repository, and a full commit id.
KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
VARIABLE = "TPU_KERNELS_SPECS"
ENTRY_POINTS = "tpu_kernels.specs"


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
    """Which requests a kernel does exactly. See AttentionRequest for the terms.

    masks: "none" covers calls without a mask, full and causal ones. A kernel without "ranges" gets no ranges: its functions
    are called with starts = ends = key_valid = None and one more keyword, `causal`.
    length_multiple: of q_len and of kv_len. head_dim_multiple: of head_dim and of v_head_dim. max_kv_len: 0 is no bound.
    """

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
    length_multiple: int = 1
    head_dim_multiple: int = 1
    max_kv_len: int = 0

    @property
    def takes_ranges(self) -> bool:
        """Whether the kernel's functions are given row ranges."""
        return "ranges" in self.masks


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """One function of a kernel module. max_packed_rows bounds the rows held at once, q_len * (q_heads // kv_heads), in
    "paged" q_len * q_heads; 0 is no bound. With fewer keys than min_kv_len the fallback is faster.
    """

    name: str
    max_packed_rows: int = 0
    min_kv_len: int = 0


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel: a folder in Hub source layout plus its spec.toml.

    on_request: only calls that name the kernel may take it, by `register(name, kernels=...)`.
    found_by: who named the folder.
    """

    name: str
    module: str
    version: int
    summary: str
    source: Source
    capabilities: Capabilities
    functions: tuple[KernelFunction, ...]
    folder: Path
    on_request: bool = False
    found_by: str = field(default="", compare=False)


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


def load_specs(folder: Path | None = None) -> tuple[KernelSpec, ...]:
    """Every kernel in `folder`; by default every installed one, in the order in which calls are offered to them: the
    packaged ones, those of TPU_KERNELS_SPECS, those of installed packages.

    Raises:
        SpecError: for a spec.toml that is malformed or says something unknown, a place that holds none, or two kernels of
            one name.
    """
    if folder is not None:
        return _in_folder(folder, "")
    return _installed(os.environ.get(VARIABLE, ""))


@functools.cache
def _installed(setting: str) -> tuple[KernelSpec, ...]:
    found = list(_in_folder(packaged_specs_dir(), "packaged with tpu-kernels"))
    for entry in filter(None, setting.split(os.pathsep)):
        found += _named(Path(entry).expanduser(), f"{VARIABLE}={entry}")
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        package = "an installed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        origin = f"entry point {point.name} = {point.value!r} of {package}"
        found += _named(_folder_of_module(point.value, origin), origin)
    check_names(found)
    return tuple(found)


def check_names(specs: list[KernelSpec]) -> None:
    """Raises SpecError when two of `specs` have one name."""
    by_name: dict[str, KernelSpec] = {}
    for spec in specs:
        first = by_name.setdefault(spec.name, spec)
        if first is not spec:
            raise SpecError(
                f"two kernels are named {spec.name!r}: {first.folder / 'spec.toml'} ({first.found_by}) and "
                f"{spec.folder / 'spec.toml'} ({spec.found_by}). Rename one, or take one away."
            )


def _in_folder(folder: Path, origin: str) -> tuple[KernelSpec, ...]:
    return tuple(read_spec(path.parent, origin) for path in sorted(folder.glob("*/spec.toml")))


def _named(path: Path, origin: str) -> tuple[KernelSpec, ...]:
    """The kernels of a spec.toml, a kernel folder, or a folder of kernel folders."""
    if path.name == "spec.toml" and path.is_file():
        return (read_spec(path.parent, origin),)
    if (path / "spec.toml").is_file():
        return (read_spec(path, origin),)
    if found := _in_folder(path, origin):
        return found
    what = "holds neither spec.toml nor <kernel>/spec.toml" if path.is_dir() else "is neither a folder nor a spec.toml"
    raise SpecError(f"{origin}: {path} {what}. Name a spec.toml, a kernel folder, or a folder of kernel folders.")


def _folder_of_module(name: str, origin: str) -> Path:
    """The folder of a package, found without importing it. name: "package" or "package.folder"."""
    package, *rest = name.split(".")
    if not all(part.isidentifier() for part in (package, *rest)):
        raise SpecError(f'{origin}: the value must be "package" or "package.folder" (no attribute, no extras).')
    found = importlib.util.find_spec(package)
    places: Iterator[Path] = (Path(place, *rest) for place in (found and found.submodule_search_locations) or ())
    for folder in places:
        if folder.is_dir():
            return folder
    raise SpecError(f"{origin}: there is no such folder in an installed package.")


def read_spec(folder: Path, found_by: str = "") -> KernelSpec:
    """The spec of one kernel folder. found_by: who named it, for messages and lists. Raises SpecError."""
    path = folder / "spec.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}. Every kernel folder has a spec.toml.") from error
    except ValueError as error:  # tomllib's and the decoder's
        raise SpecError(f"{path} is not valid TOML: {error}") from error
    _known(path, "the file", document, {"kernel", "source", "capabilities", "functions"})
    kernel_types = {"name": str, "module": str, "version": int, "summary": str, "on_request": bool}
    kernel = _table(path, document, "kernel", kernel_types, may_lack=("on_request",))
    _matches(path, "kernel.name", kernel["name"], KERNEL_NAME, "lower-case letters, digits and dashes")
    if not kernel["module"].isidentifier():
        raise SpecError(f"{path}: kernel.module = {kernel['module']!r} must be a Python identifier.")
    _at_least(path, "kernel.version", kernel["version"], 0)
    _within(path, folder / "torch-ext" / kernel["module"], folder)
    types = {field.name: _toml_type(field.type) for field in fields(Capabilities)}
    may_lack = [field.name for field in fields(Capabilities) if field.default is not MISSING]
    capabilities = _table(path, document, "capabilities", types, may_lack=may_lack)
    for key, allowed in (
        ("dtypes", _DTYPES), ("masks", _MASKS), ("devices", _DEVICES), ("generations", _GENERATIONS)
    ):  # fmt: skip
        if not capabilities[key]:
            raise SpecError(f"{path}: capabilities.{key} is empty; allowed: {', '.join(allowed)}.")
        for value in capabilities[key]:
            if value not in allowed:
                raise SpecError(f"{path}: capabilities.{key} has {value!r}; allowed: {', '.join(allowed)}.")
        capabilities[key] = tuple(capabilities[key])
    for key, lowest in (("max_head_dim", 1), ("length_multiple", 1), ("head_dim_multiple", 1), ("max_kv_len", 0)):
        _at_least(path, f"capabilities.{key}", capabilities.get(key, lowest), lowest)
    for key in ("dropout", "position_bias"):
        if capabilities[key]:
            raise SpecError(f"{path}: capabilities.{key} = true, but kernels are not handed any; it must be false.")
    if "none" not in capabilities["masks"]:
        raise SpecError(f'{path}: capabilities.masks lacks "none"; every kernel takes calls without a mask.')
    functions = _functions(path, document)
    if "ranges" not in capabilities["masks"]:
        if "ranges+validity" in capabilities["masks"]:
            raise SpecError(f'{path}: capabilities.masks has "ranges+validity" and needs "ranges" too.')
        if len(functions) > 1:
            raise SpecError(f'{path}: [functions.{functions[-1].name}] needs "ranges" in capabilities.masks.')
    for mask in ("dense_bool", "dense_float"):
        if mask in capabilities["masks"] and "forward_dense" not in (function.name for function in functions):
            raise SpecError(f"{path}: {mask!r} in capabilities.masks needs [functions.forward_dense].")
    lacking = {"forward_with_lse", "backward"} - {function.name for function in functions}
    if capabilities["gradients"] and lacking:
        raise SpecError(f"{path}: capabilities.gradients = true needs [functions.{min(lacking)}].")
    return KernelSpec(
        **kernel,
        source=_source(path, document),
        capabilities=Capabilities(**capabilities),
        functions=functions,
        folder=folder.resolve(),
        found_by=found_by or str(path),
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
        _matches(path, "source.hub", source.hub, REPOSITORY, 'a Hub repository, "org/name"')
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
        if name not in _FUNCTIONS:
            raise SpecError(f"{path}: [functions.{name}] is unknown; allowed: {', '.join(_FUNCTIONS)}.")
        bounds = ("max_packed_rows", "min_kv_len")
        table = _table(path, functions, name, dict.fromkeys(bounds, int), required=False, parent="functions.")
        made.append(KernelFunction(name, **table))
        for bound in bounds:
            _at_least(path, f"functions.{name}.{bound}", getattr(made[-1], bound), 0)
    return tuple(made)


def _matches(path: Path, key: str, value: str, pattern: re.Pattern[str], allowed: str) -> None:
    if not pattern.fullmatch(value):
        raise SpecError(f"{path}: {key} = {value!r} must be {allowed}.")


def _within(path: Path, inner: Path, folder: Path) -> None:
    """A kernel's files are those of its folder: no link leads out of it."""
    root = folder.resolve()
    for each in (inner, *inner.rglob("*")):
        if not each.resolve().is_relative_to(root):
            raise SpecError(f"{path}: {each} leads out of the kernel's folder, to {each.resolve()}.")


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
    may_lack: Collection[str] = (),
    parent: str = "",
) -> dict[str, Any]:
    """Table `name` of `document` with values of the given types. required: every key not in may_lack must be there."""
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise SpecError(f"{path}: {parent}{name} = {table!r} must be a table, [{parent}{name}].")
    _known(path, f"[{parent}{name}]", table, set(types))
    for key, kind in types.items():
        if key not in table:
            if required and key not in may_lack:
                raise SpecError(f"{path}: [{parent}{name}] lacks {key} ({kind.__name__}).")
            continue
        if type(table[key]) is not kind:
            raise SpecError(f"{path}: {parent}{name}.{key} = {table[key]!r} must be a {kind.__name__}.")
    return dict(table)
