"""The commands `tpu-kernels list`, `prefetch` and `lock`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import hub, locks
from .specs import KernelSpec, SpecError, load_specs, read_spec

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[KERNEL]...", help="Names of kernels, or kernel folders with a spec.toml.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def list_kernels(as_json: Json = False) -> None:
    """Show the installed kernels: where each comes from, at which revision, and what it can do.

    Nothing is downloaded or run, and the Hub is not asked: for a version of a Hub repository the revision is the commit that
    was seen last. Kernels "on request" take only calls that name them: register(name, kernels=...). "compiles for" is what
    the kernel's spec.toml says; for the packaged kernels it is tested. Exit code 1 if a kernel's source cannot be told.

    Example: tpu-kernels list --json | jq '.[] | {name, revision: .loads_from.revision}'
    """
    columns, rows = [], []
    for spec in load_specs():
        try:
            place: dict[str, object] = dataclasses.asdict(hub.whereabouts(spec))
        except hub.KernelLoadError as error:
            place = {"error": str(error)}
        columns.append(_features(spec, place))
        rows.append(dataclasses.asdict(spec) | {"loads_from": place})
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("", *(spec["name"] for spec in rows)):
            table.add_column(heading, overflow="fold")
        for feature in columns[0]:
            table.add_row(feature, *(escape(column[feature]) for column in columns))
        Console().print(table)
    raise typer.Exit(any("error" in row["loads_from"] for row in rows))


def _features(spec: KernelSpec, place: dict[str, object]) -> dict[str, str]:
    """One kernel's column of the table."""
    can = spec.capabilities
    able = {
        "grouped KV heads": can.gqa, "Dv other than D": can.v_head_dim_may_differ, "softcap": can.softcap,
        "sinks": can.sinks, "gradients": can.gradients, "dropout": can.dropout, "position bias": can.position_bias,
    }  # fmt: skip
    lengths = "any" if can.length_multiple == 1 else f"multiples of {can.length_multiple}"
    dims = "any" if can.head_dim_multiple == 1 else f"multiples of {can.head_dim_multiple}"
    downloaded = "" if place.get("downloaded", True) else ", not downloaded"
    return {
        "what": spec.summary,
        "version": str(spec.version),
        "takes calls": "on request" if spec.on_request else "by default",
        "source": f"{place['source']}: {place['place']}{downloaded}" if "source" in place else str(place["error"]),
        "revision": f"{str(place['revision'])[:12] or 'none seen'} ({place['why']})" if "source" in place else "",
        "found by": spec.found_by,
        "functions": ", ".join(function.name for function in spec.functions),
        "masks": ", ".join(can.masks) if can.takes_ranges else "none: full and causal",
        "dtypes": ", ".join(can.dtypes),
        "head sizes": f"{dims}, to {can.max_head_dim}",
        "lengths": lengths + (f", keys to {can.max_kv_len}" if can.max_kv_len else ""),
        **{name: "yes" if each else "no" for name, each in able.items()},
        "compiles for": ", ".join(can.generations),
    }


def prefetch(names: Names = None, as_json: Json = False) -> None:
    """Download or unpack kernels (default: all installed ones), so that they load with HF_HUB_OFFLINE=1.

    Nothing of a kernel is run. Exit code 1 if one could not be had.

    Example: tpu-kernels prefetch && HF_HUB_OFFLINE=1 python train.py
    """
    rows = []
    for spec in _chosen(names):
        try:
            build = hub.prepare(spec, everything=True)
        except hub.KernelLoadError as error:
            rows.append({"kernel": spec.name, "error": str(error)})
        else:
            rows.append(
                {"kernel": spec.name, "source": build.source, "revision": build.revision, "folder": str(build.folder)}
            )
    _show(rows, ("kernel", "source", "revision", "folder"), as_json)


def lock(
    names: Names = None,
    output: Annotated[Path, typer.Option(help="The lock file; what else it locks stays.")] = Path(locks.FILE),
    as_json: Json = False,
) -> None:
    """Write the commits that versions of Hub kernels stand for now to a lock file, in kernels' own format.

    The lock file holds where the program is started in its folder, or where TPU_KERNELS_LOCK names it. Kernels without
    a Hub repository, and those that their spec.toml pins to a commit, need no lock. Exit code 1 if one failed; the file
    is left as it was then.

    Example: tpu-kernels lock && git add kernels.lock
    """
    rows, commits = [], []
    for spec in _chosen(names):
        row = {"kernel": spec.name}
        rows.append(row)
        if not spec.source.hub:
            row["state"] = "not locked: packaged with tpu-kernels"
        elif spec.source.revision:
            row |= {"commit": spec.source.revision, "state": "not locked: its spec.toml names the commit"}
        else:
            try:
                row["commit"] = hub.newest_commit(spec)
            except hub.KernelLoadError as error:
                row["error"] = str(error)
            else:
                row["state"] = f"version {spec.source.version} of {spec.source.hub} locked in {output}"
                commits.append((spec.source, row["commit"]))
    if commits and not any("error" in row for row in rows):
        try:
            locks.write(output, commits)
        except hub.KernelLoadError as error:
            rows.append({"kernel": "", "error": str(error)})
    _show(rows, ("kernel", "commit", "state"), as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("list")(list_kernels)
    app.command()(prefetch)
    app.command()(lock)


def _chosen(names: list[str] | None) -> list[KernelSpec]:
    installed = {spec.name: spec for spec in load_specs()}
    chosen = []
    for name in names if names else installed:
        try:
            chosen.append(installed[name] if name in installed else read_spec(Path(name)))
        except SpecError as error:
            known = ", ".join(installed)
            raise typer.BadParameter(
                f"{name!r} is neither an installed kernel ({known}) nor a kernel folder: {error}"
            ) from error
    return chosen


def _show(rows: list[dict[str, str]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(row.get(column, "") for column in columns))
        if any(row.keys() != {"kernel", "error"} for row in rows):
            Console().print(table)
        for row in rows:
            if "error" in row:
                typer.echo(f"error: {row['error']}", err=True)
    raise typer.Exit(any("error" in row for row in rows))
