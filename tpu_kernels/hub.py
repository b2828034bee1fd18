"""From a KernelSpec to a Python module, always through Hugging Face's `kernels`: Hub repository, or the packaged copy.

Importing this module imports neither kernels nor jax.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from packaging.version import Version

from . import staging
from .specs import KernelSpec

logger = logging.getLogger("tpu_kernels")

KERNELS_AT_LEAST = "0.17.2"


class KernelLoadError(RuntimeError):
    """A kernel that cannot be loaded: which, from where, what was tried and what to do. The cause is chained."""


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel module and where it came from. revision is a commit (Hub) or a content hash (packaged)."""

    module: ModuleType
    source: Literal["packaged", "hub", "local"]
    location: str
    revision: str


# kernels has no lock of its own, and loading one kernel twice gives two modules whose relative imports cross.
_lock = threading.RLock()
_loaded: dict[KernelSpec, LoadedKernel] = {}


def load_kernel(spec: KernelSpec) -> LoadedKernel:
    """The kernel of `spec`, loaded once in a process.

    A spec with a Hub source is pulled from there (LOCAL_KERNELS and HF_HUB_OFFLINE are honoured by `kernels`); when the
    Hub cannot be reached, the packaged copy serves, with a warning. `LoadedKernel.source` tells which it was.

    Raises:
        KernelLoadError: when the kernel cannot be had, is damaged or lacks a function that the spec promises. Nothing is
            kept then, so that a later call may succeed.
    """
    with _lock:
        kernel = _loaded.get(spec)
        if kernel is None:
            _check_kernels_version(spec)
            kernel = _from_hub(spec) if spec.source.hub else _packaged(spec)
            _loaded[spec] = kernel
            logger.info("kernel %r: %s, revision %s, %s", spec.name, kernel.source, kernel.revision, kernel.location)
        return kernel


def cache_dir() -> Path:
    """Where packaged kernels are staged: TPU_KERNELS_CACHE, else the user's cache directory."""
    if chosen := os.environ.get("TPU_KERNELS_CACHE"):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("tpu_kernels"))


def _packaged(spec: KernelSpec) -> LoadedKernel:
    """The copy shipped with this package, staged in the cache under its content hash."""
    import kernels

    try:
        revision = staging.content_hash(spec.folder)
        variant = staging.stage(spec.folder, cache_dir() / "staged" / f"{spec.name}-{revision[:16]}").resolve()
    except (staging.StagingError, OSError) as error:
        raise KernelLoadError(
            f"kernel {spec.name!r}: the packaged copy in {spec.folder} cannot be staged in {cache_dir()}: {error}. "
            "Check free space and permissions, or set TPU_KERNELS_CACHE to a writable folder."
        ) from error
    check_digest(spec.name, variant)
    with _explained(spec, f"packaged copy {variant}"), _all_or_nothing(variant):
        # A variant folder is loaded whatever backend kernels detects: the same build is emulated on CPU hosts.
        module = kernels.get_local_kernel(variant)
        _import_submodules(module)
        _check_functions(spec, module)
    return LoadedKernel(module, "packaged", str(variant), revision)


def _from_hub(spec: KernelSpec) -> LoadedKernel:
    import httpx2  # what huggingface_hub speaks HTTP with; its transport errors pass through kernels as they are
    import kernels

    source = spec.source
    pin: dict[str, str | int] = {"revision": source.revision} if source.revision else {"version": source.version}
    where = f"{source.hub} at {next(iter(pin.values()))}"
    try:
        with backend_shim() as shimmed, _explained(spec, f"Hub repository {where}", shimmed):
            variant = kernels.install_kernel(source.hub, **pin) if not _overridden(source.hub) else None
            if variant is not None:
                check_digest(spec.name, Path(variant).resolve())
            module = kernels.get_kernel(source.hub, **pin)
            _import_submodules(module)
            _check_functions(spec, module)
    except KernelLoadError as error:
        if not isinstance(error.__cause__, httpx2.TransportError | TimeoutError):
            raise
        logger.warning("%s The packaged copy of %r serves instead.", error, spec.name)
        return _packaged(spec)
    folder = Path(str(module.__file__)).parent
    return LoadedKernel(module, "local" if variant is None else "hub", str(folder), str(next(iter(pin.values()))))


def _overridden(repo: str) -> bool:
    """Whether LOCAL_KERNELS maps `repo` to a folder of the user's."""
    return any(entry.partition("=")[0] == repo for entry in os.environ.get("LOCAL_KERNELS", "").split(":"))


