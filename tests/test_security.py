"""What SECURITY.md promises about the sources: nothing in them makes code of data, and every variable is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.audit import KNOWN_TO_BE_VULNERABLE, audit

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("tpu_kernels", "kernel_specs") for path in (ROOT / folder).rglob("*.py"))
SECURITY = (ROOT / "SECURITY.md").read_text()

# Modules whose readers run what they read, calls that make code of text, and switches that allow either.
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "code", "codeop"}
_BUILTINS = {"eval", "exec", "compile", "__import__"}
_CALLS = {"torch.load", "os.system", "os.popen", "torch.package.PackageImporter"}
_SWITCHES = {"allow_pickle", "trust_remote_code", "shell"}
# Told in SECURITY.md.
ALLOWED = {("tpu_kernels/offdevice/llo.py", "exec"), ("tpu_kernels/offdevice/llo.py", "compile")}


def code_from_data(tree: ast.AST) -> Iterator[str]:
    """Names of what in `tree` could make code of data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {alias.name.partition(".")[0] for alias in node.names} & _MODULES
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from {(node.module or "").partition(".")[0]} & _MODULES
        elif isinstance(node, ast.Name):
            yield from {node.id} & _BUILTINS
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            yield from {name} & (_CALLS | {f"builtins.{each}" for each in _BUILTINS})
        elif isinstance(node, ast.keyword) and not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield from {node.arg or ""} & _SWITCHES


def test_no_source_makes_code_of_data():
    assert len(SOURCES) > 50
    found = {
        (path.relative_to(ROOT).as_posix(), name) for path in SOURCES for name in code_from_data(ast.parse(path.read_text()))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", "pickle"),
        ("import os, marshal", "marshal"),
        ("from yaml import load", "yaml"),
        ("x = eval(text)", "eval"),
        ("run = exec", "exec"),
        ("builtins.eval(text)", "builtins.eval"),
        ("torch.load(path)", "torch.load"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("AutoModel.from_pretrained(name, trust_remote_code=answer)", "trust_remote_code"),
        ("subprocess.run(text, shell=True)", "shell"),
    ],
)
def test_the_search_finds(text, found):
    assert list(code_from_data(ast.parse(text))) == [found]


@pytest.mark.parametrize("text", ["model.eval()", "re.compile(x)", "from . import code", "f(shell=False)", "np.load(path)"])
def test_the_search_lets_pass(text):
    assert list(code_from_data(ast.parse(text))) == []


def variables(tree: ast.AST) -> Iterator[str]:
    """Environment variables of this package that `tree` names, and others that it reads by a literal name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^TPU_KERNELS_[A-Z_]+$", node.value)
        text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
        yield from re.findall(r"^(?:os\.)?(?:environ|environment|getenv)(?:\.get)?[(\[]'([A-Z_]+)'", text)


def test_every_variable_is_documented_and_every_documented_one_is_read():
    read = {name for path in SOURCES for name in variables(ast.parse(path.read_text()))}
    assert {"TPU_KERNELS_TRUST", "LOCAL_KERNELS", "KERNELS_CACHE", "HF_HUB_OFFLINE"} <= read
    documented = set(re.findall(r"`([A-Z][A-Z_]{4,})", SECURITY))
    assert read <= documented, f"not in SECURITY.md: {read - documented}"
    ours = {name for name in documented if name.startswith("TPU_KERNELS_")}
    assert ours == {name for name in read if name.startswith("TPU_KERNELS_")}
    # Those that are not of a worker's own stand in the users' pages too.
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert {name for name in ours if name not in pages} <= {"TPU_KERNELS_SCHEDULE_DUMP"}


REACHED = "jinja2 2.4.1 PYSEC-2014-8 2.7.2"


@pytest.mark.parametrize(
    ("known", "ours", "status", "told"),
    [
        ((1, REACHED), (0, "No known vulnerabilities found"), 0, "no known vulnerability in 2 releases"),
        ((1, REACHED), (1, "torch 2.0 CVE-2024-1"), 1, "torch 2.0 CVE-2024-1"),
        ((1, REACHED), (1, "jax: Dependency not found on PyPI"), 1, "could not be audited"),
        # What pip-audit says behind a mirror without advisories, with --strict and without, and where no host answers.
        ((1, "jinja2: Dependency not found on PyPI"), (0, ""), 3, "NOT CHECKED: 2 releases"),
        ((0, "No known vulnerabilities found"), (0, "No known vulnerabilities found"), 3, "NOT CHECKED"),
        ((1, "ConnectionError: Max retries exceeded"), (1, ""), 3, "NOT CHECKED"),
    ],
)
def test_an_audit_that_reaches_no_advisories_does_not_pass(known, ours, status, told, capsys):
    def run(requirements):
        return known if requirements.strip() == KNOWN_TO_BE_VULNERABLE else ours

    assert audit("torch==2.0\njax==0.1\n", run) == status
    assert told in capsys.readouterr().out
