"""A kernel small enough to load in a test: a source folder with build.toml, spec.toml and two Python files."""

from __future__ import annotations

from pathlib import Path

BUILD = """\
[general]
name = "{name}"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["tpu"]

[torch-noarch]
"""
SPEC = """\
[kernel]
name = "{name}"
module = "{module}"
version = 1
summary = "For the tests"

[source]
{source}

[capabilities]
dtypes = ["float32"]
masks = ["none", "ranges"]
max_head_dim = 64
gqa = true
v_head_dim_may_differ = true
softcap = false
sinks = false
dropout = false
position_bias = false
gradients = false
devices = ["tpu", "cpu"]
generations = ["v6e"]

[functions.forward]
"""
BODY = """\
import os
from pathlib import Path

from .parts import value

log = os.environ.get("BODY_LOG")
if log:
    with open(log, "a") as file:
        file.write(str(os.getpid()) + "\\n")


def forward():
    return value()
"""
PARTS = """\
def value():
    from . import parts  # late: must be this copy's

    return parts.VALUE


VALUE = {value!r}
"""


def write_kernel(
    folder: Path,
    name: str = "small-kernel",
    *,
    source: str = 'hub = ""',
    value: str = "first",
    body: str = BODY,
    functions: str = "",
    extra: str | None = None,
) -> Path:
    """A kernel folder `folder`/`name`; `extra` is the text of one more submodule. Returns the kernel folder."""
    kernel = folder / name
    module = name.replace("-", "_")
    package = kernel / "torch-ext" / module
    package.mkdir(parents=True, exist_ok=True)
    (kernel / "build.toml").write_text(BUILD.format(name=name))
    (kernel / "spec.toml").write_text(SPEC.format(name=name, module=module, source=source) + functions)
    (package / "__init__.py").write_text(body)
    (package / "parts.py").write_text(PARTS.format(value=value))
    if extra is not None:
        (package / "extra.py").write_text(extra)
    return kernel
