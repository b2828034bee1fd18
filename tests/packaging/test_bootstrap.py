"""tools/bootstrap: finds a Python by itself, says what to install where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BOOTSTRAP = Path(__file__).resolve().parents[2] / "tools" / "bootstrap"
TOOLS = ("sh", "cat", "cksum", "dirname", "mkdir", "df", "awk", "rm")


@pytest.fixture
def machine(tmp_path):
    """A machine with standard tools, an empty home and no Python; returns a function that runs bootstrap on it."""
    bin_folder, home = tmp_path / "bin", tmp_path / "home"
    bin_folder.mkdir()
    home.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (bin_folder / tool).symlink_to(found)

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(bin_folder), "HOME": str(home), "VENV": str(tmp_path / "venv"), **variables}
        return subprocess.run([str(BOOTSTRAP)], env=environment, capture_output=True, text=True, timeout=60)

    run.bin, run.home, run.venv = bin_folder, home, tmp_path / "venv"
    return run


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_a_python_it_says_what_to_install(machine):
    result = machine()
    assert result.returncode == 1 and result.stdout == ""
    assert "no Python 3.12, 3.13 or 3.14" in result.stderr
    assert "apt-get install python3.12" in result.stderr and "PYTHON=" in result.stderr
    assert not machine.venv.exists()


def test_a_python_that_is_too_old_does_not_count(machine):
    script(machine.bin / "python3", "exit 1")  # what the version check makes an old Python do
    assert "no Python 3.12" in machine().stderr


def test_a_python_that_is_named_must_fit(machine):
    script(machine.bin / "old", "exit 1")
    script(machine.bin / "python3", f'exec "{sys.executable}" "$@"')
    result = machine(PYTHON=str(machine.bin / "old"))
    assert result.returncode == 1
    assert f"PYTHON={machine.bin / 'old'} is not a Python 3.12" in result.stderr


@pytest.mark.parametrize("place", ["path", "pyenv"])
def test_a_python_is_found_on_the_path_and_in_pyenv(machine, place):
    """Everything up to making the environment; the stand-in ends there, since the rest takes minutes."""
    where = machine.bin / "python3.13" if place == "path" else machine.home / ".pyenv/versions/3.13.1/bin/python"
    script(
        where,
        f'case "$1" in -m) echo "making $3 with $0"; exit 7 ;; *) "{sys.executable}" "$@" >/dev/null && echo "$0" ;; esac',
    )
    result = machine()
    assert result.returncode == 7
    assert f"with {where}" in result.stderr


def test_too_little_disk_is_told_before_anything_is_made(machine):
    script(machine.bin / "python3.12", f'exec "{sys.executable}" "$@"')
    (machine.bin / "df").unlink()
    script(machine.bin / "df", 'echo "Filesystem 1024-blocks Used Available"; echo "x 9 9 3000000"')
    result = machine()
    assert result.returncode == 1
    assert "2 GiB free" in result.stderr
    assert not machine.venv.exists()


def test_an_environment_that_is_ready_is_used_as_it_is(machine):
    """The environment of this very run was made by bootstrap, or by hand; a copy of its stamp is what counts."""
    root = BOOTSTRAP.parents[1]
    wanted = subprocess.run(
        ["sh", "-c", 'cat requirements/test.txt requirements/models.txt | cksum; printf %s "$PWD"'],
        cwd=root, capture_output=True, text=True, check=True, env={**os.environ, "PWD": str(root)},
    ).stdout  # fmt: skip
    script(machine.venv / "bin" / "python", "exit 0")
    (machine.venv / ".tpu-kernels").write_text(wanted)
    result = machine()
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(machine.venv / "bin" / "python")
    (machine.venv / ".tpu-kernels").write_text(wanted + "older")
    assert machine().returncode != 0  # it tries to renew the environment, and the stand-in cannot
