"""torch_tpu's own StableHLO without a TPU, with kernels put into it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from tpu_kernels.offdevice import module_text
from tpu_kernels.offdevice.aot import Array
from tpu_kernels.offdevice.emit import Emitter, FunctionJob, ModuleJob

PROGRAMS = Path(__file__).with_name("torch_programs.py")
MODELS = "tpu_kernels.offdevice.models:program"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def emitter():
    with Emitter("v6e", timeout=120) as made:
        yield made


def heads(count: int, length: int, dim: int = 128) -> Array:
    return Array("bfloat16", (1, count, length, dim))


def test_sdpa_is_torch_tpus_kernel_and_takes_gqa_as_it_is(emitter, tmp_path):
    job = FunctionJob(f"{PROGRAMS}:sdpa", (heads(8, 640), heads(2, 640), heads(2, 640), None), {"causal": True, "gqa": True})
    result = emitter.run(job, tmp_path)
    assert result.ok, result.error
    text = result.modules[0].read_text()
    ((operands, results),) = module_text.kernel_calls(text)
    # Lengths are padded to its blocks.
    assert [str(each) for each in operands] == [
        "bf16[1,8,768,128]",
        "bf16[1,2,1024,128]",
        "bf16[1,2,1024,128]",
    ]
    assert [str(each) for each in results] == ["bf16[1,8,768,128]"]
    assert module_text.score_tensors(text, 640, 640) == {}
    compiled = emitter.compile(result.modules[0])
    assert compiled.ok, compiled.error
    assert compiled.temp_bytes == 0


def test_a_dense_mask_is_found(emitter, tmp_path):
    mask = Array("bool", (1, 1, 640, 640))
    result = emitter.run(FunctionJob(f"{PROGRAMS}:sdpa", (*[heads(4, 640)] * 3, mask)), tmp_path)
    found = module_text.score_tensors(result.modules[0].read_text(), 640, 640)
    assert {str(each) for each in found} == {"i1[1,1,640,640]", "bf16[1,1,640,640]"}


def test_materialised_scores_are_found(emitter, tmp_path):
    """Head size 192 is outside torch_tpu's kernel: scores are written out."""
    job = FunctionJob(f"{PROGRAMS}:sdpa", (*[heads(4, 640, 192)] * 3, None), {"causal": True})
    result = emitter.run(job, tmp_path)
    text = result.modules[0].read_text()
    assert module_text.kernel_calls(text) == []
    assert any(each.shape == (1, 4, 640, 640) for each in module_text.score_tensors(text, 640, 640))


def test_repeated_kv_is_found(emitter, tmp_path):
    job = FunctionJob(f"{PROGRAMS}:sdpa_repeated", (heads(8, 640), heads(2, 640), heads(2, 640)))
    result = emitter.run(job, tmp_path)
    assert result.ok, result.error
    found = module_text.expanded_kv(result.modules[0].read_text(), q_heads=8, kv_heads=2, kv_len=640, head_dim=128)
    assert len(found) == 2  # K and V


def test_kernels_are_put_where_they_belong(emitter, tmp_path):
    """The module with kernels in it computes what the program computes: it is run, on the CPU."""
    result = emitter.run(ModuleJob(f"{PROGRAMS}:chained", {}), tmp_path)
    assert result.ok, result.error
    assert (result.graphs, result.graph_breaks) == (1, 0)
    assert result.kernels == (
        "programs::scale_and_shift",
        "programs::scale_and_shift",
        "programs::split",
        "programs::scale_and_shift",
    )
    x, weight = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    first = x * weight * 3 + x
    second = (first + 1) * 0.5 + first
    left, right = (second - x)[:, ::2], (second - x)[:, 1::2] * 2
    want = [left + right, (second * 3 + first).sum(-1), left]
    # Which argument is which is Dynamo's choice; both orders are tried.
    for arguments in ((x, weight), (weight, x)):
        got = run_on_cpu(result.modules[0].read_text(), arguments)
        if all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, want, strict=True)):
            return
    pytest.fail("the spliced module computes something else")


def run_on_cpu(text: str, arguments) -> list[np.ndarray]:
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jax._src.lib.mlir import ir

    device = jax.devices("cpu")[0]
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        program = device.client.compile_and_load(
            module, executable_devices=_jax.DeviceList((device,)), compile_options=xla_client.CompileOptions()
        )
    return [np.asarray(each) for each in program.execute([jax.device_put(each, device) for each in arguments])]


def test_graph_breaks_are_errors_or_counted(emitter, tmp_path):
    strict = emitter.run(ModuleJob(f"{PROGRAMS}:breaks", {}), tmp_path)
    assert (strict.ok, strict.stage) == (False, "trace")
    assert "graph_break" in strict.error
    loose = emitter.run(ModuleJob(f"{PROGRAMS}:breaks", {}, fullgraph=False), tmp_path)
    assert loose.ok, loose.error
    assert (loose.graphs, loose.graph_breaks) == (2, 1)


def test_a_builder_that_fails_names_its_stage(emitter, tmp_path):
    result = emitter.run(ModuleJob(f"{PROGRAMS}:fails_to_build", {}), tmp_path)
    assert (result.ok, result.stage, result.error) == (False, "build", "ValueError: no such geometry")


def test_a_transformers_model_with_sdpa(emitter, tmp_path):
    """What torch_tpu makes of transformers' own attention: a dense bias and repeated K and V."""
    parameters = {"config": LLAMA, "attention": "sdpa", "phase": "prefill", "batch": 2, "prompt": 384}
    result = emitter.run(ModuleJob(MODELS, parameters), tmp_path)
    assert result.ok, result.error
    assert (result.graphs, result.graph_breaks) == (1, 0)
    text = result.modules[0].read_text()
    assert "bf16[2,1,384,384]" in {str(each) for each in module_text.score_tensors(text, 384, 384)}
    assert len(module_text.expanded_kv(text, q_heads=8, kv_heads=2, kv_len=384, head_dim=64)) == 4
    compiled = emitter.compile(result.modules[0])
    assert compiled.ok, compiled.error


def test_static_cache_decode(emitter, tmp_path):
    parameters = {
        "config": LLAMA,
        "attention": "sdpa",
        "phase": "decode",
        "batch": 2,
        "prompt": 9,
        "cache": 1000,
    }
    result = emitter.run(ModuleJob(MODELS, parameters), tmp_path)
    assert result.ok, result.error
    assert (result.graphs, result.graph_breaks) == (1, 0)
    assert len(module_text.kernel_calls(result.modules[0].read_text())) == 2
    assert emitter.compile(result.modules[0]).ok


def test_another_torch_tpu_is_refused(monkeypatch):
    import importlib.metadata

    from tpu_kernels.offdevice import torch_tpu_offline as offline

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(offline.UnsupportedTorchTpuError, match=r"0\.3\.0 is installed.*0\.2\.0"):
        offline.check_version()
