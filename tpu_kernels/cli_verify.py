"""What `tpu-kernels verify` shows: a table of checks, versions, what one kernel may claim; a plot; an HTML page of all."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .verify import Claims, Report, Result

# Exact results and those that are not finite have no place on a logarithmic axis: they are drawn at its ends.
_LEAST, _MOST = 1e-9, 1.0


def tables(report: Report) -> tuple[RenderableType, ...]:
    """The report for a terminal."""
    subject = f" {report.kernel}" if report.kernel else ""
    table = Table(title=f"tpu-kernels verify{subject}, {report.what}", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "kind", "check", "error", "allowed", "SDPA", "detail"):
        table.add_column(heading, overflow="fold")
    counts = {"pass": 0, "FAIL": 0, "refused": 0}
    for result in report.results:
        numbers = ("" if math.isnan(x) else f"{x:.1e}" for x in (result.error, result.allowed, result.sdpa_error))
        mark, colour = ("refused", "yellow") if result.refused else ("pass", "green") if result.passed else ("FAIL", "red")
        counts[mark] += 1
        table.add_row(f"[{colour}]{mark}[/]", result.group, escape(result.name), *numbers, escape(result.detail))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    refused = f", {counts['refused']} refused" if report.kernel else ""
    summary = f"{counts['pass']} passed, {counts['FAIL']} failed{refused}, {report.what}"
    if report.claims is None:
        return table, versions, summary
    return table, versions, summary, _claims(report.claims, report)


def _claims(claims: Claims, report: Report) -> Group:
    """As lines for spec.toml."""
    lines = [f"dtypes = [{_quoted(claims.dtypes)}]", f"masks = [{_quoted(claims.masks)}]",
             f"max_head_dim = {claims.max_head_dim}", *([] if claims.any_length else ["length_multiple = 128"])]  # fmt: skip
    for name in ("gqa", "v_head_dim_may_differ", "softcap", "sinks", "gradients"):
        lines.append(f"{name} = {'true' if getattr(claims, name) else 'false'}")
    if not claims.dtypes:
        return Group(f"{report.kernel} may claim nothing.")
    proved = [f"{report.kernel} may claim ({report.what}), as far as these checks go:", *(f"  {line}" for line in lines)]
    if claims.unproved:
        proved.append(f"declared, but not proved here: {', '.join(claims.unproved)}")
    return Group(*map(escape, proved))


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def draw(report: Report, path: Path) -> None:
    """A plot of the errors by shape, to a file whose suffix says of which kind (needs matplotlib)."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tpu-kernels", "svg.fonttype": "none"}):
        metadata: Any = {"Date": None} if path.suffix == ".svg" else None
        _figure(report).savefig(path, dpi=120, metadata=metadata)


def write_html(report: Report, path: Path) -> None:
    """The report as one HTML file: the table, and the plot (needs matplotlib)."""
    recorded = Console(record=True, file=io.StringIO(), width=140)
    recorded.print(*tables(report), sep="\n")
    picture = io.BytesIO()
    _figure(report).savefig(picture, format="png", dpi=120)
    image = f'<img alt="errors by shape" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
    path.write_text(recorded.export_html().replace("</body>", f"{image}</body>"), encoding="utf-8")


def _figure(report: Report) -> Figure:
    """Largest error of each parity check, of the kernel and of SDPA, and what is allowed; one panel a dtype."""
    from matplotlib.figure import Figure

    checked = [result for result in report.results if result.group == "parity" and not result.refused]
    panels = {dtype: [each for each in checked if each.dtype == dtype] for dtype in ("float32", "bfloat16")}
    panels = {dtype: sorted(results, key=_size) for dtype, results in panels.items() if results}
    figure = Figure(figsize=(9, 1.6 + 0.21 * len(checked)), layout="constrained")
    subject = f" {report.kernel}" if report.kernel else ""
    figure.suptitle(f"tpu-kernels verify{subject}, {report.what}")
    heights = [len(results) for results in panels.values()] or [1]
    for axes, (dtype, results) in zip(
        figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0], panels.items(), strict=False
    ):
        rows = range(len(results))
        allowed = [_drawn(each.allowed) for each in results]
        axes.hlines(rows, _LEAST, allowed, color="0.85", linewidth=6, zorder=1, label="allowed")
        axes.scatter([_drawn(each.error) for each in results], rows, marker="o", label="kernel", zorder=2,
                     color=["tab:blue" if each.passed else "tab:red" for each in results])  # fmt: skip
        axes.scatter([_drawn(each.sdpa_error) for each in results], rows, marker="x", color="black", label="SDPA", zorder=3)
        failed = ("" if each.passed else "FAILED: " for each in results)
        labels = [f"{mark}{each.name}   {each.shape}" for mark, each in zip(failed, results, strict=True)]
        axes.set_yticks(rows, labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(_LEAST / 2, _MOST * 2)
        axes.set_title(f"{dtype}: largest error against float64", fontsize=9)
        axes.grid(axis="x", alpha=0.3)
    if panels:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize=8)
    return figure


def _size(result: Result) -> tuple[Any, ...]:
    """Head size, then queries and keys, read from the shape."""
    *_, lengths, dims = result.shape.split()
    return int(dims[1:].split("/")[0]), *(int(each) for each in lengths.split("x"))


def _drawn(error: float) -> float:
    return _MOST if math.isnan(error) else min(max(error, _LEAST), _MOST)
