"""Staging: from a kernel's source folder to the tree that `kernels` loads."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernels._rust import Digest, DigestAlgorithm, Metadata

from tpu_kernels import staging
from tpu_kernels.specs import packaged_specs_dir

BUILD = """\
[general]
name = "two-files"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["tpu"]

[torch-noarch]
"""


@pytest.fixture
def source(tmp_path):
    """A kernel with a submodule, a data file and bytecode lying about."""
    folder = tmp_path / "two-files"
    package = folder / "torch-ext" / "two_files"
    (package / "__pycache__").mkdir(parents=True)
    (folder / "build.toml").write_text(BUILD)
    (package / "__init__.py").write_text("from .numbers import ANSWER\n")
    (package / "numbers.py").write_text("ANSWER = 42\n")
    (package / "table.json").write_text("[1, 2]\n")
    (package / "__pycache__" / "numbers.cpython-312.pyc").write_bytes(b"old")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_source_gives_the_same_tree(source, tmp_path):
    first, second = staging.stage(source, tmp_path / "a"), staging.stage(source, tmp_path / "b")
    assert first == tmp_path / "a" / "build" / "torch-tpu"
    assert tree(first) == tree(second)
    assert sorted(tree(first)) == ["__init__.py", "metadata.json", "numbers.py", "table.json"]


def test_staging_again_leaves_the_build_alone(source, tmp_path):
    variant = staging.stage(source, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in variant.iterdir()}
    assert staging.stage(source, tmp_path / "out") == variant
    assert {path: path.stat().st_mtime_ns for path in variant.iterdir()} == before


@pytest.mark.parametrize("folder", sorted(packaged_specs_dir().glob("*/build.toml")), ids=lambda path: path.parent.name)
def test_packaged_kernels_get_metadata_that_kernels_accepts(folder, tmp_path):
    variant = staging.stage(folder.parent, tmp_path)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == folder.parent.name
    assert metadata.license == "Apache-2.0" and metadata.python_depends == [] and metadata.kernel_depends == []
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_metadata(source, tmp_path):
    variant = staging.stage(source, tmp_path / "out")
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("two-files", 3, "Apache-2.0")
    assert metadata.id == f"_two_files_tpu_{staging.content_hash(source)[:7]}"
    assert sorted(metadata.digest.files) == ["__init__.py", "numbers.py", "table.json"]
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "tpu"}


@pytest.mark.parametrize("changed", ["build.toml", "torch-ext/two_files/numbers.py", "torch-ext/two_files/table.json"])
def test_edited_source_gives_a_new_build_in_its_place(source, tmp_path, changed):
    old = Metadata.read_from_file(staging.stage(source, tmp_path / "out") / "metadata.json").id
    path = source / changed
    path.write_text(path.read_text() + "\n")
    variant = staging.stage(source, tmp_path / "out")
    assert Metadata.read_from_file(variant / "metadata.json").id != old
    fresh = staging.stage(source, tmp_path / "fresh")
    assert tree(variant) == tree(fresh)
    assert sorted(path.name for path in variant.parent.iterdir()) == [".lock", "torch-tpu"]


def test_bytecode_is_no_part_of_a_build(source, tmp_path):
    before = staging.content_hash(source)
    (source / "torch-ext" / "two_files" / "__pycache__" / "numbers.cpython-312.pyc").write_bytes(b"new")
    assert staging.content_hash(source) == before


@pytest.mark.parametrize("damage", ["{", "[]", '{"id": 3}'])
def test_a_damaged_build_is_made_anew(source, tmp_path, damage):
    variant = staging.stage(source, tmp_path / "out")
    good = tree(variant)
    (variant / "metadata.json").write_text(damage)
    assert tree(staging.stage(source, tmp_path / "out")) == good


def test_a_staged_kernel_in_a_read_only_cache_serves(source, tmp_path):
    variant = staging.stage(source, tmp_path / "out")
    (variant.parent / ".lock").unlink(missing_ok=True)
    variant.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert staging.stage(source, tmp_path / "out") == variant
        assert not (variant.parent / ".lock").exists()  # also true of root, whom no permission stops
    finally:
        variant.parent.chmod(stat.S_IRWXU)


BAD = [
    ("no build.toml", lambda folder: (folder / "build.toml").unlink(), ["build.toml is missing", "not a kernel source"]),
    ("not TOML", lambda folder: (folder / "build.toml").write_text("[general"), ["build.toml"]),
    ("no general", lambda folder: (folder / "build.toml").write_text("[torch-noarch]\n"), ["build.toml", "general"]),
    ("bad name", lambda folder: edit(folder, "two-files", "Two_Files"), ["build.toml", "Two_Files"]),
    ("no license", lambda folder: edit(folder, 'license = "Apache-2.0"\n', ""), ["build.toml", "license"]),
    ("version a str", lambda folder: edit(folder, "version = 3", 'version = "3"'), ["build.toml", "version"]),
    ("unknown backend", lambda folder: edit(folder, '["tpu"]', '["npu"]'), ["build.toml", "npu"]),
    ("not for tpu", lambda folder: edit(folder, '["tpu"]', '["cpu"]'), ["general.backends", "['cpu']", '"tpu"']),
    ("no package", lambda folder: shutil.rmtree(folder / "torch-ext"), ["torch-ext/two_files/__init__.py is missing"]),
    ("other package", lambda folder: edit(folder, "two-files", "others"), ["torch-ext/others/__init__.py is missing"]),
]


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "build.toml").read_text()
    assert old in text
    (folder / "build.toml").write_text(text.replace(old, new))


@pytest.mark.parametrize(("spoil", "named"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_folder(source, tmp_path, spoil, named):
    spoil(source)
    with pytest.raises(staging.StagingError) as caught:
        staging.stage(source, tmp_path / "out")
    assert [part for part in named if part not in str(caught.value)] == []
    assert not (tmp_path / "out").exists()


PROGRAM = """
import os, sys, time
from pathlib import Path
from tpu_kernels import staging
import kernels._rust
source, out, meeting = map(Path, sys.argv[1:])
(meeting / str(os.getpid())).touch()
while not (meeting / "go").exists():
    time.sleep(0.001)
