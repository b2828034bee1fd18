"""The table of shapes and what each needs at least."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import shapes
from tpu_kernels.offdevice.targets import TARGETS


def test_the_table_has_every_kind_of_call():
    table = shapes.load()
    assert {each.sees for each in table.values()} == {"causal", "full", "window", "documents", "filled"}
    assert {each.pass_ for each in table.values()} == {"forward", "decode", "training"}
    assert {name for each in table.values() for name in each.bars} == {"v5e", "v6e", "tpu7x"}
    assert all(each.bars or each.peak for each in table.values())


@pytest.mark.parametrize("name", shapes.load())
def test_ranges_are_what_the_kind_says(name):
    shape = shapes.load()[name]
    starts, ends = shape.ranges()
    row = min(1000, shape.q_len - 1)
    seen = [key for key in range(shape.kv_len) if starts[row] <= key < ends[row]]
    expected = {
        "causal": lambda key: key <= row,
        "full": lambda key: True,
        "window": lambda key: row - shape.window < key <= row,
        "documents": lambda key: key <= row and key // (shape.document or 1) == row // (shape.document or 1),
        "filled": lambda key: key < shape.filled,
    }[shape.sees]
    assert seen == [key for key in range(shape.kv_len) if expected(key)]
    assert starts.dtype == ends.dtype == np.int32 and starts.shape == (shape.q_len,)


def test_least_work():
    small = {"name": "x", "q_heads": 4, "kv_heads": 2, "q_len": 256, "kv_len": 256, "head_dim": 128, "v_head_dim": 128}
    full = shapes.Shape(**small, sees="full")
    assert full.pairs == 4 * 256 * 256
    assert full.flops == 4 * full.pairs * 128
    v5e, v6e = TARGETS["v5e"], TARGETS["v6e"]
    # 128 fills v5e's matrix unit and half of v6e's.
    assert full.matrix_seconds(v5e) == pytest.approx(full.flops / v5e.flops_per_second)
    assert full.matrix_seconds(v6e) == pytest.approx(2 * full.flops / v6e.flops_per_second)
    assert full.least_bytes == 2 * (2 * 4 + 2 * 2) * 256 * 128
    training = shapes.Shape(**small, sees="causal", pass_="training")
    assert training.flops == pytest.approx(3.5 * 4 * training.pairs * 128)
    assert training.least_bytes == 2 * full.least_bytes
    cache = shapes.Shape(**(small | {"q_len": 1, "kv_len": 1024}), sees="filled", filled=512, pass_="decode", batch=3)
    assert cache.kv_bytes == 3 * 2 * 512 * 256 * 2
    assert cache.least_seconds(v6e) == pytest.approx(cache.least_bytes / v6e.hbm_bytes_per_second)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('sees = "diagonal"', "x: sees is 'diagonal'; it must be one of"),
        ('sees = "window"', 'x: window = 0 does not go with sees = "window"'),
        ('sees = "causal"\nfilled = 3', 'x: filled = 3 does not go with sees = "causal"'),
        ('sees = "causal"\npass = "backward"', "x: pass is 'backward'"),
        ('sees = "causal"\nkv_heads = 3', "x: 4 query heads are not a multiple of 3 KV heads"),
        ('sees = "causal"\nbars = { v9 = 0.5 }', "x: v9 is no TPU generation"),
        ('sees = "filled"\nfilled = 65', "x: filled = 65 is more than kv_len = 64"),
        ('sees = "causal"\nheads = 3', "x: .*heads"),
        ('sees = "causal"\nbatch = 0', "x: batch is 0"),
    ],
)
def test_rows_that_make_no_sense_are_named(tmp_path, line, message):
    path = tmp_path / "shapes.toml"
    path.write_text(f"[x]\nq_heads = 4\nq_len = 64\nhead_dim = 32\n{line}\n")
    with pytest.raises(shapes.ShapeError, match=message):
        shapes.load(path)
    path.write_text('[x]\nq_heads = 4\nq_len = 64\nhead_dim = 32\nsees = "causal"\n')
    assert shapes.load(path)["x"].kv_heads == 4
