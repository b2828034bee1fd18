"""Tables of block sizes: reading them, and the row that a call takes."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels import attention, tuning
from tpu_kernels.specs import load_specs, packaged_specs_dir
from tpu_kernels.tuning import Call, Row, Tuning, TuningError, load_table, nearest

CALL = Call("forward", "bfloat16", "causal", 128, 128, 4096, 4096)


def row(block_q=256, generation="v6e", **changes) -> Row:
    call = dataclasses.replace(CALL, **changes)
    return Row(generation, call, block_q, 1024, 1.0, 2.0, "static schedule", "libtpu 0.0.52", "abc", "2026-12-02")


def text(**changes) -> str:
    fields = {"generation": "v6e", **dataclasses.asdict(CALL), "block_q": 256, "block_kv": 1024}
    fields |= {"milliseconds": 1.0, "untuned_milliseconds": 2.0, "how": "static schedule", "compiler": "x"}
    fields |= {"kernel": "y", "date": "z"} | changes
    lines = [f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in fields.items()]
    return "[[row]]\n" + "\n".join(line for line in lines if not line.endswith("None")) + "\n"


def test_the_row_of_the_class_with_the_nearest_lengths_is_taken():
    rows = (row(1, rows=1024, kv_len=1024), row(2, rows=4096, kv_len=4096), row(3, rows=4096, kv_len=32768))
    for lengths, expected in (((1500, 1500), 1), ((3000, 3000), 2), ((4096, 20000), 3), ((2048, 8192), 2)):
        call = dataclasses.replace(CALL, rows=lengths[0], kv_len=lengths[1])
        assert nearest(rows, "v6e", call).block_q == expected
    for lengths in ((511, 1024), (8193, 4096), (1024, 2049), (4096, 12000)):  # of none within twice and half
        assert nearest(rows, "v6e", dataclasses.replace(CALL, rows=lengths[0], kv_len=lengths[1])) is None


@pytest.mark.parametrize(
    "changes",
    [{"function": "decode"}, {"dtype": "float32"}, {"mask": "none"}, {"head_dim": 192}, {"v_head_dim": 256}],
)
def test_another_class_takes_no_row(changes):
    rows = (row(),)
    assert nearest(rows, "v6e", dataclasses.replace(CALL, **changes)) is None
    assert nearest(rows, "v5e", CALL) is None
    assert nearest(rows, "v6e", dataclasses.replace(CALL, head_dim=80)) is rows[0]  # as many lanes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["v5e", "v6e"]), st.sampled_from(["causal", "none"]), st.sampled_from([64, 128, 256]),
                  st.integers(1, 9000), st.integers(1, 9000)),
        max_size=12, unique_by=lambda each: (each[0], each[1], -(-each[2] // 128), each[3], each[4]),
    )  # fmt: skip
)
def test_every_row_of_any_table_is_reached(kinds):
    rows = tuple(
        row(index, generation, mask=mask, head_dim=dim, v_head_dim=dim, rows=count, kv_len=kv)
        for index, (generation, mask, dim, count, kv) in enumerate(kinds)
    )
    for each in rows:
        assert nearest(rows, each.generation, each.call) is each


@pytest.mark.parametrize("spec", load_specs(packaged_specs_dir()), ids=lambda spec: spec.name)
def test_every_row_of_the_packaged_tables_is_reached_and_has_its_source(spec):
    rows = load_table(spec.folder / tuning.TABLE)
    for each in rows:
        assert nearest(rows, each.generation, each.call) is each
        tuned = each.block_q > 0 or each.block_kv > 0
        assert each.milliseconds < each.untuned_milliseconds if tuned else each.milliseconds == each.untuned_milliseconds
        assert each.how and each.compiler and each.kernel and len(each.date) == 10


def test_a_table_is_read(tmp_path):
    path = tmp_path / "tuning.toml"
    assert load_table(path) == ()
    path.write_text(text() + text(kv_len=1))
    assert [each.call.kv_len for each in load_table(path)] == [4096, 1]
    assert tuning.tuning_of("v6e", path, CALL) == Tuning(256, 1024, tuning.tuning_of("v6e").vmem_bytes)
    assert tuning.tuning_of("v5e", path, CALL) == tuning.tuning_of("v5e")
    assert tuning.tuning_of("v6e", path) == tuning.tuning_of("v6e", None, CALL) == tuning.tuning_of("v6e")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (text(generation="v9"), "row 2: generation 'v9' is not one of"),
        (text(block_q=-1), "row 2: block_q is -1"),
        (text(kv_len=0), "row 2: kv_len is 0"),
        (text(date=None), "row 2: missing or unknown field"),
        (text(speed="high"), "row 2: missing or unknown field"),
        (text(mask=None), "row 2: missing or unknown field"),
        (text(head_dim=100, block_q=512), "row 2: a row before it is of the same class and sizes"),
        ("[[row", "tuning.toml: "),
    ],
)
def test_bad_tables_are_named(tmp_path, bad, message):
    path = tmp_path / "tuning.toml"
    path.write_text(text() + bad)
    with pytest.raises(TuningError, match=message.replace("(", r"\(")):
        load_table(path)


def test_a_call_takes_its_row_on_a_tpu_and_the_kernels_choice_on_cpu(tmp_path, monkeypatch):
    """Through the attention function's own plan, for a kernel whose table has a row."""
    attention.installed_specs()
    spec = attention._known["range-attention"]
    folder = tmp_path / spec.folder.name
    shutil.copytree(spec.folder, folder)
    decode = text(function="decode", mask="ranges", rows=32, kv_len=4096, block_q=0, block_kv=512)
    (folder / tuning.TABLE).write_text(text() + decode)
    monkeypatch.setitem(attention._known, "range-attention", dataclasses.replace(spec, folder=folder))
    monkeypatch.setenv("TPU_KERNELS_TARGET", "v6e")
    tuning.generation.cache_clear()
    tuning.tuning_for.cache_clear()
    try:
        budget = tuning.tuning_of("v6e").vmem_bytes
        facts = ("range-attention", "bfloat16", "causal", 128, 128, 3000, 3000)
        assert attention._blocks("tpu", "forward", *facts) == (256, 1024, budget)
        assert attention._blocks("tpu", "forward", *facts[:2], "none", *facts[3:]) == (0, 0, budget)
        assert attention._blocks("tpu", "decode", *facts[:2], "ranges", 128, 128, 16, 8192) == (0, 512, budget)
        assert attention._blocks("tpu", "decode", *facts[:2], "ranges", 128, 128, 8, 8192) == (0, 0, budget)
        assert attention._blocks("tpu", "forward") == (0, 0, budget)
        assert attention._blocks("cpu", "forward") == (0, 0, 0)
    finally:
        tuning.generation.cache_clear()
        tuning.tuning_for.cache_clear()