variant = staging.stage(source, out)
print(sorted(path.name for path in variant.iterdir()), (variant / "numbers.py").read_text())
"""


def test_processes_staging_the_same_kernel_at_once(source, tmp_path):
    # Many files make staging slow enough for the processes to meet in it.
    for number in range(300):
        (source / "torch-ext" / "two_files" / f"part{number}.py").write_text(f"X = {number}\n" * 200)
    meeting, out = tmp_path / "meeting", tmp_path / "out"
    meeting.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(source), str(out), str(meeting)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    while len(list(meeting.iterdir())) < 4 and all(process.poll() is None for process in running):
        time.sleep(0.01)
    (meeting / "go").touch()
    done = [(*process.communicate(timeout=60), process.returncode) for process in running]
    assert [errors for _, errors, code in done if code] == []
    assert len({output for output, _, _ in done}) == 1
    assert tree(out / "build" / "torch-tpu") == tree(staging.stage(source, tmp_path / "alone"))
    assert sorted(path.name for path in (out / "build").iterdir()) == [".lock", "torch-tpu"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpu_kernels.staging", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_command_line(source, tmp_path):
    done = run(source, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()) == tmp_path / "out" / "build" / "torch-tpu"
    assert Metadata.read_from_file(tmp_path / "out" / "build" / "torch-tpu" / "metadata.json").version == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m tpu_kernels.staging KERNEL_FOLDER OUT"),
        (["nowhere", "out"], "error: nowhere/build.toml is missing; nowhere is not a kernel source folder."),
    ],
)
def test_command_line_errors(arguments, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", message)


def test_command_line_tells_of_an_output_that_is_no_folder(source, tmp_path):
    (tmp_path / "out").write_text("a file")
    done = run(source, tmp_path / "out")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
