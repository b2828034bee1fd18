"""The command `tpu-kernels`: what is installed, whether it fits together, and what a TPU would do with it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import cli_hub, cli_plan, cli_verify
from .cli_pictures import PICTURES, check_picture
from .specs import SpecError

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
    """Say whether the installed versions fit together, with a remedy for each problem. Exit code 1 if there is one.

    Example: tpu-kernels doctor --json | jq '.[] | select(.level == "problem")'
    """
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


cli_hub.register(app)
app.command()(cli_plan.plan)


@app.command()
def verify(
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="[KERNEL]",
            help="Check this kernel alone: an installed one, a kernel folder, or a Hub repository ORG/REPO[@vN or @COMMIT].",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead of a table; keep it by: --json > report.json")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report, with a plot, to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the errors by shape to this file (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Check kernels on this machine's TPU, or emulated on CPU: numbers, invariances, known answers.

    Exit code 1 if a check fails, or if the named kernel takes none of the calls. With a kernel named, calls that its
    spec.toml does not promise are refused and not checked, and the report ends with what the kernel may claim. A Hub
    repository is loaded only if its publisher is trusted, or allowed by TPU_KERNELS_TRUST.

    Example: tpu-kernels verify my-kernel/ --html report.html
    """
    if kernel.endswith((".json", ".html", *PICTURES)):
        raise typer.BadParameter(
            f"{kernel} is read as the name of a kernel. --json takes no file: tpu-kernels verify --json > report.json. "
            "Other files have options of their own: --html FILE, --plot FILE.",
            param_hint="[KERNEL]",
        )
    check_picture(html, "--html", (".html", ".htm"))
    check_picture(plot, "--plot")
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from . import hub, lookup
    from .verify import checks, find_device
    from .verify import verify as run

    device, what = find_device()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        spec = lookup.find(kernel) if kernel else None
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"Checking, {what}", total=checks(device))
            report = run(
                lambda result: progress.update(task, advance=1, description=f"Checking, {what}: {result.name}"), spec
            )
    except (SpecError, hub.KernelLoadError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        print(report.to_json())
    else:
        Console().print(*cli_verify.tables(report), sep="\n")
    if html is not None:
        cli_verify.write_html(report, html)
    if plot is not None:
        cli_verify.draw(report, plot)
    raise typer.Exit(not report.passed)


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and dashes.")],
    org: Annotated[str, typer.Option(help="The Hub organisation or user that will publish the kernel.")] = "",
    folder: Annotated[Path, typer.Option(help="Where to make the kernel's folder.")] = Path("."),
) -> None:
    """Write a new kernel folder with a small right Pallas kernel in it, to be changed from there.

    It passes `tpu-kernels verify` as it is. Nothing that exists is overwritten. docs/publish-a-kernel.md goes on from here.

    Example: tpu-kernels init my-attention --org my-org && tpu-kernels verify my-attention/
    """
    from .scaffold import ScaffoldError, write_kernel

    try:
        made = write_kernel(name, folder, org)
    except (ScaffoldError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{made}\nnext: tpu-kernels verify {made}/")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SpecError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
