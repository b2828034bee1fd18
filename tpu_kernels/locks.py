"""Lock files in kernels' own format (kernels.lock): which commit a version of a Hub repository stands for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .builds import KernelLoadError

if TYPE_CHECKING:
    from .specs import KernelSpec, Source

FILE = "kernels.lock"
VARIABLE = "TPU_KERNELS_LOCK"


@dataclass(frozen=True, slots=True)
class Lock:
    """A commit (40 or 64 hexadecimal digits) and the file that names it."""

    commit: str
    path: Path


def locked_commit(spec: KernelSpec) -> Lock | None:
    """The commit that a lock file gives for `spec`'s repository and version.

    Looked for in TPU_KERNELS_LOCK, in kernels.lock of the working directory, and in kernels.lock beside the kernel
    folders. A kernel that is pinned to a commit by its spec.toml needs no lock.

    Raises:
        KernelLoadError: for a file that is no lock file, and when TPU_KERNELS_LOCK is set but does not lock this kernel.
    """
    if spec.source.revision or not spec.source.hub:
        return None
    chosen = os.environ.get(VARIABLE)
    for path in [Path(chosen)] if chosen else [Path.cwd() / FILE, spec.folder.parent / FILE]:
        if not chosen and not path.is_file():
            continue
        lock = read(path).get(_dependency(spec.source))
        if lock is not None:
            return Lock(lock.commit, path)
    if chosen:
        raise KernelLoadError(
            f"kernel {spec.name!r}: {VARIABLE}={chosen} does not lock {spec.source.hub} version {spec.source.version}. "
            f"Write it anew with `tpu-kernels lock --output {chosen}`, or unset {VARIABLE}."
        )
    return None


def read(path: Path) -> Mapping[Any, Any]:
    """The locks in `path`, from kernels' KernelDependency to its KernelLock. Raises KernelLoadError."""
    from kernels._rust import KernelLocks

    try:
        locks: Mapping[Any, Any] = KernelLocks.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KernelLoadError(
            f"{path} is not a kernels lock file: {error}. Write it anew with `tpu-kernels lock` (files from before "
            "kernels 0.17 have another format)."
        ) from error
    return locks


def write(path: Path, commits: Iterable[tuple[Source, str]]) -> None:
    """Lock each version to its commit in `path`; what else the file locks stays. Raises KernelLoadError, OSError."""
    from kernels._rust import KernelLock, KernelLocks

    locks = dict(read(path).items()) if path.exists() else {}
    locks |= {_dependency(source): KernelLock(commit) for source, commit in commits}
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(KernelLocks(locks).to_json() + "\n", encoding="utf-8")
    os.replace(fresh, path)


def _dependency(source: Source) -> Any:
    from kernels._rust import KernelDependency, KernelVersion

    return KernelDependency(source.hub, KernelVersion.Version(source.version))
