"""Files that commands draw to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import typer

PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path | None, option: str, suffixes: tuple[str, ...] = PICTURES) -> None:
    """Refuse, before any work, a file that a plot cannot be written to. Raises typer.BadParameter."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("the plot needs matplotlib: pip install 'tpu-kernels[plot]'", param_hint=option)
    if path.suffix not in suffixes:
        raise typer.BadParameter(f"{path.name} is none of {', '.join(suffixes)}", param_hint=option)
    if not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"{path.resolve().parent} is not a folder", param_hint=option)
