"""Keys and values in 8 bits: what transformers' caches hand to attention, and what is refused. Emulated on CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import QuantizedCache

import tpu_kernels
from tests.models.tiny_models import TinyModel
from tpu_kernels.attention import tpu_attention

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def test_the_cache_that_keeps_fp8_hands_over_the_models_dtype():
    """It multiplies by its scale before attention: the whole cache again at each step."""
    tpu_kernels.register()
    made = {}
    for attention in ("sdpa", "tpu_attention"):
        model = TinyModel("llama").build(attention, num_hidden_layers=1)
        cache = QuantizedCache("fp8", model.config)
        ids = torch.arange(3, 12)[None]
        made[attention] = model.generate(ids, past_key_values=cache, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        assert cache.layers[0]._quantized_keys[0].dtype == torch.float8_e4m3fn
    assert torch.equal(*made.values())
    assert tpu_kernels.explain(model).fallback_calls == 0


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("mixed", [True, False])
def test_fp8_itself_is_refused_with_what_to_do(dtype, mixed):
    k = torch.zeros(1, 2, 8, 16).to(dtype)
    q = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16 if mixed else dtype)
    with pytest.raises(ValueError, match=r"key, value came in 8 bits.*QuantizedCache\(backend='fp8'\)"):
        tpu_attention(torch.nn.Module(), q, k, k, None)
