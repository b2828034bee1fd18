"""`tpu-kernels plan`: what a TPU would do with a model's attention, without the TPU and without the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .cli_pictures import check_picture

if TYPE_CHECKING:
    from .offdevice.plan import Plan, Row


def plan(
    model: Annotated[
        str, typer.Argument(help="A folder with a config.json, such a file, or a repository on the Hub.", show_default=False)
    ],
    target: Annotated[str, typer.Option(help="TPU generation: v4, v5e, v5p, v6e or tpu7x.")] = "v6e",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated after it.")] = 512,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.", show_default="the configuration's")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the time of each layer, beside SDPA, to this file.")] = None,
) -> None:
    """Say which kernel each attention call of a model would run on, whether it compiles for a TPU generation, in what
    memory, and how long it takes by the compiler's schedule, beside SDPA. Exit code 1 if something does not compile.

    Example: tpu-kernels plan Qwen/Qwen3-0.6B --target v6e --batch 8 --prompt 4096
    """
    from .offdevice.plan import PlanError, make_plan, read_config
    from .offdevice.targets import UnknownTargetError

    check_picture(plot, "--plot")
    progress = Console(stderr=True)
    try:
        config = read_config(model)
        with progress.status("starting") as status:

            def tell(text: str) -> None:
                status.update(escape(text))
                progress.print(f"[dim]{escape(text)}[/]")

            made = make_plan(
                config, target=target, batch=batch, prompt=prompt, new_tokens=new_tokens, dtype=dtype, progress=tell
            )
    except (PlanError, UnknownTargetError) as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print(json.dumps(made.as_dict(), indent=2))
    else:
        _print(made, Console())
    if plot is not None:
        _draw(made, plot)
    raise typer.Exit(not made.ok)


def _print(made: Plan, console: Console) -> None:
    console.print(
        f"[bold]{escape(made.model)}[/] on {made.target}: batch {made.batch}, prompt {made.prompt}, {made.new_tokens} new "
        f"tokens, {made.dtype}; decode with {made.decode_position} tokens in the cache. Times are static schedules, "
        "not measurements."
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    for heading in ("call", "route"):
        table.add_column(heading, overflow="fold")
    for heading in ("ms", "SDPA ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(made.rows):
        if index:
            table.add_row()
        sees = row.sees + (", softcap" if row.softcap else "") + (", sinks" if row.sinks else "")
        sizes = [f"q {_shape(row.query)}", f"k {_shape(row.key)}"] + ([f"v {_shape(row.value)}"] * (row.value != row.key))
        route = f"[green]{row.route}[/]" if row.on_kernel else f"[yellow]{row.route}[/] ({row.reason})"
        compiles = "compiles" if row.compiled else "[red]does not compile[/]"
        table.add_row(
            row.phase,
            f"{escape(layers_in_short(row.layers))}\n{', '.join(sizes)}\nsees {sees}",
            f"{route}\n{compiles}\nVMEM {_mib(row.vmem_bytes)}, temp {_mib(row.temp_bytes)}",
            _ms(row.seconds),
            f"{_ms(row.sdpa_seconds)}\ntemp {_mib(row.sdpa_temp_bytes)}",
        )
    if made.rows:
        console.print(table)
    for phase, what in (("prefill", "attention of a prefill"), ("decode", "attention of one token")):
        ours, theirs = made.total(phase), made.total(phase, sdpa=True)
        if ours is not None and theirs is not None:
            console.print(f"{what}: {_ms(ours)} ms, with SDPA {_ms(theirs)} ms ({ours / theirs:.2f})")
    for row in made.rows:
        name = f"{row.phase}, {escape(layers_in_short(row.layers))}"
        if not row.on_kernel:
            console.print(f"{name}: {escape(row.sentence)} {escape(row.remedy)}")
        if row.error:
            console.print(f"{name}: {'no estimate' if row.compiled else 'does not compile'}: {escape(row.error[:1000])}")
        if row.sdpa_error and row.on_kernel:
            console.print(f"{name}: no figure for SDPA: {escape(row.sdpa_error[:300])}")
    for note in made.notes:
        console.print(f"note: {escape(note)}")
    for failure in made.failures:
        console.print(f"[red]not traced[/]: {escape(failure[:2000])}")


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}\N{NO-BREAK SPACE}MiB"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def layers_in_short(names: Sequence[str]) -> str:
    """How many, and names that differ in one number drawn together: "28: model.layers.0-27.self_attn"."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.search(r"(?<=\.)\d+(?=\.)", name)
        if match is None:
            groups.setdefault((name, ""), [])
        else:
            groups.setdefault((name[: match.start()], name[match.end() :]), []).append(int(match.group()))
    parts = []
    for (start, end), numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        drawn = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        parts.append(f"{start}{drawn}{end}")
    return f"{len(names)}: {', '.join(parts)}"


def _draw(made: Plan, path: Path) -> None:
    """Time of each layer's attention, on its route and with SDPA, one panel a phase."""
    from matplotlib.figure import Figure

    phases = [phase for phase in ("prefill", "decode") if any(row.phase == phase for row in made.rows)]
    figure = Figure(figsize=(10, 3.2 * max(len(phases), 1)), layout="constrained")
    figure.suptitle(f"{made.model} on {made.target}, batch {made.batch}: attention by layer (static schedule)")
    for index, phase in enumerate(phases):
        axes = figure.add_subplot(len(phases), 1, index + 1)
        layers: list[tuple[str, Row]] = [(name, row) for row in made.rows if row.phase == phase for name in row.layers]
        layers.sort(key=lambda pair: [int(part) if part.isdigit() else -1 for part in pair[0].split(".")])
        for offset, label, times in (
            (-0.2, "tpu_attention", [row.seconds for _, row in layers]),
            (0.2, "SDPA", [row.sdpa_seconds for _, row in layers]),
        ):
            axes.bar(
                [place + offset for place in range(len(layers))], [1e3 * (time or 0.0) for time in times], 0.4, label=label
            )
        axes.set_title(phase if phase == "prefill" else f"decode, {made.decode_position} tokens in the cache")
        axes.set_ylabel("ms a layer")
        axes.set_xlabel("layer")
        if index == 0:
            figure.legend(loc="outside upper right")
    figure.savefig(path, dpi=120)
