"""Figures of one run side by side: ratios, bars, verdicts; as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tpu_kernels.offdevice.targets import target as find_target

from .estimate import Figure
from .implementations import BASE, IMPLEMENTATIONS, OURS
from .shapes import Shape

# What this package's kernel must hold to on every shape, besides the table's own bars.
BUSY_IN_FULL_BLOCKS = 0.80
TEMPORARY_MIB = 1.0  # bounds of blocks are kilobytes; anything of q's or k's size is more
_BUSY_TARGETS = ("v6e", "tpu7x")
_BUSY_HEAD_SIZES = (128, 256)
DECODE_BYTES = 1.1
_SPLASHES = ("jax-splash", "tokamax-splash")


@dataclasses.dataclass(frozen=True)
class Check:
    """One bar: `value` must be at most `bar` (or at least, where `least`). `passed` is None where a figure is missing."""

    what: str
    value: float
    bar: float
    least: bool = False

    @property
    def passed(self) -> bool | None:
        if math.isnan(self.value):
            return None
        return self.value >= self.bar if self.least else self.value <= self.bar

    def __str__(self) -> str:
        relation = ">=" if self.least else "<="
        value = "-" if math.isnan(self.value) else f"{self.value:.3g}"
        return f"{self.what} {value} ({relation} {self.bar:.3g})"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One shape: the best figure of each implementation, and the bars of this package's kernel."""

    shape: Shape
    target: str
    figures: tuple[Figure, ...]

    def of(self, name: str) -> Figure | None:
        return next((each for each in self.figures if each.implementation == name), None)

    def seconds(self, name: str) -> float:
        """NaN where there is none."""
        figure = self.of(name)
        return math.nan if figure is None or figure.seconds is None else figure.seconds

    def ratio(self, figure: Figure) -> float:
        """To torch_tpu's SDPA at its best."""
        return math.nan if figure.seconds is None else figure.seconds / self.seconds(BASE)

    def checks(self) -> tuple[Check, ...]:
        """The bars; empty where this package's kernel was not asked for."""
        ours = self.of(OURS)
        if ours is None:
            return ()
        goal, shape = find_target(self.target), self.shape
        time = self.seconds(OURS)
        measured = ours.how != "static schedule"
        found = []
        if self.target in shape.bars:
            found.append(Check("time over SDPA's", self.ratio(ours), shape.bars[self.target]))
        if self.target in shape.peak:
            found.append(
                Check("share of peak", shape.flops / (time * goal.flops_per_second), shape.peak[self.target], least=True)
            )
        for name in _SPLASHES:
            if not math.isnan(self.seconds(name)):
                found.append(Check(f"time over {name}'s", time / self.seconds(name), 1.0))
        if measured:
            return tuple(found)
        known = math.nan if ours.seconds is None else 0.0
        if self.target in _BUSY_TARGETS and shape.head_dim in _BUSY_HEAD_SIZES and shape.sees in ("causal", "full"):
            found.append(
                Check("matrix units busy in full blocks", ours.block_busy + known, BUSY_IN_FULL_BLOCKS, least=True)
            )
        if shape.pass_ == "decode":
            found.append(Check("HBM bytes over the filled K and V's", ours.hbm_bytes / shape.kv_bytes + known, DECODE_BYTES))
        found.append(Check("temporary HBM, MiB", ours.temp_bytes / 2**20 + known, TEMPORARY_MIB))
        return tuple(found)


def compare(shapes: Iterable[Shape], target: str, figures: Sequence[Figure]) -> list[Comparison]:
    """The fastest candidate of each implementation on each shape; where none has a time, the first one's reason."""
    found = []
    for shape in shapes:
        best: dict[str, Figure] = {}
        for figure in figures:
            if figure.shape != shape.name:
                continue
            known = best.get(figure.implementation)
            if known is None or (figure.seconds or math.inf) < (known.seconds or math.inf):
                best[figure.implementation] = figure
        found.append(Comparison(shape, target, tuple(best.values())))
    return found


