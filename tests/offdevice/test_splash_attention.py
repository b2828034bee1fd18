"""The packaged splash-attention compiles for every generation that its spec.toml names, up to its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.offdevice import emit, module_text
from tpu_kernels.offdevice.aot import Array, Compiler, FunctionJob
from tpu_kernels.specs import load_specs

SPEC = next(spec for spec in load_specs() if spec.name == "splash-attention")
# dtype, queries, keys, D, Dv, causal, softcap, sinks
SHAPES = (
    ("bfloat16", 4096, 4096, 128, 128, True, 0.0, False),
    ("bfloat16", 1024, 1024, 255, 255, True, 0.0, False),
    ("float32", 4096, 4096, 256, 256, True, 30.0, False),
    ("bfloat16", 384, 640, 192, 128, False, 0.0, True),
    ("float32", 128, 128, 72, 72, False, 30.0, True),
    ("bfloat16", SPEC.capabilities.max_kv_len, SPEC.capabilities.max_kv_len, 128, 128, True, 0.0, False),
)


@pytest.mark.slow
@pytest.mark.parametrize("generation", SPEC.capabilities.generations)
def test_it_compiles_up_to_its_limits(generation):
    function = f"{SPEC.folder / 'torch-ext' / SPEC.module}:forward"
    with Compiler() as compiler:
        for dtype, q_len, kv_len, dim, v_dim, causal, softcap, sinks in SHAPES:
            q, k, v = (
                Array(dtype, (1, *each)) for each in ((4, q_len, dim), (2, kv_len, dim), (2, kv_len, v_dim))
            )
            static = {
                "scale": dim**-0.5, "softcap": softcap, "block_q": 0, "block_kv": 0, "vmem_bytes": 0, "interpret": False,
                "precision": "highest" if dtype == "float32" else "default", "causal": causal,
            }  # fmt: skip
            arguments = (q, k, v, None, None, None, Array("float32", (4,)) if sinks else None)
            result = compiler.run(FunctionJob(function, arguments, generation, static))
            assert result.ok, f"{dtype} Q{q_len} KV{kv_len} D{dim}/{v_dim}: {result.stage}: {result.error}"


@pytest.mark.slow
def test_its_op_goes_through_torch_tpu(tmp_path):
    """Grouped KV heads are not repeated, though D 96 makes bfloat16 q two halves."""
    length, dim = 640, 96
    q, k = (Array("bfloat16", (1, heads, length, dim)) for heads in (8, 2))
    program = f"{Path(__file__).with_name('torch_programs.py')}:splash_attention"
    with emit.Emitter("v6e", timeout=200) as emitter:
        result = emitter.run(emit.FunctionJob(program, (q, k, k)), tmp_path)
        assert result.ok, result.error
        assert result.kernels == ("tpu_kernels_jax::splash_attention_forward",)
        text = result.modules[0].read_text()
        assert module_text.score_tensors(text, length, length) == {}
        assert not module_text.expanded_kv(text, q_heads=8, kv_heads=2, kv_len=length, head_dim=dim)
        compiled = emitter.compile(result.modules[0])
        assert compiled.ok, compiled.error
