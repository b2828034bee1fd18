"""What `tpu-kernels verify` prints: a table of checks, versions, and what one kernel may claim."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .verify import Claims, Report


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
