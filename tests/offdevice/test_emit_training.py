"""The ops of training through the real torch_tpu, without a TPU: traced by its jax_op, lowered, compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.offdevice import module_text
from tpu_kernels.offdevice.aot import Array
from tpu_kernels.offdevice.emit import Emitter, FunctionJob

PROGRAMS = Path(__file__).with_name("training_programs.py")
LENGTH, KV_HEADS, GROUP, DIM = 640, 2, 4, 128


@pytest.fixture(scope="module")
def emitter():
    with Emitter("v6e", timeout=200) as made:
        yield made


@pytest.mark.parametrize("features", ["causal", "holes and sinks"])
def test_forward_and_backward_are_two_kernels(emitter, tmp_path, features):
    q, k = (Array("bfloat16", (1, heads, LENGTH, DIM)) for heads in (KV_HEADS * GROUP, KV_HEADS))
    mask = sinks = None
    if features != "causal":
        words = -(-LENGTH // 128)  # rows of four words of 32 validity bits
        mask = Array("int32", (1, 1, words + LENGTH, 4))
        sinks = Array("bfloat16", (KV_HEADS * GROUP,))
    result = emitter.run(FunctionJob(f"{PROGRAMS}:attention_and_gradients", (q, k, k, mask, sinks, q)), tmp_path)
    assert result.ok, result.error
    assert result.kernels == (
        "tpu_kernels_jax::range_attention_forward_with_lse",
        "tpu_kernels_jax::range_attention_backward",
    )
    text = result.modules[0].read_text()
    calls = module_text.kernel_calls(text)
    shapes = [[str(each) for each in results] for _, results in calls]
    q5, kv = f"bf16[1,{KV_HEADS},{GROUP},{LENGTH},{DIM}]", f"bf16[1,{KV_HEADS},{LENGTH},{DIM}]"
    assert [each[0] for each in shapes] == [q5, q5] and [q5, kv, kv] in shapes
    assert module_text.score_tensors(text, LENGTH, LENGTH) == {}
    expanded = module_text.expanded_kv(text, q_heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, kv_len=LENGTH, head_dim=DIM)
    assert not expanded
    compiled = emitter.compile(result.modules[0])
    assert compiled.ok, compiled.error
