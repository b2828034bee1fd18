"""What `explain()` finds, and what it costs."""

from __future__ import annotations

import copy

import pytest
import torch

import tpu_kernels
from tpu_kernels import ledger
from tpu_kernels.attention import tpu_attention

from .models.tiny_models import DECODERS
from .test_attention import Layer, tensors

IDS = torch.arange(3, 9)[None]


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register()
    tpu_kernels.reset()


@pytest.fixture
def walks(monkeypatch):
    """How often the heap was walked."""
    count = []
    walk = ledger.live_models
    monkeypatch.setattr(ledger, "live_models", lambda: count.append(1) or walk())
    return count


def run(model):
    with torch.no_grad():
        model(IDS)


def layers():
    return {row.layer for row in tpu_kernels.explain().rows}


def test_explain_walks_the_heap_only_after_modules_were_built(walks):
    model = DECODERS["llama"].build("tpu_attention")
    run(model)
    for _ in range(3):
        assert layers() == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    tpu_kernels.reset()
    assert len(walks) == 1 and type(model).__name__ in tpu_kernels.explain().never_called
    second = DECODERS["qwen3"].build("tpu_attention")  # never called, and found all the same
    assert type(second).__name__ in tpu_kernels.explain().never_called
    assert len(walks) == 2
    del second
    assert "Qwen3ForCausalLM" not in tpu_kernels.explain().never_called
    assert len(walks) == 2


def test_a_copy_that_is_called_is_found(walks):
    model = DECODERS["llama"].build("tpu_attention")
    assert layers() == set()
    twin = copy.deepcopy(model)
    run(twin)
    assert layers() == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert layers() and len(walks) == 2


def test_attention_outside_of_models_walks_once(walks):
    layer = Layer()
    counts = []
    for q_len in (8, 9, 10):
        q, k, v = tensors(q_len, q_len)
        tpu_attention(layer, q, k, v, None)
        assert layers() == {"Layer.0"}
        counts.append(len(walks))
    assert counts == [1, 1, 1]


def test_without_a_registered_name_each_call_walks(walks):
    tpu_kernels.unregister()
    try:
        tpu_kernels.explain(), tpu_kernels.explain()
        assert len(walks) == 2
    finally:
        tpu_kernels.register()
    tpu_kernels.explain(), tpu_kernels.explain()
    assert len(walks) == 3


def test_a_model_that_is_put_into_another_is_no_root_any_more():
    model = DECODERS["llama"].build("tpu_attention")
    run(model)
    assert "model.layers.0.self_attn" in layers()
    outer = DECODERS["qwen3"].build("tpu_attention")
    outer.inner = model
    assert "inner.model.layers.0.self_attn" in layers()
