"""From a KernelSpec to a Python module, always imported by Hugging Face's `kernels`: from the Hub, or the packaged copy.

Importing this module imports neither kernels nor jax.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from packaging.version import Version

from . import builds, staging
from .builds import KernelLoadError, cache_dir
from .specs import KernelSpec

__all__ = [
    "Build",
    "KernelLoadError",
    "LoadedKernel",
    "cache_dir",
    "load_kernel",
    "loaded_kernels",
    "newest_commit",
    "prepare",
    "whereabouts",
]

logger = logging.getLogger("tpu_kernels")

KERNELS_AT_LEAST = "0.17.2"
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_NOT_CACHED = "Connect and run `tpu-kernels prefetch`, or map the repository to a folder with LOCAL_KERNELS."


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel's files, checked, and where they came from.

    Attributes:
        folder: of the build.
        source: "hub" (the Hub was asked just now), "hub-cache" (downloaded earlier, the Hub was not asked or does not
            answer), "local" (LOCAL_KERNELS) or "packaged".
        revision: a commit of the Hub repository; for "packaged" a hash of the source; for "local" the build's id.
        why: what decided for this source and revision.
    """

    folder: Path
    source: Literal["packaged", "hub", "hub-cache", "local"]
    revision: str
    why: str


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a kernel would be loaded from now, as far as can be told without asking the Hub.

    Attributes:
        source: "packaged", "local" or "hub".
        place: a Hub repository, or a folder.
        revision: as Build.revision; "" for a version of which no commit has been seen yet.
        why: what decides for source and revision.
        downloaded: whether the build is on disk, so that it loads with no Hub.
    """

    source: Literal["packaged", "hub", "local"]
    place: str
    revision: str
    why: str
    downloaded: bool


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel module and where it came from: see Build. location is the folder of the build."""

    module: ModuleType
    source: Literal["packaged", "hub", "hub-cache", "local"]
    location: str
    revision: str
    why: str

    def __str__(self) -> str:
        return f"{self.source} ({self.why}), revision {self.revision}, {self.location}"


# kernels has no lock of its own, and loading one kernel twice gives two modules whose relative imports cross.
_lock = threading.RLock()
_loaded: dict[KernelSpec, LoadedKernel] = {}


def load_kernel(spec: KernelSpec) -> LoadedKernel:
    """The kernel of `spec`, loaded once in a process.

    In order: the folder that LOCAL_KERNELS maps its repository to; the Hub repository at its pin, or the cache of it;
    when the Hub does not answer and the cache has nothing, the packaged copy, with a warning. A kernel without a Hub
    repository is the packaged copy. `LoadedKernel.source` and `why` tell which it was. Any other failure (publisher not
    trusted, no such version, damaged files, ...) is an error and not a reason to take another copy.

    Raises:
        KernelLoadError: when the kernel cannot be had, is damaged or lacks a function that the spec promises. Nothing is
            kept then, so that a later call may succeed.
    """
    with _lock:
        kernel = _loaded.get(spec)
        if kernel is None:
            build = prepare(spec)
            with _explained(spec, f"{build.source} {build.folder}"):
                module = builds.load_build(spec, build.folder)
            kernel = LoadedKernel(module, build.source, str(build.folder), build.revision, build.why)
            _loaded[spec] = kernel
            logger.info("kernel %r: %s", spec.name, kernel)
        return kernel


def loaded_kernels() -> tuple[tuple[str, LoadedKernel], ...]:
    """Name and kernel of every one loaded in this process, in order of loading."""
    return tuple((spec.name, kernel) for spec, kernel in list(_loaded.items()))


def prepare(spec: KernelSpec, *, everything: bool = False) -> Build:
    """The checked build of `spec` on disk, downloaded or staged where needed; nothing of it is run.

    Args:
        everything: download the whole Hub repository and always ask the Hub, for later use offline.

    Raises:
        KernelLoadError: as `load_kernel`.
    """
    _check_kernels_version(spec)
    local = _local(spec)
    if local is not None:
        return local
    if not spec.source.hub:
        return _packaged(spec, "spec.toml names no Hub repository")
    from . import download

    with _explained(spec, f"Hub repository {spec.source.hub}"):
        try:
            pulled = download.pull(spec, everything=everything)
        except download.HubUnavailableError as error:
            if everything or not (spec.folder / "build.toml").is_file():
                raise KernelLoadError(f"kernel {spec.name!r} from {spec.source.hub}: {error}. {_NOT_CACHED}") from error
            logger.warning("kernel %r from %s: %s. The packaged copy serves instead.", spec.name, spec.source.hub, error)
            return _packaged(spec, str(error))
    if pulled.source == "hub-cache" and "does not answer" in pulled.why:
        logger.warning("kernel %r from %s: %s; commit %s from the cache serves.", spec.name, spec.source.hub, pulled.why,
                       pulled.commit)  # fmt: skip
    return Build(pulled.variant, pulled.source, pulled.commit, pulled.why)


