"""From a kernel's source folder (Hub source layout) to the built tree that `kernels` loads: build/torch-tpu/.

Run as a program: `python -m tpu_kernels.staging kernel_specs/range-attention OUT`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import filelock

VARIANT = Path("build") / "torch-tpu"
_NOT_BUILT = ("__pycache__", "*.pyc")


class StagingError(ValueError):
    """A kernel folder that cannot be built; names the file and what is wrong."""


def stage(source: Path, out: Path) -> Path:
    """Build `source` into `out`/build/torch-tpu, with a metadata.json that carries a digest of every file.

    The same source always gives the same tree. The variant appears whole or not at all, also when two processes stage
    the same kernel at once.

    Args:
        source: folder with build.toml and torch-ext/<python_name>/.
        out: repository root to create the variant in.

    Returns:
        The variant folder.

    Raises:
        StagingError: for a folder that is no kernel source.
        OSError: when `out` cannot be written.
    """
    general = _build_toml(source)
    name, version = general["name"], general["version"]
    package = source / "torch-ext" / name.replace("-", "_")
    if not (package / "__init__.py").is_file():
        raise StagingError(f"{package}/__init__.py is missing; the Python package of kernel {name!r} lives there.")
    variant = out / VARIANT
    kernel_id = f"_{name.replace('-', '_')}_tpu_{content_hash(source)[:7]}"
    if _is_staged(variant, kernel_id):  # before the lock: a cache that is only readable serves as well
        return variant
    variant.parent.mkdir(parents=True, exist_ok=True)
    with (
        filelock.FileLock(variant.parent / ".lock"),
        tempfile.TemporaryDirectory(dir=variant.parent, prefix=".staging-") as scratch,
    ):
        if _is_staged(variant, kernel_id):  # by another process, while this one waited
            return variant
        fresh = Path(scratch) / VARIANT.name
        shutil.copytree(package, fresh, ignore=shutil.ignore_patterns(*_NOT_BUILT))
        _write_metadata(fresh, name, kernel_id, version, general["license"])
        if variant.exists():
            # Another build: out of the way first, since a folder cannot be renamed over a full one.
            os.rename(variant, Path(scratch) / "old")
        os.rename(fresh, variant)
    return variant


def content_hash(source: Path) -> str:
    """SHA-256 over names and bytes of the files that make up a kernel's build (hex)."""
    digest = hashlib.sha256()
    package = (path for path in (source / "torch-ext").rglob("*") if path.is_file() and not _is_bytecode(path))
    for path in [source / "build.toml", *sorted(package)]:
        digest.update(path.relative_to(source).as_posix().encode())
        digest.update(b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _is_bytecode(path: Path) -> bool:
    return path.suffix == ".pyc" or "__pycache__" in path.parts


def _build_toml(source: Path) -> dict[str, Any]:
    path = source / "build.toml"
    if not path.is_file():
        raise StagingError(f"{path} is missing; {source} is not a kernel source folder.")
    from kernels._rust import Build

    try:
        Build.open(source)  # kernel-builder's own reader: name rules, edition, license, backends
        general: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["general"]
    except (ValueError, OSError) as error:
        raise StagingError(f"{path}: {error}") from error
    if "tpu" not in general["backends"]:
        raise StagingError(f'{path}: general.backends = {general["backends"]} must include "tpu".')
    return general


def _is_staged(variant: Path, kernel_id: str) -> bool:
    try:
        metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # none yet, or a damaged one, which is built anew
        return False
    return isinstance(metadata, dict) and metadata.get("id") == kernel_id


def _write_metadata(variant: Path, name: str, kernel_id: str, version: int, license_id: str) -> None:
    from kernels._rust import Digest, DigestAlgorithm

    files = Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
    document = {
        "name": name,
        "id": kernel_id,
        "version": version,
        "license": license_id,
        "python-depends": [],
        "backend": {"type": "tpu"},
        "digest": {"algorithm": "sha256", "files": dict(sorted(files.items()))},
    }
    (variant / "metadata.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Stage the kernel folder argv[1] into the repository root argv[2]."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tpu_kernels.staging KERNEL_FOLDER OUT")
    try:
        print(stage(Path(sys.argv[1]), Path(sys.argv[2])))
    except (StagingError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
