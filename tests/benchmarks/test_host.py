"""Host costs: how much Python one eager call runs, how often a generation traces, and that the measuring measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jax.experimental import pallas as pl
from transformers import AutoModelForCausalLM, LlamaConfig

import tpu_kernels
from benchmarks import host
from tpu_kernels import attention

ROOT = Path(__file__).parents[2]


def calls_outside_the_kernel(function) -> int:
    """Python and C functions called by `function`, without what the emulation of the kernel itself calls."""
    count, inside = 0, 0

    def profile(frame, event, argument):
        nonlocal count, inside
        emulation = frame.f_code.co_filename.endswith("bridge.py")
        if event == "call" and emulation:
            inside += 1
        if not inside and event in ("call", "c_call"):
            count += 1
        if event == "return" and emulation:
            inside -= 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("kind", "most"), [("decode", 58), ("prefill", 58), ("gradients", 103)])
def test_a_steady_call_runs_little_python(kind, most):
    """Machine-independent stand-in for the time of `python -m benchmarks host` (60 us): what it was, and a fifth."""
    tensors, mask = host.decode_call(requires_grad=kind == "gradients")
    if kind == "prefill":
        tensors, mask = tuple(torch.randn(1, heads, 64, 64) for heads in (4, 2, 2)), None
    module = host.layer()

    def call():
        with torch.set_grad_enabled(kind == "gradients"):
            attention.tpu_attention(module, *tensors, mask, scaling=0.125)

    call(), call()
    used = calls_outside_the_kernel(call)
    assert 15 < used <= most


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_generation_of_64_tokens_traces_each_function_at_most_twice(cache, monkeypatch):
    traced = []
    original = pl.pallas_call

    def counting(*args, **kwargs):
        traced.append(kwargs.get("name"))
        return original(*args, **kwargs)

    monkeypatch.setattr(pl, "pallas_call", counting)
    tpu_kernels.register()
    # Sizes that no other test has: nothing of it was traced before.
    head_dim = {"static": 20, "dynamic": 28}[cache]
    config = LlamaConfig(
        hidden_size=40, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=head_dim, vocab_size=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tpu_attention").eval()
    ids = torch.randint(1, 64, (1, 90), generator=torch.Generator().manual_seed(0))
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False,
        **({"cache_implementation": "static"} if cache == "static" else {}),
    )  # fmt: skip
    assert out.shape == (1, 154)
    assert set(traced) == {"range_attention_forward", "range_attention_decode"}
    assert all(traced.count(name) <= 2 for name in set(traced)), traced


def test_host_times_are_of_a_stubbed_kernel(tmp_path):
    code = (
        "import json, dataclasses\nfrom benchmarks import host\n"
        "print(json.dumps([dataclasses.asdict(each) for each in host.measure(calls=20)]))"
    )
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    costs = {each["what"]: each for each in json.loads(done.stdout)}
    whole = costs["tpu_attention, decode, kernel stubbed"]
    assert whole["bar"] == 60 and 0 < whole["microseconds"] < 10_000
    parts = [each for what, each in costs.items() if what.startswith("  of it")]
    assert len(parts) == 4 and sum(each["microseconds"] for each in parts) < 2 * whole["microseconds"]
    assert "transformers' sdpa, decode, SDPA stubbed" in costs


def test_a_kernel_that_has_run_cannot_be_stubbed():
    tensors, mask = host.decode_call()
    with torch.no_grad():
        attention.tpu_attention(host.layer(), *tensors, mask, scaling=0.125)
    with pytest.raises(RuntimeError, match="fresh process"):
        host.measure(calls=1)
