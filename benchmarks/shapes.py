"""The table of shapes (shapes.toml), and what each shape needs at least, whoever computes it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from tpu_kernels.offdevice.targets import TARGETS, Target

TABLE = Path(__file__).with_name("shapes.toml")
ITEM_BYTES = 2  # bfloat16


class ShapeError(ValueError):
    """A row of the table that makes no sense; names the row and the field."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention call: q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v likewise with
    v_head_dim, in bfloat16. The fields are those of shapes.toml."""

    name: str
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    sees: Literal["causal", "full", "window", "documents", "filled"]
    pass_: Literal["forward", "decode", "training"] = "forward"
    batch: int = 1
    window: int = 0
    document: int = 0
    filled: int = 0
    sinks: bool = False
    bars: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peak: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        def refuse(what: str) -> None:
            raise ShapeError(f"{self.name}: {what}")

        if self.pass_ not in ("forward", "decode", "training"):
            refuse(f"pass is {self.pass_!r}; it must be forward, decode or training")
        needs = {"window": "window", "documents": "document", "filled": "filled", "causal": "", "full": ""}
        if self.sees not in needs:
            refuse(f"sees is {self.sees!r}; it must be one of {', '.join(needs)}")
        for name in ("window", "document", "filled"):
            if (getattr(self, name) > 0) != (name == needs[self.sees]):
                refuse(f'{name} = {getattr(self, name)} does not go with sees = "{self.sees}"')
        for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                refuse(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.q_heads % self.kv_heads:
            refuse(f"{self.q_heads} query heads are not a multiple of {self.kv_heads} KV heads")
        if self.filled > self.kv_len:
            refuse(f"filled = {self.filled} is more than kv_len = {self.kv_len}")
        for name in {*self.bars, *self.peak} - TARGETS.keys():
            refuse(f"{name} is no TPU generation; known: {', '.join(TARGETS)}")

    @property
    def plain(self) -> bool:
        """Whether is_causal alone says which keys are seen: no mask is needed."""
        return self.sees in ("causal", "full") or (self.sees == "filled" and self.filled == self.kv_len)

    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Row r sees keys starts[r] <= k < ends[r]: two int32 [q_len]."""
        rows = np.arange(self.q_len, dtype=np.int32)
        starts, ends = np.zeros_like(rows), rows + 1
        if self.sees == "full":
            ends = np.full_like(rows, self.kv_len)
        elif self.sees == "filled":
            ends = np.full_like(rows, self.filled)
        elif self.sees == "window":
            starts = np.maximum(rows + 1 - self.window, 0)
        elif self.sees == "documents":
            starts = rows // self.document * self.document
        return starts, np.minimum(ends, self.kv_len)

    @property
    def pairs(self) -> int:
        """Query-key pairs that are seen, over all query heads."""
        starts, ends = self.ranges()
        return self.batch * self.q_heads * int((ends - starts).sum(dtype=np.int64))

    @property
    def flops(self) -> float:
        """Floating-point operations of the products, on seen pairs only. The backward pass has five to forward's two:
        the scores again, and the gradients of v, of the weights, of q and of k."""
        d, dv = self.head_dim, self.v_head_dim
        products = 4 * d + 3 * dv if self.pass_ == "training" else d + dv
        return 2.0 * self.pairs * products

    def matrix_seconds(self, target: Target) -> float:
        """What the products need on matrix units alone that are always busy, head sizes filled up to their width.

        A product whose contraction or result is head_dim wide takes whole passes of the unit's width.
        """
        d, dv = (-(-size // target.mxu_width) for size in (self.head_dim, self.v_head_dim))
        passes = 4 * d + 3 * dv if self.pass_ == "training" else d + dv
        pairs_per_cycle = target.mxu_width * target.mxus * target.mxu_rows_per_cycle * target.cores
        return self.pairs * passes / pairs_per_cycle / target.clock_hz

    @property
    def kv_bytes(self) -> int:
        """K and V of every slot that some row sees, once."""
        starts, ends = self.ranges()
        seen = int(ends.max()) - int(starts.min())
        return self.batch * self.kv_heads * seen * (self.head_dim + self.v_head_dim) * ITEM_BYTES

    @property
    def least_bytes(self) -> int:
        """Every input read and every output written once."""
        rows = self.batch * self.q_heads * self.q_len * ITEM_BYTES
        q, out = rows * self.head_dim, rows * self.v_head_dim
        if self.pass_ == "training":  # q, k, v, dout in; out, dq, dk, dv out
            return 2 * q + 2 * out + 2 * self.kv_bytes
        return q + out + self.kv_bytes

    def least_seconds(self, target: Target) -> float:
        """No implementation can be faster: matrix units and HBM at their peak, side by side."""
        return max(self.matrix_seconds(target), self.least_bytes / target.hbm_bytes_per_second)


def load(path: Path = TABLE) -> dict[str, Shape]:
    """The table, by name. Raises ShapeError for a row that makes no sense."""
    found = {}
    for name, fields in tomllib.loads(path.read_text(encoding="utf-8")).items():
        fields = {"pass_" if key == "pass" else key: value for key, value in fields.items()}
        for key, default in (("kv_heads", "q_heads"), ("kv_len", "q_len"), ("v_head_dim", "head_dim")):
            if default in fields:
                fields.setdefault(key, fields[default])
        try:
            found[name] = Shape(name=name, **fields)
        except TypeError as error:
            raise ShapeError(f"{name}: {error}") from None
    return found
