"""`python -m benchmarks`: attention kernels side by side."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import estimate, report, shapes
from .estimate import Task
from .implementations import IMPLEMENTATIONS, OURS, version

app = typer.Typer(
    name="benchmarks",
    help="Attention kernels side by side, in one run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
VERSIONS = ("jax", "libtpu", "torch", "torch_tpu", "transformers", "tokamax")
Patterns = Annotated[list[str] | None, typer.Option("--shape", help="Names or patterns (causal-*); all by default.")]


@app.command("shapes")
def list_shapes() -> None:
    """Show the table of shapes."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "pass", "batch", "heads", "Q", "KV", "D", "sees", "bars"):
        made.add_column(heading)
    for each in shapes.load().values():
        sees = each.sees + (f" {size}" if (size := each.window or each.document or each.filled) else "")
        made.add_row(
            each.name, each.pass_, str(each.batch), f"{each.q_heads}/{each.kv_heads}", str(each.q_len), str(each.kv_len),
            str(each.head_dim) + (f"/{each.v_head_dim}" if each.v_head_dim != each.head_dim else ""),
            sees + (", sinks" if each.sinks else ""), ", ".join(f"{name} {bar}" for name, bar in each.bars.items()),
        )  # fmt: skip
    Console(width=160).print(made)


@app.command()
def speed(
    target: Annotated[
        str, typer.Option(help="Estimate for this generation (v4, v5e, v5p, v6e, tpu7x); the attached TPU is timed without.")
    ] = "",
    shape: Patterns = None,
    impl: Annotated[list[str] | None, typer.Option("--impl", help="Names or patterns; all by default.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw times over SDPA's to this file.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of results.", show_default="the package's cache")] = None,
    anew: Annotated[bool, typer.Option(help="Estimate also what the cache knows.")] = False,
) -> None:
    """Compare implementations on each shape: estimated for a TPU generation by the compiler's schedule, or timed on
    the attached TPU. Exit code 1 if a bar of range-attention is missed.

    Example: python -m benchmarks speed --target v6e --shape 'causal-*' --impl range-attention --impl sdpa
    """
    chosen = [shapes.load()[name] for name in _matching(shape, shapes.load(), "--shape")]
    names = _matching(impl, IMPLEMENTATIONS, "--impl")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("the plot needs matplotlib: pip install 'tpu-kernels[plot]'", param_hint="--plot")
    for path, option in ((as_json, "--json"), (plot, "--plot")):
        if path is not None and not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"{path.resolve().parent} is not a folder", param_hint=option)
    _without_torch_tpu(target)
    goal = _goal(target) if target else _attached()
    todo = estimate.tasks(chosen, [IMPLEMENTATIONS[name] for name in names], goal)
    figures = _run_estimates(todo, goal, cache, anew=anew) if target else _run_timing(todo)
    how = next((figure.how for figure in figures if figure.seconds is not None), estimate.STATIC_SCHEDULE)
    compared = report.compare(chosen, goal, figures)
    console = Console(width=max(Console().width, 170))
    console.print(report.table(compared, how))
    console.print(report.LEGEND)
    for line in report.missed(compared):
        console.print(f"[red]missed[/] {escape(line)}")
    kept, missed, unknown = report.verdict(compared)
    if kept + missed + unknown:
        console.print(f"{OURS}: {kept} bars kept, {missed} missed, {unknown} without a figure.")
    console.print(f"{how}, {_versions()}")
    if as_json is not None:
        made = report.as_dict(compared, how, {name: version(name) for name in VERSIONS})
        as_json.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        report.plot(compared, how, plot)
    raise typer.Exit(missed > 0)


