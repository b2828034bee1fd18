"""A kernel's build on disk (build/torch-tpu): checked against its digest, then imported by `kernels`, all or nothing."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .specs import KernelSpec


class KernelLoadError(RuntimeError):
    """A kernel that cannot be loaded: which, from where, what was tried and what to do. The cause is chained."""


def cache_dir() -> Path:
    """Where this package keeps its own files: TPU_KERNELS_CACHE, else the user's cache directory."""
    if chosen := os.environ.get("TPU_KERNELS_CACHE"):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("tpu_kernels"))


def check_files(name: str, variant: Path, remedy: str, expected: Mapping[str, str] | None = None) -> dict[str, str]:
    """Compare a build's files with the digest in its metadata.json, which `kernels` does not do when it loads.

    Args:
        name: of the kernel, for messages.
        variant: the build's folder.
        remedy: what to do about damaged files; ends the message.
        expected: digests (base64 of SHA-256) seen before, by path, for a build that carries no digest.

    Returns:
        The digest of every file now, by path.

    Raises:
        KernelLoadError: when metadata.json cannot be read, or a file is missing, unknown or changed.
    """
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    try:
        metadata = Metadata.read_from_file(variant / "metadata.json")
    except (OSError, ValueError) as error:
        raise KernelLoadError(f"kernel {name!r}: {variant / 'metadata.json'} cannot be read: {error}. {remedy}") from error
    found: dict[str, str] = dict(Digest.hash_variant(DigestAlgorithm.SHA256, variant).files)
    differences = []
    if metadata.digest is not None:
        try:
            metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
        except DigestValidationError as error:
            differences = [str(violation) for violation in error.violations]
    if expected is not None and not differences:
        differences = [path for path in sorted(found.keys() | expected.keys()) if found.get(path) != expected.get(path)]
    if differences:
        raise KernelLoadError(
            f"kernel {name!r}: files in {variant} are not those of the build ({'; '.join(differences)}). They were "
            f"changed or only partly written, and are not imported. {remedy}"
        )
    return found


def load_build(spec: KernelSpec, variant: Path) -> ModuleType:
    """Import a checked build by `kernels`, with all its submodules. Whatever kernels or the kernel raises, passes.

    A variant folder is loaded whatever backend kernels detects: the same build is emulated on CPU hosts.

    Raises:
        KernelLoadError: when the build lacks a function that `spec` promises, or cannot be imported safely.
    """
    import kernels
    from kernels._rust import Metadata

    variant = variant.resolve()  # kernels takes another path to the same files for another kernel
    metadata = Metadata.read_from_file(variant / "metadata.json")
    if metadata.kernel_depends:
        others = ", ".join(dependency.repo_id for dependency in metadata.kernel_depends)
        raise KernelLoadError(
            f"kernel {spec.name!r} in {variant} depends on other kernels ({others}). They would be neither pinned nor "
            "checked, so such builds are not loaded."
        )
    taken = sys.modules.get(metadata.id)
    if taken is not None and all(taken is not known.module for known in kernels.get_loaded_kernels()):
        raise KernelLoadError(
            f"kernel {spec.name!r} in {variant} has the id {metadata.id!r}, the name of an imported module. It is not "
            "imported over that; its publisher must rename it."
        )
    with backend_shim(), _all_or_nothing(variant, metadata.id):
        module = kernels.get_local_kernel(variant)
        # Late relative imports would resolve into whichever copy of a kernel was loaded last.
        for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
            importlib.import_module(found.name)
        _check_functions(spec, module)
    return module


def _check_functions(spec: KernelSpec, module: ModuleType) -> None:
    lacking = [function.name for function in spec.functions if not callable(getattr(module, function.name, None))]
    if lacking:
        raise KernelLoadError(
            f"kernel {spec.name!r} from {module.__file__} lacks {', '.join(lacking)}, which its spec.toml promises. "
            "The build and the spec are of different versions."
        )


@contextlib.contextmanager
def _all_or_nothing(variant: Path, kernel_id: str) -> Iterator[None]:
    """When loading `variant` fails, forget all of it, so that a retry runs its files anew.

    kernels itself forgets a module whose own body failed, but neither its submodules nor a module that failed later.
    """
    from kernels.importer import _loaded_kernels

    try:
        yield
    except BaseException:
        for name in [name for name in sys.modules if name == kernel_id or name.startswith(f"{kernel_id}.")]:
            del sys.modules[name]
        _loaded_kernels.pop(variant, None)
        raise


@contextlib.contextmanager
def backend_shim() -> Iterator[bool]:
    """Let kernels 0.17.2 see the TPU while a kernel is loaded; yields whether that needed help.

    kernels, and the `_ops.py` that kernel-builder writes into a build, ask for `torch.backends.tpu`, which torch_tpu
    0.2.0 does not have. The attribute exists only inside this context, and only where the accelerator is a TPU, because
    with it kernels can load no CUDA kernel. It can go when a test in tests/hub says that either side has mended it.
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