def check_digest(name: str, variant: Path) -> None:
    """Compare a variant's files with the digest in its metadata.json; `kernels` does not when it loads.

    Raises:
        KernelLoadError: when metadata.json cannot be read, or a file is missing, unknown or changed.
    """
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    try:
        metadata = Metadata.read_from_file(variant / "metadata.json")
    except (OSError, ValueError) as error:
        raise KernelLoadError(
            f"kernel {name!r}: {variant / 'metadata.json'} cannot be read: {error}. Delete {variant} and load again."
        ) from error
    if metadata.digest is None:
        return
    try:
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    except DigestValidationError as error:
        raise KernelLoadError(
            f"kernel {name!r}: the files in {variant} are not those its metadata.json was made for ({error}). They were "
            f"changed or only partly written and are not imported. Delete {variant} and load again."
        ) from error


@contextlib.contextmanager
def backend_shim() -> Iterator[bool]:
    """Let kernels 0.17.2 see the TPU while a kernel is loaded; yields whether that needed help.

    kernels asks for `torch.backends.tpu`, which torch_tpu 0.2.0 does not have. The attribute exists only inside this
    context, and only where the accelerator is a TPU, because with it kernels can load no CUDA kernel. It can go when a
    test in tests/hub says that either side has mended it.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if hasattr(torch.backends, "tpu") or accelerator is None or accelerator.type != "tpu":
        yield False
        return
    torch.backends.tpu = types.ModuleType("torch.backends.tpu")  # type: ignore[attr-defined]
    try:
        yield True
    finally:
        del torch.backends.tpu  # type: ignore[attr-defined]


@contextlib.contextmanager
def _explained(spec: KernelSpec, where: str, shimmed: bool = False) -> Iterator[None]:
    """Any failure of foreign code while loading becomes a KernelLoadError that says what to do."""
    try:
        yield
    except KernelLoadError:
        raise
    except Exception as error:  # kernels, huggingface_hub and the kernel itself raise all kinds; chained, not hidden
        hint = _hint(error, shimmed)
        raise KernelLoadError(
            f"kernel {spec.name!r} cannot be loaded from {where}: {type(error).__name__}: {error} {hint}".rstrip()
        ) from error


def _hint(error: Exception, shimmed: bool) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"The kernel needs the Python package {error.name!r}: pip install {error.name}."
    telemetry = [name for name in _TELEMETRY if os.environ.get(name)]
    if telemetry and ("header" in str(error) or "trust status" in str(error)):
        return f"kernels 0.17 sends a bad header when {telemetry[0]} is set: unset it, or set HF_HUB_USER_AGENT_ORIGIN."
    if "trusted publisher" in str(error):
        return "Only trusted publishers are loaded; use the packaged copy, or allow the repository by name."
    if isinstance(error, FileNotFoundError):
        from kernels.backends import _backend

        state = "on" if shimmed else "off"
        return f"kernels detects backend {_backend()} (TPU shim {state}); a torch-tpu build needs backend tpu."
    return ""


_TELEMETRY = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")


def _import_submodules(module: ModuleType) -> None:
    """Import a kernel's submodules now: late relative imports would resolve into whichever copy was loaded last."""
    for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        importlib.import_module(found.name)


def _check_functions(spec: KernelSpec, module: ModuleType) -> None:
    lacking = [function.name for function in spec.functions if not callable(getattr(module, function.name, None))]
    if lacking:
        raise KernelLoadError(
            f"kernel {spec.name!r} from {module.__file__} lacks {', '.join(lacking)}, which its spec.toml promises. "
            "The build and the spec are of different versions."
        )


@contextlib.contextmanager
def _all_or_nothing(variant: Path) -> Iterator[None]:
    """When loading `variant` fails, forget all of it, so that a retry runs its files anew.

    kernels itself forgets a module whose own body failed, but neither its submodules nor a module that failed later.
    """
    from kernels._rust import Metadata
    from kernels.importer import _loaded_kernels

    try:
        yield
    except BaseException:
        kernel_id = Metadata.read_from_file(variant / "metadata.json").id
        for name in [name for name in sys.modules if name == kernel_id or name.startswith(f"{kernel_id}.")]:
            del sys.modules[name]
        _loaded_kernels.pop(variant, None)
        raise


def _check_kernels_version(spec: KernelSpec) -> None:
    if importlib.util.find_spec("kernels") is None:
        raise KernelLoadError(
            f"kernel {spec.name!r}: the package kernels is not installed: pip install 'kernels>={KERNELS_AT_LEAST}'"
        )
    found = importlib.metadata.version("kernels")
    if Version(found) < Version(KERNELS_AT_LEAST):
        raise KernelLoadError(
            f"kernel {spec.name!r} needs kernels >= {KERNELS_AT_LEAST}, but {found} is installed: "
            f"pip install 'kernels>={KERNELS_AT_LEAST}'"
        )
