"""`tpu-kernels init`: a new kernel folder that works at once, to be changed from there."""

from __future__ import annotations

import keyword
from pathlib import Path

from .specs import KERNEL_NAME, REPOSITORY

_TEMPLATE = Path(__file__).with_name("kernel_template")
_NAME, _MODULE, _ORG = "my-kernel", "my_kernel", "my-org"


class ScaffoldError(ValueError):
    """A kernel folder that cannot be written; says which argument is wrong and what is allowed."""


def write_kernel(name: str, parent: Path, org: str = "") -> Path:
    """Write the folder `parent`/`name`: build.toml, CARD.md, spec.toml and torch-ext/<module>/ with a small right kernel.

    Args:
        name: of the kernel, by kernel-builder's rule; the Python module is the same with underscores.
        parent: an existing folder.
        org: the Hub organisation or user that will publish it; "" for not known yet.

    Returns:
        The kernel folder.

    Raises:
        ScaffoldError: for a name or organisation that the Hub or Python would not take, or a folder that exists.
        OSError: when the folder cannot be written.
    """
    if not KERNEL_NAME.fullmatch(name):
        raise ScaffoldError(
            f"kernel name {name!r} must be lower-case letters, digits and dashes, at least two, starting with a letter and "
            'not ending with a dash, such as "my-attention".'
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module):
        raise ScaffoldError(f"kernel name {name!r} is a Python keyword; a module cannot be named so. Choose another.")
    if org and not REPOSITORY.fullmatch(f"{org}/{name}"):
        raise ScaffoldError(f"organisation {org!r} is no Hub name: letters, digits, dashes, dots, underscores.")
    if not parent.is_dir():
        raise ScaffoldError(f"{parent} is not a folder.")
    folder = parent / name
    if folder.exists():
        raise ScaffoldError(f"{folder} exists; nothing was written. Choose another name, or move it away.")
    for source in sorted(path for path in _TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        text = source.read_text(encoding="utf-8")
        for placeholder, value in ((_ORG, org or _ORG), (_NAME, name), (_MODULE, module)):
            text = text.replace(placeholder, value)
        path = folder / source.relative_to(_TEMPLATE).as_posix().replace(_MODULE, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
