"""transformers' TPU page, line by line: what this package does about each, and the kind of proof.

No TPU is here. A proof says what it ran on: "CPU", kernels emulated; "fake TPU", tensors of device "tpu" without storage;
"gloo", several processes on CPU; "compiled for v6e", by libtpu and not run; "pretended", a host that only says it has a TPU.
"""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache
from transformers.utils.import_utils import is_torch_tpu_available

import tpu_kernels
from tests.models.tiny_models import DECODERS, TinyModel
from tpu_kernels import doctor, tuning

HERE = "scale/test_tpu_page.py"
# line of the page: (kind of proof, file below tests/, test)
PAGE = {
    "the device is found by torch.accelerator": ("CPU; pretended", HERE, "test_device_detection"),
    'device_map="tpu", and "auto" that stays on CPU': ("CPU; pretended", HERE, "test_a_model_left_on_cpu_beside_a_tpu"),
    "a model on device tpu traces to one graph": ("fake TPU", "models/test_fake_tpu.py", "test_one_graph_on_the_kernel"),
    "a TPU model's compiled decoding, by torch_tpu": (
        "compiled for v6e", "offdevice/test_whole_models.py", "test_whole_models"
    ),
    "generation with inputs left on CPU": ("CPU; pretended", HERE, "test_inputs_stay_on_cpu"),
    "static cache, compiled automatically": ("CPU; pretended", HERE, "test_static_cache_compiles_decoding_once"),
    "disable_compile=True": ("CPU", HERE, "test_disable_compile"),
    "pipeline(device=...)": ("CPU", "test_registration.py", "test_pipeline"),
    "the launcher, one process a chip": ("gloo", "scale/test_examples.py", "test_two_processes_generate_what_one_does"),
    "DistributedConfig(tp_size=...)": ("gloo", "scale/test_tensor_parallel.py", "test_equal_to_the_single_process"),
    "tensor parallel, nothing sent around the kernel": (
        "compiled for v6e", "offdevice/test_sharded_layer.py", "test_the_one_collective_is_the_sum_after_o_proj"
    ),
    "tp_plan override, attention replicated": (
        "gloo", "scale/test_tensor_parallel.py", "test_equal_to_the_single_process"
    ),
    "limit: KV heads that do not divide": (
        "CPU", "scale/test_tensor_parallel.py", "test_loading_tells_of_heads_that_do_not_divide"
    ),
    "limit: tied embeddings with tp_size > 1": (
        "pretended", "scale/test_tensor_parallel.py", "test_tied_embeddings_on_a_tpu_host_are_told"
    ),
    "Hub kernels": ("CPU", "hub/test_stock_transformers.py", "test_from_the_hub"),
    "Hub kernels on device tpu": ("fake TPU", "hub/test_stock_transformers.py", "test_on_a_fake_tpu"),
    "limit: kernels does not know the TPU backend": (
        "pretended", "hub/test_stock_transformers.py", "test_from_the_hub_where_kernels_does_not_know_the_tpu"
    ),
    "limit: each new length compiles anew": (
        "CPU", "scale/test_bucketing.py", "test_200_requests_meet_as_many_shapes_as_buckets_and_one_for_decoding"
    ),
    "limit: a window's static cache compiles at each step": (
        "CPU", HERE, "test_a_sliding_window_compiles_once_with_the_buckets_cache"
    ),
    "limit: flex and flash attention are not for TPU": ("CPU", HERE, "test_names_of_attention_that_a_tpu_cannot_run"),
    "limit: continuous batching knows no TPU attention": (
        "CPU", "scale/test_continuous_batching.py", "test_the_name_is_admitted_within_the_block_only"
    ),
    "limit: fp8 caches": ("CPU", "scale/test_eight_bit_cache.py", "test_fp8_itself_is_refused_with_what_to_do"),
}  # fmt: skip


