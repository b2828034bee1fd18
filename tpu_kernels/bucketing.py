"""Prompts padded to a few lengths and one cache length for all, so that a served model meets few shapes.

Each shape is a program that has to be compiled. Padding to the left of a prompt changes nothing in the result: row ranges
keep the padding out of every row, and positions count from the first real token.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

# Layers whose keys a plain static layer can hold; the mask then carries the window.
_ATTENTION_LAYERS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))


@dataclass(frozen=True)
class PromptBuckets:
    """Prompt lengths that are compiled for, and the most tokens that follow a prompt.

        buckets = PromptBuckets.up_to(2048, max_new_tokens=256)
        cache = buckets.cache(model.config)
        for prompt in prompts:
            inputs = buckets.pad(tokenizer(prompt, return_tensors="pt"), tokenizer.pad_token_id)
            out = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
            cache.reset()

    Prefill then has one shape for each bucket that is met and decoding one for all of them, for a fixed batch size.

    Args:
        lengths: increasing prompt lengths. max_new_tokens: tokens generated after a prompt, at most.
    """

    lengths: tuple[int, ...]
    max_new_tokens: int

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.lengths), self.lengths, strict=False))
        if not self.lengths or not rising or self.max_new_tokens < 1:
            raise ValueError(
                f"PromptBuckets(lengths={self.lengths}, max_new_tokens={self.max_new_tokens}): lengths must be positive and "
                "increasing, at least one, and max_new_tokens at least 1."
            )

    @classmethod
    def up_to(cls, longest: int, max_new_tokens: int, shortest: int = 128) -> PromptBuckets:
        """Lengths that double from `shortest` until `longest` fits: at most half of a prompt's rows are padding."""
        lengths = [shortest]
        while 0 < lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        return cls(tuple(lengths), max_new_tokens)

    @property
    def cache_len(self) -> int:
        """Key slots that hold the longest prompt and what is generated after it."""
        return self.lengths[-1] + self.max_new_tokens

    def length_for(self, prompt_len: int) -> int:
        """The shortest bucket that holds a prompt. Raises ValueError where none does."""
        index = bisect.bisect_left(self.lengths, prompt_len)
        if index == len(self.lengths):
            raise ValueError(f"a prompt of {prompt_len} tokens is longer than the longest bucket, {self.lengths[-1]}.")
        return self.lengths[index]

    def pad(self, inputs: Mapping[str, torch.Tensor], pad_token_id: int) -> dict[str, torch.Tensor]:
        """A tokenizer's output, padded on the left to its bucket.

        Args:
            inputs: input_ids [B, S] and, where rows differ in length, attention_mask [B, S] (padded on the left).
            pad_token_id: the token that fills up; any valid token will do, no row attends to it.

        Returns:
            input_ids and attention_mask [B, bucket], on the device they came on.

        Raises:
            ValueError: for other inputs (token types, images): they would have to be padded in a way of their own.
        """
        if extra := sorted(set(inputs) - {"input_ids", "attention_mask"}):
            raise ValueError(f"PromptBuckets.pad takes input_ids and attention_mask; got also {', '.join(extra)}.")
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        missing = self.length_for(ids.shape[1]) - ids.shape[1]
        return {
            "input_ids": F.pad(ids, (missing, 0), value=pad_token_id),
            "attention_mask": F.pad(mask, (missing, 0), value=0),
        }

    def cache(self, config: Any) -> Any:
        """A static cache of `cache_len` slots for every layer, for `generate(past_key_values=...)`. `reset()` it before the
        next prompt. Layers with a sliding window get all slots too: their own static layers keep a Python count of tokens,
        which a compiled graph with static shapes is compiled anew for at each step.

        Raises:
            ValueError: for models with layers that are not attention (a recurrent state, say).
        """
        from transformers.cache_utils import Cache, StaticLayer, get_layer_types_and_kwargs

        types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        if other := sorted(set(types) - _ATTENTION_LAYERS):
            raise ValueError(
                f"{config.model_type} has layers of type {', '.join(other)}, which a plain static cache cannot hold. Use "
                f"cache_implementation='static' with max_cache_len={self.cache_len} in generate() instead."
            )
        return Cache(layers=[StaticLayer(max_cache_len=self.cache_len) for _ in types])
