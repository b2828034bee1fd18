"""Fault kind 46, operands in a layout that the kernel does not expect: views traced by torch_tpu and compiled by libtpu.

(pytorch/xla 8732: "XLA layout does not match MLIR layout".) Emulated: tests/test_layouts.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.offdevice import module_text
from tpu_kernels.offdevice.aot import Array
from tpu_kernels.offdevice.emit import Emitter, FunctionJob

PROGRAMS = Path(__file__).with_name("torch_programs.py")
LAYOUTS = ["parts of a projection", "part of a cache", "length last", "part of a head", "expanded"]


@pytest.fixture(scope="module")
def emitter():
    with Emitter("v6e", timeout=200) as made:
        yield made


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("q_len", [pytest.param(200, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize("layout", [*LAYOUTS[:2], *(pytest.param(each, marks=pytest.mark.thorough) for each in LAYOUTS[2:])])
def test_views_are_compiled(layout, q_len, dtype, emitter, tmp_path):
    arguments = (Array(dtype, (1, q_len, 12 * 64)), Array(dtype, (1, 2, 300, 64)))
    result = emitter.run(FunctionJob(f"{PROGRAMS}:attention_of_views", arguments, {"layout": layout}), tmp_path)
    assert result.ok, result.error
    assert len(result.kernels) == 1 and "range_attention" in result.kernels[0], result.kernels
    assert len(module_text.kernel_calls(result.modules[0].read_text())) == 1
    compiled = emitter.compile(result.modules[0])
    assert compiled.ok, compiled.error
    assert compiled.vmem_bytes > 0  # the kernel is in the program