def table(comparisons: Sequence[Comparison], how: str) -> Table:
    """For a terminal."""
    target = comparisons[0].target if comparisons else ""
    made = Table(title=f"{target}, {how}", title_justify="left", box=None, pad_edge=False)
    made.add_column("shape", no_wrap=True)
    made.add_column("implementation", no_wrap=True)
    for heading in ("ms", "/ SDPA", "bar", "limit", "MXU", "block", "HBM MiB", "VMEM", "temp"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", overflow="fold")
    for index, comparison in enumerate(comparisons):
        if index:
            made.add_row()
        for row, figure in enumerate(comparison.figures):
            made.add_row(comparison.shape.name if row == 0 else "", *_cells(comparison, figure))
    return made


def missed(comparisons: Sequence[Comparison]) -> list[str]:
    """A line for each shape that misses bars."""
    found = {each.shape.name: [str(check) for check in each.checks() if check.passed is False] for each in comparisons}
    return [f"{name}: {'; '.join(checks)}" for name, checks in found.items() if checks]


def _cells(comparison: Comparison, figure: Figure) -> Iterator[str]:
    shape, goal = comparison.shape, find_target(comparison.target)
    yield figure.implementation
    if figure.seconds is None:
        yield from ["-", *[""] * 8, f"[dim]{_first_line(figure.error)}[/]"]
        return
    ratio = comparison.ratio(figure)
    yield f"{figure.seconds * 1e3:.3f}" + (f" ±{figure.spread:.0%}" if figure.spread else "")
    text = "" if math.isnan(ratio) else f"{ratio:.2f}"
    bar = shape.bars.get(comparison.target) if figure.implementation == OURS else None
    if bar is not None and text:
        text = f"[{'green' if ratio <= bar else 'red'}]{text}[/]"
    yield text
    yield f"{bar:.2f}" if bar is not None else ""
    yield f"{shape.least_seconds(goal) / figure.seconds:.0%}"
    if figure.how != "static schedule":
        yield from ["", "", "", "", ""]
    else:
        passes, cycles = figure.block
        yield f"{figure.matrix_busy:.0%}"
        yield f"{passes} x {cycles}, {figure.block_busy:.0%}"
        yield f"{figure.hbm_bytes / 2**20:.1f}"
        yield f"{figure.vmem_bytes / 2**20:.1f}"
        yield f"{figure.temp_bytes / 2**20:.1f}"
    yield ", ".join(filter(None, (figure.label, figure.note)))


def _first_line(text: str) -> str:
    from rich.markup import escape

    return escape(text.splitlines()[0][:100]) if text else ""


LEGEND = (
    "/ SDPA: time over torch_tpu SDPA's at its best. limit: the least possible time (matrix units and HBM at their peaks) "
    "over this one. MXU: matrix units busy. block: passes x cycles of a full block, and matrix units busy in it."
)


def verdict(comparisons: Sequence[Comparison]) -> tuple[int, int, int]:
    """(bars kept, missed, without a figure) over all shapes."""
    results = [check.passed for comparison in comparisons for check in comparison.checks()]
    return results.count(True), results.count(False), results.count(None)


def as_dict(comparisons: Sequence[Comparison], how: str, versions: dict[str, str | None]) -> dict[str, Any]:
    """JSON-able."""
    rows = []
    for comparison in comparisons:
        goal = find_target(comparison.target)
        figures = []
        for figure in comparison.figures:
            ratio = comparison.ratio(figure)
            limit = None if figure.seconds is None else comparison.shape.least_seconds(goal) / figure.seconds
            more = {"over_sdpa": None if math.isnan(ratio) else ratio, "share_of_limit": limit}
            figures.append(dataclasses.asdict(figure) | more)
        checks = [
            {
                "what": check.what,
                "value": None if math.isnan(check.value) else check.value,
                "bar": check.bar,
                "least": check.least,
                "passed": check.passed,
            }
            for check in comparison.checks()
        ]
        rows.append({"shape": dataclasses.asdict(comparison.shape), "figures": figures, "checks": checks})
    target = comparisons[0].target if comparisons else ""
    return {"target": target, "how": how, "versions": versions, "rows": rows}


def plot(comparisons: Sequence[Comparison], how: str, path: Path) -> None:
    """Time over SDPA's of each implementation, one group a shape, with this package's bars. Needs matplotlib."""
    from matplotlib.figure import Figure as Canvas

    names = [name for name in IMPLEMENTATIONS if any(each.of(name) for each in comparisons)]
    canvas = Canvas(figsize=(11, 0.4 + 0.16 * (len(names) + 2) * len(comparisons)), layout="constrained")
    axes = canvas.add_subplot()
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        ratios = [comparison.seconds(name) / comparison.seconds(BASE) for comparison in comparisons]
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(comparisons))]
        axes.barh(places, [0 if math.isnan(each) else each for each in ratios], width, label=name)
    for place, comparison in enumerate(comparisons):
        bar = comparison.shape.bars.get(comparison.target)
        if bar is not None:
            axes.plot([bar, bar], [place - 0.45, place + 0.45], color="black", linewidth=1.2)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(comparisons)), [each.shape.name for each in comparisons])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time over SDPA's (black: the bar of range-attention)")
    axes.legend(fontsize="small")
    axes.set_title(f"{comparisons[0].target if comparisons else ''}, {how}")
    canvas.savefig(path, dpi=120)
