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

VARIANT = Path("build") / "torch-tpu"


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
    """
    general = _build_toml(source)
    name, version = general["name"], general["version"]
    package = source / "torch-ext" / name.replace("-", "_")
    if not (package / "__init__.py").is_file():
        raise StagingError(f"{package}/__init__.py is missing; the Python package of kernel {name!r} lives there.")
    variant = out / VARIANT
    kernel_id = f"_{name.replace('-', '_')}_tpu_{content_hash(source)[:7]}"
    if _is_staged(variant, kernel_id):
        return variant
    variant.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=variant.parent, prefix=".staging-") as scratch:
        fresh = Path(scratch) / VARIANT.name
        shutil.copytree(package, fresh, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        _write_metadata(fresh, name, kernel_id, version, general["license"])
        if variant.exists():
            # An older build: out of the way first, since a folder cannot be renamed over a full one.
            os.rename(variant, Path(scratch) / "old")
        try:
            os.rename(fresh, variant)
        except OSError:
            if not _is_staged(variant, kernel_id):  # unless another process was quicker
                raise
    return variant


def content_hash(source: Path) -> str:
    """SHA-256 over names and bytes of the files that make up a kernel's build (hex)."""
    digest = hashlib.sha256()
    for path in [source / "build.toml", *sorted((source / "torch-ext").rglob("*.py"))]:
        digest.update(path.relative_to(source).as_posix().encode())
        digest.update(b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _build_toml(source: Path) -> dict[str, str]:
    path = source / "build.toml"
    if not path.is_file():
        raise StagingError(f"{path} is missing; {source} is not a kernel source folder.")
    from kernels._rust import Build

    try:
        Build.open(source)  # kernel-builder's own reader: name rules, edition, backends
        general: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))["general"]
    except (ValueError, OSError, KeyError) as error:
        raise StagingError(f"{path}: {error}") from error
    return general


def _is_staged(variant: Path, kernel_id: str) -> bool:
    metadata = variant / "metadata.json"
    return metadata.is_file() and json.loads(metadata.read_text(encoding="utf-8")).get("id") == kernel_id


def _write_metadata(variant: Path, name: str, kernel_id: str, version: str, license_id: str) -> None:
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
    except StagingError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