def test_every_line_has_its_test():
    tests = Path(__file__).parents[1]
    table = Table("line", "proof", "test", title="transformers' TPU page")
    for line, (proof, file, test) in PAGE.items():
        tree = ast.parse((tests / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, test)
        table.add_row(line, proof, f"{file}::{test}")
    Console(width=180).print(table)


@pytest.fixture(autouse=True)
def _registered():
    tpu_kernels.register()
    tpu_kernels.reset()


@pytest.fixture
def pretended(monkeypatch):
    """A host that says it has a TPU. No tensor can be there."""
    monkeypatch.setattr(tuning, "attached_chip", lambda: "TPU v6e")
    tuning.generation.cache_clear()
    yield
    tuning.generation.cache_clear()


def llama(**changes):
    return TinyModel("llama", {"num_hidden_layers": 1, **changes}).build("tpu_attention")


def generate(model, input_ids, **options):
    return model.generate(input_ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, **options)


IDS = torch.arange(3, 12)[None]


def test_device_detection(pretended, monkeypatch):
    """transformers and this package ask the same place, and a host without a TPU has none."""
    assert tuning.generation() == "v6e"
    monkeypatch.undo()
    tuning.generation.cache_clear()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_tpu = accelerator is not None and accelerator.type == "tpu"
    assert is_torch_tpu_available() == has_tpu == bool(tuning.attached_chip())
    (found,) = [each for each in doctor.examine(load_kernels=False) if each.subject == "TPU"]
    assert (found.level == "ok") == has_tpu


def test_a_model_left_on_cpu_beside_a_tpu(pretended, tmp_path, monkeypatch):
    """device_map="auto" asks accelerate, which here as on a TPU host that it does not know means CPU."""
    TinyModel("llama").build("sdpa").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto", attn_implementation="tpu_attention")
    assert model.device.type == "cpu"
    with torch.no_grad():
        model(IDS)
    explained = str(tpu_kernels.explain(model))
    assert "this host has a TPU v6e" in explained and 'device_map="tpu"' in explained
    remarks = [each for each in doctor.examine(load_kernels=False) if each.subject == "model LlamaForCausalLM"]
    assert remarks and all('device_map="tpu"' in each.remedy for each in remarks)
    monkeypatch.undo()
    assert "this host has" not in str(tpu_kernels.explain(model))
    assert not [each for each in doctor.examine(load_kernels=False) if each.subject.startswith("model ")]


def test_inputs_stay_on_cpu(monkeypatch):
    """The model says that it is elsewhere: what a step needs is moved there, masks of ours among it, and nothing else."""
    model = llama()
    moved = []
    elsewhere = torch.device("privateuseone")  # what "tpu" is called until torch_tpu has started
    monkeypatch.setattr(type(model), "device", property(lambda self: elsewhere))
    monkeypatch.setattr(
        transformers.generation.utils, "move_to_device", lambda given, device: moved.append((sorted(given), device)) or given
    )
    out = generate(model, IDS, cache_implementation="static", disable_compile=True)
    assert out.device.type == "cpu" and out.shape == (1, 14)
    assert moved and {device for _, device in moved} == {elsewhere}
    assert any("attention_mask" in names for names, _ in moved)
    assert tpu_kernels.explain(model).fallback_calls == 0


@contextlib.contextmanager
def compiled_as_on_tpu(model):
    """transformers' compilation of decoding as it is on "tpu", by a backend that runs on CPU; and the graphs."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "device", property(lambda self: SimpleNamespace(type="tpu")))
        config = model._default_compile_config()
        patch.undo()
    assert (config.backend, config.dynamic) == ("tpu", False)
    settings = CompileConfig(backend=backend, dynamic=config.dynamic, mode=None, fullgraph=config.fullgraph)
    settings._compile_all_devices = True
    yield settings, graphs
    torch._dynamo.reset()


def test_static_cache_compiles_decoding_once():
    model = llama()
    wanted = generate(model, IDS)
    with compiled_as_on_tpu(model) as (settings, graphs):
        out = generate(model, IDS, cache_implementation="static", compile_config=settings)
    assert torch.equal(out, wanted)
    assert len(graphs) == 1
    rows = tpu_kernels.explain(model).rows
    assert sum(row.traced for row in rows) == 1 and {row.reason for row in rows} == {"kernel"}


def test_disable_compile():
    model = llama()
    with compiled_as_on_tpu(model) as (settings, graphs):
        generate(model, IDS, cache_implementation="static", compile_config=settings, disable_compile=True)
    assert graphs == [] and tpu_kernels.explain(model).fallback_calls == 0


@pytest.mark.slow
def test_a_sliding_window_compiles_once_with_the_buckets_cache():
    model = DECODERS["mistral"].build("tpu_attention", num_hidden_layers=1, sliding_window=6)
    buckets = tpu_kernels.PromptBuckets((16,), max_new_tokens=8)
    counts = {}
    for name, cache in (
        ("transformers' own", StaticCache(model.config, max_cache_len=24)), ("the buckets'", buckets.cache(model.config))
    ):  # fmt: skip
        with compiled_as_on_tpu(model) as (settings, graphs):
            out = generate(model, **buckets.pad({"input_ids": IDS}, 0), past_key_values=cache, compile_config=settings)
        counts[name] = len(graphs)
        assert out.shape == (1, 21)
    print(f"graphs of 4 decoding steps with a sliding window: {counts}")
    assert counts["the buckets'"] == 1 < counts["transformers' own"]


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2", "my_flash"])
def test_names_of_attention_that_a_tpu_cannot_run(name):
    """transformers sends them to code for other devices, so nothing here is bound to such a name."""
    with pytest.raises(ValueError, match="meaning of its own"):
        tpu_kernels.register(name)
