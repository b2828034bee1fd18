"""How far the static schedule is from published times: `python benchmarks/calibration.py`.

tokamax publishes times of its attention kernel with the block sizes they were taken with. Each row of
`tokamax_times.csv` is compiled here with the same kernel and blocks, and estimated. tokamax must be importable:

    pip install tokamax==0.0.17

`tokamax_times.csv`: forward times without residuals, in bfloat16, from the autotuning tables in the wheel of tokamax
0.0.17 (Apache-2.0; data/autotuning/{tpu_v5,tpu_v6_lite,tpu7x}), per JAX device. Their jax and libtpu are not named.
"""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tpu_kernels.offdevice.aot import Array, FunctionJob
from tpu_kernels.offdevice.schedule import Estimator

HERE = Path(__file__).resolve().parent
TABLE = HERE / "tokamax_times.csv"


@dataclasses.dataclass(frozen=True)
class Published:
    """One published time, seconds, of q, k, v [batch, length, heads, head_dim]."""

    target: str
    batch: int
    length: int
    heads: int
    head_dim: int
    causal: bool
    seconds: float
    config: dict[str, int | bool]

    def job(self) -> FunctionJob:
        shape = (self.batch, self.length, self.heads, self.head_dim)
        static = {"causal": self.causal, **self.config}
        return FunctionJob(f"{HERE / 'peers.py'}:tokamax_attention", (Array("bfloat16", shape),) * 3, self.target, static)

    def __str__(self) -> str:
        blocks = "/".join(str(self.config[name]) for name in ("block_q", "block_kv", "block_kv_compute"))
        return (
            f"{self.target:5} B{self.batch:<3} S{self.length:<5} H{self.heads:<3} D{self.head_dim:<4}"
            f"{'causal' if self.causal else 'full':7} {blocks:15}"
        )


@dataclasses.dataclass(frozen=True)
class Compared:
    """A published time beside the estimate (None: refused, with the reason)."""

    row: Published
    seconds: float | None
    error: str

    @property
    def deviation(self) -> float:
        """Of the estimate, relative to the published time."""
        assert self.seconds is not None
        return self.seconds / self.row.seconds - 1


def published(path: Path = TABLE) -> list[Published]:
    """The rows of the table."""
    found = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            shape = {name: int(line.pop(name)) for name in ("batch", "length", "heads", "head_dim")}
            target, causal, milliseconds = (line.pop(name) for name in ("target", "causal", "milliseconds"))
            config: dict[str, int | bool] = {
                name: bool(int(value)) if name.startswith("use_") else int(value) for name, value in line.items()
            }
            found.append(
                Published(target=target, causal=causal == "1", seconds=float(milliseconds) / 1e3, config=config, **shape)
            )
    return found


def compare(rows: Iterable[Published]) -> Iterator[Compared]:
    """Estimate each row; two targets at a time, results in the order of the targets."""
    by_target: dict[str, list[Published]] = {}
    for row in rows:
        by_target.setdefault(row.target, []).append(row)

    def run(name: str) -> list[Compared]:
        with Estimator(name, timeout=400) as estimator:
            results = [(row, estimator.function(row.job())) for row in by_target[name]]
        return [Compared(row, result.seconds if result.ok else None, result.error) for row, result in results]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for results in pool.map(run, by_target):
            yield from results


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, without ties."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(index) for index in range(len(values))]

    return statistics.correlation(ranks(first), ranks(second))


def summary(results: Sequence[Compared]) -> tuple[float, float]:
    """(median of the absolute relative deviation, rank correlation) of the rows that have an estimate."""
    known = [each for each in results if each.seconds is not None]
    deviation = statistics.median(abs(each.deviation) for each in known)
    return deviation, rank_correlation([each.seconds or 0.0 for each in known], [each.row.seconds for each in known])


BLIND = (
    "Not seen: launch of the program, refresh and contention of HBM, misses of the instruction memory, clock throttling,\n"
    "the second core's load; clocks of v6e and tpu7x are inferred. jax and libtpu of the published times are others."
)


def report(results: Sequence[Compared]) -> str:
    """The table, the summary of each target, and of all."""
    lines = [f"{'':53} published ms   static schedule ms   deviation"]
    for each in results:
        if each.seconds is None:
            lines.append(f"{each.row!s:53} {each.row.seconds * 1e3:12.3f}   refused: {each.error[:60]}")
        else:
            lines.append(f"{each.row!s:53} {each.row.seconds * 1e3:12.3f} {each.seconds * 1e3:20.3f} {each.deviation:11.0%}")
    targets = dict.fromkeys(each.row.target for each in results)
    for name in (*targets, ""):
        mine = [each for each in results if not name or each.row.target == name]
        if sum(each.seconds is not None for each in mine) > 2:
            deviation, correlation = summary(mine)
            lines.append(
                f"{name or 'all':6} {len(mine)} rows: median deviation {deviation:.0%}, rank correlation {correlation:.2f}"
            )
    return "\n".join([*lines, BLIND])


def main() -> int:
    if importlib.util.find_spec("tokamax") is None:
        print("tokamax is not installed: pip install tokamax==0.0.17", file=sys.stderr)
        return 1
    results = []
    for each in compare(published()):
        results.append(each)
        print(each.row, "refused" if each.seconds is None else f"{each.seconds * 1e3:.3f} ms", file=sys.stderr, flush=True)
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
