"""The command `tpu-kernels`: what is installed, whether it fits together, and what a TPU would do with it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import cli_hub

app = typer.Typer(
    name="tpu-kernels",
    help="TPU attention kernels for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def doctor(
    as_json: Json = False,
    load: Annotated[bool, typer.Option(help="Also load each kernel, which imports jax.")] = True,
) -> None:
    """Say whether the installed versions fit together, with a remedy for each problem. Exit code 1 if there is one."""
    from .doctor import examine

    findings = examine(load_kernels=load)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "what", "found, and what to do"):
            table.add_column(heading, overflow="fold")
        for finding in findings:
            text = escape(finding.found) + (f"\n-> {escape(finding.remedy)}" if finding.remedy else "")
            table.add_row(_MARKS[finding.level], finding.subject, text)
        Console().print(table)
    raise typer.Exit(any(finding.level == "problem" for finding in findings))


@app.command("list")
def list_kernels(as_json: Json = False) -> None:
    """Show the installed kernels: functions, what they can do, and where they come from."""
    from .specs import load_specs

    specs = load_specs()
    if as_json:
        print(json.dumps([dataclasses.asdict(spec) for spec in specs], indent=2, default=str))
        return
    console = Console()
    for spec in specs:
        can = spec.capabilities
        table = Table(title=f"{spec.name}, version {spec.version}", title_justify="left", show_header=False, box=None)
        features = {
            "GQA": can.gqa, "softcap": can.softcap, "sinks": can.sinks, "Dv != D": can.v_head_dim_may_differ,
            "gradients": can.gradients, "dropout": can.dropout, "position bias": can.position_bias,
        }  # fmt: skip
        table.add_row("", spec.summary)
        table.add_row("functions", ", ".join(function.name for function in spec.functions))
        table.add_row("does", ", ".join(name for name, able in features.items() if able))
        table.add_row("does not", ", ".join(name for name, able in features.items() if not able))
        table.add_row("masks", ", ".join(can.masks))
        table.add_row("dtypes", f"{', '.join(can.dtypes)}; head dimensions to {can.max_head_dim}")
        table.add_row("TPU", ", ".join(can.generations))
        source = spec.source
        pin = source.revision or (f"version {source.version}" if source.version else "")
        table.add_row("source", f"{source.hub} at {pin}" if source.hub else f"packaged copy, {spec.folder}")
        console.print(table)


cli_hub.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