@app.command()
def tune(
    target: Annotated[
        str, typer.Option(help="Search for this generation by the compiler's schedule; the attached TPU measures without.")
    ] = "",
    shape: Patterns = None,
    out: Annotated[
        Path | None, typer.Option(help="The table to write to.", show_default="tuning.toml beside the kernel's spec.toml")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of results.", show_default="the package's cache")] = None,
) -> None:
    """Search block sizes of range-attention that beat the kernel's own choice, and write them into its table.

    Shapes of one class and lengths get one row. Shapes of no class that the table can have are passed over. A search that
    was stopped goes on where it was.

    Example: python -m benchmarks tune --target v6e --shape 'causal-*' --shape 'decode-*'
    """
    _without_torch_tpu(target)
    import datetime

    from tpu_kernels.tuning import TABLE, Call

    from . import tune as search

    table = out or IMPLEMENTATIONS[OURS].spec().folder / TABLE
    console = Console()
    goal = _goal(target) if target else _attached()
    classes: dict[Call, list[shapes.Shape]] = {}
    for name in _matching(shape, shapes.load(), "--shape"):
        try:
            classes.setdefault(search.call_of(shapes.load()[name]), []).append(shapes.load()[name])
        except search.CannotTuneError as error:
            console.print(f"passed over: {escape(str(error))}")
    if not classes:
        raise typer.BadParameter("none of these shapes can be tuned", param_hint="--shape")
    for alike in classes.values():
        results = []
        for each in alike:
            todo = search.tasks(each, goal)
            figures = _run_estimates(todo, goal, cache, anew=False) if target else _run_timing(todo)
            results.append(list(zip(todo, figures, strict=True)))
        names = ", ".join(each.name for each in alike)
        row = search.best(goal, results, datetime.date.today())
        if row is None:
            console.print(f"[red]{names}: the kernel's own choice gives no time[/]: {escape(results[0][0][1].error[:200])}")
            continue
        search.write(table, row)  # at once: a search takes long
        gain = 1 - row.milliseconds / row.untuned_milliseconds
        sizes = f"q {row.block_q}, kv {row.block_kv}, {gain:.0%} less than" if row.block_q or row.block_kv else "as good as"
        console.print(f"{names}: {row.milliseconds} ms, {sizes} the kernel's own choice")


@app.command()
def host(
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    target: Annotated[str, typer.Option(help="Generation that first calls are made for.")] = "v6e",
) -> None:
    """Measure what an eager call costs the host with the kernel stubbed, part by part, beside transformers' sdpa, and
    the first call of a shape. Exit code 1 if the bar is missed."""
    _without_torch_tpu(target)
    from . import host

    costs = host.measure()
    first = host.first_call(target)
    console = Console()
    made = Table(title="host time of one eager call on CPU, median", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "us", "bar"):
        made.add_column(heading, justify="left" if not heading else "right")
    for cost in costs:
        late = cost.bar and cost.microseconds > cost.bar
        text = f"{cost.microseconds:.1f}"
        made.add_row(cost.what, f"[red]{text}[/]" if late else text, f"{cost.bar:.0f}" if cost.bar else "")
    console.print(made)
    for shape, stages in first:
        told = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items())
        console.print(f"first call of q {shape}, by torch_tpu for {target}, without a TPU: {told}")
    if as_json is not None:
        rows = {"costs": [dataclasses.asdict(cost) for cost in costs], "first_call": dict(first)}
        as_json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(any(cost.bar and cost.microseconds > cost.bar for cost in costs))


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in VERSIONS if version(name))


def _matching(patterns: list[str] | None, names: Iterable[str], option: str) -> list[str]:
    names = list(names)
    if not patterns:
        return names
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise typer.BadParameter(f"{pattern!r} matches none of {', '.join(names)}", param_hint=option)
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _without_torch_tpu(target: str) -> None:
    """With a target no device is used: torch need not start torch_tpu, which looks for one."""
    if target:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _goal(target: str) -> str:
    from tpu_kernels.offdevice.targets import UnknownTargetError
    from tpu_kernels.offdevice.targets import target as find_target

    try:
        return find_target(target).name
    except UnknownTargetError as error:
        raise typer.BadParameter(str(error), param_hint="--target") from None


def _attached() -> str:
    from tpu_kernels.tuning import attached_chip, generation

    if not attached_chip():
        raise typer.BadParameter("no TPU is attached: name a generation to estimate for", param_hint="--target")
    return generation()


def _run_estimates(todo: list[Task], goal: str, folder: Path | None, *, anew: bool) -> list[report.Figure]:
    cache = estimate.Cache(folder or estimate.Cache.default_folder())
    progress = Console(stderr=True)
    figures = []
    with progress.status("") as status:
        results = estimate.run(todo, goal, cache, estimator=estimate.Estimator, anew=anew)
        for number, task in enumerate(todo, 1):
            status.update(escape(f"{number}/{len(todo)} {task}: compiling for {goal}"))
            _, figure, known = next(results)
            figures.append(figure)
            outcome = f"{figure.seconds * 1e3:.3f} ms" if figure.seconds is not None else figure.error.splitlines()[0][:100]
            progress.print(f"[dim]{number}/{len(todo)} {escape(f'{task}: {outcome}')}{' (known)' * known}[/]")
    return figures


def _run_timing(todo: list[Task]) -> list[report.Figure]:
    from . import device

    with Console(stderr=True).status("") as status:
        return list(device.run(todo, progress=lambda text: status.update(escape(text))))


if __name__ == "__main__":
    app()