def whereabouts(spec: KernelSpec) -> Whereabouts:
    """Where `spec` would be loaded from. Downloads, unpacks and runs nothing.

    Raises:
        KernelLoadError: for a LOCAL_KERNELS or a lock file that is none.
    """
    _check_kernels_version(spec)
    if local := _local(spec):
        return Whereabouts("local", str(local.folder), local.revision, local.why, True)
    if not spec.source.hub:
        why = "spec.toml names no Hub repository"
        return Whereabouts("packaged", str(spec.folder), staging.content_hash(spec.folder), why, True)
    from . import download

    with _explained(spec, f"Hub repository {spec.source.hub}"):
        commit, why, downloaded = download.seen(spec)
    return Whereabouts("hub", spec.source.hub, commit, why, downloaded)


def newest_commit(spec: KernelSpec) -> str:
    """The commit that `spec`'s version of its Hub repository stands for now, whatever a lock file says.

    Raises:
        KernelLoadError: also when the Hub does not answer, or does not trust the publisher.
    """
    _check_kernels_version(spec)
    from . import download

    with _explained(spec, f"Hub repository {spec.source.hub}"):
        return download.newest_commit(spec)


def _packaged(spec: KernelSpec, why: str) -> Build:
    """The copy shipped with this package, staged in the cache under its content hash."""
    try:
        revision = staging.content_hash(spec.folder)
        variant = staging.stage(spec.folder, cache_dir() / "staged" / f"{spec.name}-{revision[:16]}").resolve()
    except (staging.StagingError, OSError) as error:
        raise KernelLoadError(
            f"kernel {spec.name!r}: the packaged copy in {spec.folder} cannot be staged in {cache_dir()}: {error}. "
            "Check free space and permissions, or set TPU_KERNELS_CACHE to a writable folder."
        ) from error
    builds.check_files(spec.name, variant, f"Delete {variant} and load again.")
    return Build(variant, "packaged", revision, why)


def _local(spec: KernelSpec) -> Build | None:
    """The build in the folder that LOCAL_KERNELS ("org/name=/folder:...") maps this kernel's repository to.

    Its files are the user's own, perhaps being edited, and are compared with no digest.
    """
    setting = os.environ.get("LOCAL_KERNELS")
    if setting is None:
        return None
    folders = dict(entry.partition("=")[::2] for entry in setting.split(":"))
    if not all(repo and folder for repo, folder in folders.items()):
        raise KernelLoadError(  # kernels itself would refuse every kernel, the packaged ones too
            f"kernel {spec.name!r}: LOCAL_KERNELS={setting!r} is malformed. Write org/name=/folder, several with ':' "
            "between them, or unset it."
        )
    if not spec.source.hub or spec.source.hub not in folders:
        return None
    folder = Path(folders[spec.source.hub]).expanduser()
    from kernels._rust import Metadata

    from .download import VARIANTS

    candidates = [folder / within / variant for within in ("build", ".") for variant in VARIANTS] + [folder]
    for candidate in candidates:
        if (candidate / "metadata.json").is_file():
            with _explained(spec, f"LOCAL_KERNELS folder {folder}"):
                build_id = Metadata.read_from_file(candidate / "metadata.json").id
            return Build(candidate.resolve(), "local", build_id, "LOCAL_KERNELS")
    raise KernelLoadError(
        f"kernel {spec.name!r}: LOCAL_KERNELS maps {spec.source.hub} to {folder}, where there is no build: looked for "
        f"build/{' or build/'.join(VARIANTS)}. Stage one: python -m tpu_kernels.staging KERNEL_FOLDER {folder}"
    )


@contextlib.contextmanager
def _explained(spec: KernelSpec, where: str) -> Iterator[None]:
    """Any failure of foreign code while loading becomes a KernelLoadError that says what to do."""
    try:
        yield
    except KernelLoadError:
        raise
    except Exception as error:  # kernels, huggingface_hub and the kernel itself raise all kinds; chained, not hidden
        raise KernelLoadError(
            f"kernel {spec.name!r} cannot be loaded from {where}: {type(error).__name__}: {error} {_hint(error)}".rstrip()
        ) from error


def _hint(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"The kernel needs the Python package {error.name!r}: pip install {error.name}."
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        return "Check free space and permissions of KERNELS_CACHE (else HF_HOME) and TPU_KERNELS_CACHE."
    return ""


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
