"""transformers' continuous batching: many requests packed into one row, their keys kept in pages.

At each step the paged cache writes the new keys and gathers the pages in use into one packed tensor; what each query
then sees is a row range, so the same kernels serve it and no [queries, keys] mask is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def continuous_batching() -> Iterator[None]:
    """Within this block, `generate_batch` and `ContinuousBatchingManager` run attention names registered here.

        with tpu_kernels.continuous_batching():
            outputs = model.generate_batch(inputs, generation_config=config)

    transformers admits "paged|eager", "sdpa" and flash attention by name and refuses every other one when a manager is
    made; it has no way to add a name. This replaces that one test (`ContinuousBatchingManager.switch_to_cb_friendly_attn`)
    for models that ask for a name of this package, and puts it back at the end of the block.

    Raises:
        RuntimeError: on a transformers release whose manager has no such test.
    """
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    from .registration import registered_names

    test = "switch_to_cb_friendly_attn"
    original = getattr(ContinuousBatchingManager, test, None)
    if original is None:
        import transformers

        raise RuntimeError(
            f"transformers {transformers.__version__} chooses attention for continuous batching in a way that is not known "
            "here: use attn_implementation='sdpa' with it."
        )

    def admit(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in registered_names():
            original(self, model, *args, **kwargs)

    setattr(ContinuousBatchingManager, test, admit)
    try:
        yield
    finally:
        setattr(ContinuousBatchingManager, test, original)


def read_cache(
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
    bounds: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Write this step's keys into the paged cache and read all keys of the requests.

    Args:
        key, value: [1, Hkv, T, D], the new tokens of all requests in a row. mask: of the call.
        kwargs: the call's other keyword arguments; what belongs to the cache is taken out.
        bounds: cu_seq_lens_q, int [R + 1]; cu_seq_lens_k, such a tensor for each type of layer, is replaced by this
            layer's.

    Returns:
        (key, value [1, Hkv, all keys of the requests, D], mask). Bounds say all that a mask could: a request sees its own
        keys, causally and within the layer's window. So a mask made of the new tokens alone is dropped, and one over all
        keys (continuous batching makes it for "sdpa") kept.

    Raises:
        ValueError: for a cache of another kind, and for attention that bounds cannot describe.
    """
    from transformers.generation.continuous_batching import PagedAttentionCache

    cache = kwargs.pop("cache")
    if not isinstance(cache, PagedAttentionCache):
        raise ValueError(
            f"tpu_attention got cache=<{type(cache).__name__}>, which is not transformers' PagedAttentionCache. Others "
            "are updated by the model before attention and need no argument."
        )
    if kwargs.get("block_table") is not None:
        raise ValueError(
            "continuous batching asks for decoding on a block table, which no kernel here reads: set "
            "max_blocks_per_request=0 in its config, and the cache gathers the pages."
        )
    if getattr(module.config, "attention_chunk_size", None):
        raise ValueError("continuous batching does not tell attention the chunks of chunked attention: use 'sdpa'.")
    told = {name: kwargs.pop(name, None) for name in ("read_index", "write_index", "max_length_k", "block_table")}
    kwargs.pop("logits_processor_args", None)  # for the sampling after the model
    told["cu_seq_lens_k"] = bounds["cu_seq_lens_k"]
    new = key.shape[2]
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=told)
    bounds["cu_seq_lens_k"] = told["cu_seq_lens_k"]
    if mask is not None and (mask.dtype == torch.int32 or (mask.shape[-1] == new and new != key.shape[2])):
        mask = None
    return key, value, mask
