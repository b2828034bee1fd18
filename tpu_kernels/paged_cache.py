"""transformers' continuous batching: many requests packed into one row, their keys kept in pages.

A step in which every request decodes runs on the block table: the new keys are written into their pages, and the kernel
reads the pages in use where they lie. In other steps the cache gathers them into one packed tensor; what each query then
sees is a row range, so the same kernels serve it and no [queries, keys] mask is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import masks


@contextlib.contextmanager
def continuous_batching() -> Iterator[None]:
    """Within this block, `generate_batch` and `ContinuousBatchingManager` run attention names registered here.

        with tpu_kernels.continuous_batching():
            outputs = model.generate_batch(inputs, generation_config=config)

    transformers admits "paged|eager", "sdpa" and flash attention by name and refuses every other one when a manager is
    made; it has no way to add a name. And it hands block tables to flash attention on CUDA and XPU only. This replaces those
    two tests (`ContinuousBatchingManager.switch_to_cb_friendly_attn`, `ensure_decode_fast_path_is_available`) for
    models that ask for a name of this package, and puts them back at the end of the block. Block tables need a model in
    which all layers are full attention; `max_blocks_per_request` (0: none) bounds the length of the requests.

    Raises:
        RuntimeError: on a transformers release that has no such tests.
    """
    from transformers.generation.continuous_batching import ContinuousBatchingManager, initialization

    from .registration import registered_names

    admits, tables = "switch_to_cb_friendly_attn", "ensure_decode_fast_path_is_available"
    original, original_tables = getattr(ContinuousBatchingManager, admits, None), getattr(initialization, tables, None)
    if original is None or original_tables is None:
        import transformers

        raise RuntimeError(
            f"transformers {transformers.__version__} chooses attention for continuous batching in a way that is not known "
            "here: use attn_implementation='sdpa' with it."
        )

    def admit(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in registered_names():
            original(self, model, *args, **kwargs)

    def hand_out_tables(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        types = initialization.group_layers_by_attn_type(config)
        if config._attn_implementation not in registered_names() or set(types) != {"full_attention"}:
            original_tables(config, cb_config, *args, **kwargs)

    setattr(ContinuousBatchingManager, admits, admit)
    setattr(initialization, tables, hand_out_tables)
    try:
        yield
    finally:
        setattr(ContinuousBatchingManager, admits, original)
        setattr(initialization, tables, original_tables)


@dataclass(frozen=True, slots=True)
class Pages:
    """What a step that decodes on a block table reads, for R requests with one query each.

    keys, values: [pages, page, Hkv, D], all pages of the layer. table: int32 [R, M], each request's pages in order, -1 where
    it has none. starts, ends: int32 [R, 1], what a query sees of its request's keys.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @property
    def kv_len(self) -> int:
        """Keys that a request's row of the table can hold."""
        return self.table.shape[1] * self.keys.shape[1]

    def shapes(self) -> tuple[torch.Size, torch.Size]:
        """Of keys and values once gathered, [R, Hkv, kv_len, D]."""
        sizes = [(self.table.shape[0], pool.shape[2], self.kv_len, pool.shape[3]) for pool in (self.keys, self.values)]
        return torch.Size(sizes[0]), torch.Size(sizes[1])

    def mask(self) -> torch.Tensor:
        """The bounds as a range mask."""
        return masks.encode_ranges(self.starts, self.ends, None, self.kv_len)

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values laid out whole, [R, Hkv, kv_len, D], for attention that reads no block table."""
        table = self.table.clamp(min=0)
        key, value = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.keys, self.values))
        return key, value


def write_pages(
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_k: Any,
    window: int | None,
    kwargs: dict[str, Any],
) -> Pages:
    """Write this step's keys into their pages; with a block table transformers leaves that to the attention function.

    Args:
        key, value: [1, Hkv, R, D], one new token of each request. cu_seq_lens_k: int [R + 1] for each type of layer.
        window: how many keys a query sees, itself included. kwargs: the call's other keyword arguments; what belongs to
            the cache is taken out.

    Raises:
        ValueError: for a cache of another kind, and for attention that a block table cannot describe.
    """
    cache, told = _taken(module, cu_seq_lens_k, kwargs)
    cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=told)  # fills in this layer's
    keys, values, table = told["k_cache"], told["v_cache"], told["block_table"]
    if table.shape[0] != key.shape[2]:
        raise ValueError(
            f"continuous batching gave a block table for {table.shape[0]} requests and {key.shape[2]} tokens; on a block "
            "table each request has one. Set max_blocks_per_request=0 in its config, and the cache gathers the pages."
        )
    ends = told["cu_seq_lens_k"].diff()
    page = keys.shape[1]
    # A row that pads the batch has no keys: what it writes goes where nothing is read.
    last = (ends - 1).clamp(min=0)
    slot = table.gather(1, (last // page)[:, None].long())[:, 0].long() * page + last % page
    slot = torch.where(ends > 0, slot, cache.layer_to_allocator[module.layer_idx].write_trash_index)
    for pool, new in ((keys, key), (values, value)):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slot, new[0].transpose(0, 1))
    starts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    return Pages(keys, values, table, starts[:, None], ends[:, None])


def _taken(module: torch.nn.Module, cu_seq_lens_k: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The paged cache and what its `update` is told, both taken out of `kwargs`.

    Raises ValueError where it is no paged cache, or a layer is not for it.
    """
    from transformers.generation.continuous_batching import PagedAttentionCache

    cache = kwargs.pop("cache")
    if not isinstance(cache, PagedAttentionCache):
        raise ValueError(
            f"tpu_attention got cache=<{type(cache).__name__}>, which is not transformers' PagedAttentionCache. Others "
            "are updated by the model before attention and need no argument."
        )
    if getattr(module.config, "attention_chunk_size", None):
        raise ValueError("continuous batching does not tell attention the chunks of chunked attention: use 'sdpa'.")
    told = {name: kwargs.pop(name, None) for name in ("read_index", "write_index", "max_length_k", "block_table")}
    kwargs.pop("logits_processor_args", None)  # for the sampling after the model
    return cache, told | {"cu_seq_lens_k": cu_seq_lens_k}


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
    cache, told = _taken(module, bounds["cu_seq_lens_k"], kwargs)
    new = key.shape[2]
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=told)
    bounds["cu_seq_lens_k"] = told["cu_seq_lens_k"]
    if mask is not None and (mask.dtype == torch.int32 or (mask.shape[-1] == new and new != key.shape[2])):
        mask = None
    return key, value, mask
