"""The mask function that transformers calls: masks as row ranges wherever a mask function's structure proves them.

transformers describes a mask by composed functions (`transformers.masking_utils`). Those are recognised by what they are,
never by what they return: each known leaf gives a range of keys for a query row, `and` intersects ranges, `or` unites
ranges that both hold the row's own position. Everything else becomes the dense mask, and the reason is recorded.
No tensor value is read on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import masking_utils

from .mask_encoding import (
    check_range_mask_shape,
    decode_ranges,
    encode_ranges,
    expand_range_mask,
    is_range_shape,
)
from .tensor_parallel import check_heads

__all__ = [
    "check_range_mask_shape",
    "decode_ranges",
    "dense_reasons",
    "encode_ranges",
    "expand_range_mask",
    "is_range_shape",
    "tpu_attention_mask",
]

# Releases whose masking_utils the tests compare with, builder by builder.
KNOWN_RELEASES = ("5.22.", "5.23.", "5.24.")

# Models (folders of transformers/models) whose code indexes or computes on the mask it is given: those need the dense one
# (a test scans transformers for them).
DENSE_MODELS = frozenset(
    "axk2 beit deepseek_v32 doge dots3_note gemma4_assistant gemma4_unified_assistant glm5_next glm_moe_dsa "
    "granite_speech5 hy_v4 hy_v4_vl minimax_m3_vl mistral_large4 nemotron_asr_streaming parakeet pix2struct qwen4_exp sam3 "
    "sam3_lite_text siglip2 swin switch_transformers t5gemma2 xlnet".split()
)

# Models whose own code adds the mask to the scores and never calls the attention interface: right only with the additive
# mask that transformers builds for "eager".
OWN_ATTENTION = frozenset(
    "autoformer bark big_bird blip bloom bros canine clvp codegen convbert dab_detr falcon flava gpt_neo gpt_neox_japanese "
    "gptj groupvit ibert imagegpt layoutlmv3 led lilt longformer luke megatron_bert mpnet mpt mvp nystromformer omdet_turbo "
    "perceiver rembert roformer speecht5 squeezebert superglue table_transformer tapas trocr tvp vilt visual_bert vits "
    "xglm".split()
)

# Models that call the interface and are right only with the masks of "eager": deepseek_v4 appends a bias to its mask,
# bigbird_pegasus' encoder and informer's decoder add it to scores of their own, bridgetower uses one row of it for many
# queries.
EAGER_MASKS = frozenset("bigbird_pegasus bridgetower deepseek_v4 informer".split())

# Models that transformers never runs on SDPA. What their code means by no mask is what eager makes of it: every key,
# whatever their layers say of causality (nllb_moe's decoder says it has none, bridgetower's open layers that they have).
NEVER_SDPA = EAGER_MASKS | frozenset(
    "align clap flint gemma2 git gpt_oss granite_swa granitemoe_swa hy_v4 inkling2_loop longt5 markuplm "
    "mimo_v2_flash nllb_moe openai_privacy_filter patchtsmixer pegasus_x speech_to_text splinter switch_transformers "
    "t5gemma time_series_transformer vaultgemma videoprism".split()
)

# Parts (model types) that need the masks of "eager" in a model whose other parts take any: gemma4's audio tower cuts its
# mask in blocks.
_EAGER_PARTS = frozenset("gemma4_audio".split())

# Models that since 5.23 hand the last rows of their mask alone to layers that share keys with earlier ones.
_SLICED_MODELS = frozenset("gemma4 gemma4_unified".split())

# Model types whose block ids number contiguous runs of tokens (an image each), read in their own code. Elsewhere equal
# ids might stand apart, which is no range.
_CONTIGUOUS_BLOCKS = frozenset(
    "gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text diffusion_gemma diffusion_gemma_text "
    "deepseek_ocr2 deepseek_ocr2_vision".split()
)


def release() -> str:
    """The transformers release whose masks are read."""
    return str(transformers.__version__)


def release_is_known() -> bool:
    """Whether this transformers release is one whose masks have been compared; on others every mask stays dense."""
    return release().startswith(KNOWN_RELEASES)


def model_of(config: Any) -> str:
    """The folder of transformers/models that a configuration's class, or what it derives from, is defined in, or ""."""
    for kind in type(config).__mro__:
        package = kind.__module__.split(".")
        if package[:2] == ["transformers", "models"]:
            return package[2]
    return ""


def takes_eager_masks(config: Any) -> bool:
    """Whether the model of a configuration is right only with the additive masks of "eager"."""
    model = model_of(config)
    return model in OWN_ATTENTION or model in EAGER_MASKS or getattr(config, "model_type", "") in _EAGER_PARTS


def no_mask_means_every_key(module: Any) -> bool:
    """Whether a module is of a model in NEVER_SDPA."""
    package = type(module).__module__.split(".")
    return package[:2] == ["transformers", "models"] and package[2] in NEVER_SDPA


class _DenseReasons:
    """How often a mask stayed dense, by reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def record(self, reason: str) -> None:
        self._counts[reason] += 1

    def as_dict(self) -> dict[str, int]:
        return dict(self._counts)

    def clear(self) -> None:
        self._counts.clear()


dense_reasons = _DenseReasons()


@torch.compiler.assume_constant_result
def _record(reason: str) -> bool:
    dense_reasons.record(reason)
    return True


def tpu_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of one forward pass, for `AttentionMaskInterface` (arguments as transformers' builders pass them).

    Args:
        batch_size, q_length, kv_length: sizes B, Q, KV of the mask.
        q_offset: position of the first query, an int or (static cache) a 0-d integer tensor. kv_offset: of the first key.
        mask_function: (batch, head, q position, kv position) -> bool, composed from masking_utils' own functions.
        attention_mask: bool [B, seen tokens], False at padding; or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may stand for a mask that restricts nothing more.

    Returns:
        None (plain causal or full attention without padding, where transformers allows the skip and it is exact), a range
        mask (mask_encoding), or the dense bool [B, 1, Q, KV] mask of transformers' sdpa_mask; for OWN_ATTENTION and
        EAGER_MASKS models the additive one of its eager_mask.
    """
    if getattr(config, "distributed_config", None) is not None:
        check_heads(config)  # this is the first thing of ours that a forward pass calls, before the projections
    if config is not None and takes_eager_masks(config):
        _record(f"model {model_of(config)} adds its mask to the scores, or computes on an additive mask")
        return masking_utils.eager_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            dtype=kwargs.get("dtype", torch.float32),
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            device=device,
        )
    if config is not None and model_of(config) in NEVER_SDPA:
        allow_is_causal_skip = False
    refusal = _refusal(config, attention_mask, use_vmap)
    scope = _Scope(batch_size, q_length, kv_length, q_offset, kv_offset, config, device)
    if refusal is None:
        if attention_mask is None and _is_skippable(
            mask_function, scope, allow_is_causal_skip, allow_is_bidirectional_skip
        ):
            return None
        ranges = _ranges_of(mask_function, scope, _Context())
        if isinstance(ranges, _Ranges):
            return _encode(ranges, scope, attention_mask)
        refusal = ranges
    _record(refusal)
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


def _refusal(config: Any, attention_mask: torch.Tensor | None, use_vmap: bool) -> str | None:
    """Why no range may be built whatever the mask function is."""
    if not release_is_known():
        return f"transformers {transformers.__version__} is a release whose masks nobody has compared"
    if config is not None:
        model = model_of(config)
        if not model:
            return f"the code of {type(config).__name__}'s model is not transformers' own and may compute on its mask"
        if model in DENSE_MODELS:
            return f"model {model} computes on its mask"
        if model in _SLICED_MODELS and not release().startswith("5.22."):
            text = getattr(config, "text_config", config)
            if getattr(text, "num_kv_shared_layers", 0):
                return f"model {model} hands on the last rows of its mask alone"
    if attention_mask is not None and attention_mask.ndim != 2:
        return f"the padding mask has {attention_mask.ndim} dimensions"
    return None


@dataclass(frozen=True, slots=True)
class _Scope:
    """Sizes and positions of one mask."""

    batch: int
    q_len: int
    kv_len: int
    q_offset: int | torch.Tensor
    kv_offset: int
    config: Any
    device: torch.device | str

    def rows(self) -> torch.Tensor:
        """Absolute position of each query row, int64 [1, Q]."""
        return (torch.arange(self.q_len, device=self.device) + self.q_offset)[None]


@dataclass(frozen=True, slots=True)
class _Ranges:
    """lo <= key position < hi, each [1 or B, Q] or an int, in absolute positions; None is unbounded.

    Every range that this file makes holds its row's own position or is empty, which is what lets `or` unite two.
    """

    lo: torch.Tensor | None
    hi: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Context:
    """What encloses a mask function: `packed` says that an enclosing `and` keeps rows inside their own document;
    `positions` are the per-document positions that stand in for the rows (5.24 remaps them)."""

    packed: bool = False
    positions: torch.Tensor | None = None


def _code(function: Callable[..., Any]) -> Any:
    return getattr(function, "__code__", None)


_AND = _code(masking_utils.and_masks())
_OR = _code(masking_utils.or_masks())
_SLIDING = _code(masking_utils.sliding_window_overlay(1))
_SLIDING_BOTH = _code(masking_utils.sliding_window_bidirectional_overlay(1))
_CHUNKED = _code(masking_utils.chunked_overlay(1, torch.zeros(1)))
_PACKED = _code(masking_utils.packed_sequence_mask_function(torch.zeros(1)))
_BLOCKS = _code(masking_utils.blockwise_overlay(torch.zeros(1)))
_REMAPPED = (
    _code(masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, torch.zeros(1)))
    if hasattr(masking_utils, "remap_positions_for_packed_sequence")
    else object()
)


def _free(function: Callable[..., Any], name: str) -> Any:
    """The value that a closure holds under `name`."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents  # type: ignore[index]


def _is_skippable(
    function: Callable[..., Any], scope: _Scope, allow_causal: bool, allow_bidirectional: bool
) -> bool:
    """Whether None means the same as the mask: attention without a mask is top-left causal, or full for one query."""
    if allow_bidirectional and function is masking_utils.bidirectional_mask_function:
        return True
    if not allow_causal or isinstance(scope.q_offset, torch.Tensor):
        return False
    if _code(function) is _AND:
        # A window that reaches past the first key from the last row restricts nothing.
        parts = _free(function, "mask_functions")
        if len(parts) != 2 or _code(parts[0]) is not _SLIDING or parts[1] is not masking_utils.causal_mask_function:
            return False
        if scope.q_offset + scope.q_len - _free(parts[0], "sliding_window") > scope.kv_offset:
            return False
    elif function is not masking_utils.causal_mask_function:
        return False
    if scope.q_len == 1:
        return scope.q_offset + 1 == scope.kv_offset + scope.kv_len
    return scope.q_offset == 0 and scope.kv_offset == 0 and scope.q_len == scope.kv_len


def _ranges_of(function: Callable[..., Any], scope: _Scope, context: _Context) -> _Ranges | str:
    """The ranges of a mask function, or why it has none."""
    if function is masking_utils.bidirectional_mask_function:
        return _Ranges(None, None)
    rows = scope.rows()
    at = rows if context.positions is None else context.positions
    code = _code(function)
    if function is masking_utils.causal_mask_function:
        return _Ranges(None, rows + 1)
    if code is _SLIDING:
        return _Ranges(rows - _free(function, "sliding_window") + 1, None)
    if code is _SLIDING_BOTH:
        window = _free(function, "sliding_window")
        return _Ranges(rows - window, rows + window + 1)
    if code is _CHUNKED:
        size, padding = _free(function, "chunk_size"), _free(function, "left_padding").to(scope.device)[:, None]
        # Chunks count from each sequence's first real token (and, when packed, from its document's).
        into = (at - padding) % size
        return _Ranges(rows - into, rows - into + size)
    if code is _AND or code is _OR:
        return _combined(function, scope, context, is_and=code is _AND)
    if code is _PACKED:
        return _packed(_free(function, "packed_sequence_mask"), scope)
    if code is _BLOCKS:
        return _blocks(_free(function, "block_sequence_ids"), scope)
    if code is _REMAPPED:
        if not context.packed:
            return "positions are remapped outside a packed mask"
        # Inside a document positions count tokens, so a distance between positions is a distance between rows.
        positions = _free(function, "position_ids").to(scope.device)
        return _ranges_of(_free(function, "mask_function"), scope, _Context(True, positions))
    return f"mask function {getattr(function, '__qualname__', type(function).__name__)} is not one of transformers' own"


def _combined(function: Callable[..., Any], scope: _Scope, context: _Context, is_and: bool) -> _Ranges | str:
    parts = _free(function, "mask_functions")
    packed = context.packed or (is_and and any(_code(part) is _PACKED for part in parts))
    total: _Ranges | None = None
    for part in parts:
        ranges = _ranges_of(part, scope, _Context(packed, context.positions))
        if isinstance(ranges, str):
            return ranges
        total = ranges if total is None else (_intersection if is_and else _union)(total, ranges)
    return _Ranges(None, None) if total is None else total


def _intersection(a: _Ranges, b: _Ranges) -> _Ranges:
    lo = b.lo if a.lo is None else a.lo if b.lo is None else torch.maximum(a.lo, b.lo)
    hi = b.hi if a.hi is None else a.hi if b.hi is None else torch.minimum(a.hi, b.hi)
    return _Ranges(lo, hi)


def _union(a: _Ranges, b: _Ranges) -> _Ranges:
    """Both hold the row's own position (an empty one is made to: it ends and starts there), so the union has no gap."""
    lo = None if a.lo is None or b.lo is None else torch.minimum(a.lo, b.lo)
    hi = None if a.hi is None or b.hi is None else torch.maximum(a.hi, b.hi)
    return _Ranges(lo, hi)


def _packed(ids: torch.Tensor, scope: _Scope) -> _Ranges | str:
    """Document bounds of packed sequences. transformers numbers documents along the row, so each is one run."""
    if isinstance(scope.q_offset, torch.Tensor) or scope.q_offset != 0 or ids.shape[-1] != scope.q_len:
        return "packed sequences with a cache"
    first, last = _runs(ids.to(scope.device))
    return _Ranges(first, last)


def _blocks(ids: torch.Tensor, scope: _Scope) -> _Ranges | str:
    """Bounds of the block (an image, say) that each row lies in; rows outside blocks get an empty range at themselves."""
    model_type = getattr(scope.config, "model_type", "")
    if model_type not in _CONTIGUOUS_BLOCKS:
        return f"block ids of model type {model_type or 'unknown'} are not known to be contiguous"
    ids = ids.to(scope.device)
    first, last = _runs(ids)
    rows = scope.rows()
    index = rows.expand(ids.shape[0], -1)
    inside = ids.gather(1, index) >= 0
    return _Ranges(torch.where(inside, first.gather(1, index), rows), torch.where(inside, last.gather(1, index), rows))


def _runs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First position, and one past the last, of the run of equal ids around each position: int64 [B, S] each."""
    changes = F.pad((ids[:, 1:] != ids[:, :-1]).to(torch.int64), (1, 0))
    run = changes.cumsum(1)
    lengths = torch.zeros_like(run).scatter_add(1, run, torch.ones_like(run))
    last = lengths.cumsum(1).gather(1, run)
    return last - lengths.gather(1, run), last


def _encode(ranges: _Ranges, scope: _Scope, attention_mask: torch.Tensor | None) -> torch.Tensor:
    shape = (scope.batch, scope.q_len)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=scope.device)
    starts = zero if ranges.lo is None else ranges.lo - scope.kv_offset
    ends = zero + scope.kv_len if ranges.hi is None else ranges.hi - scope.kv_offset
    valid = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, scope.kv_len, scope.kv_offset)
        valid = padding[:, scope.kv_offset : scope.kv_offset + scope.kv_len].to(torch.bool)
        # Leading and trailing padding also bounds the ranges, so that whole blocks of it are skipped.
        slots = torch.arange(scope.kv_len, device=scope.device)
        starts = torch.maximum(starts, torch.where(valid, slots, scope.kv_len).amin(1, keepdim=True))
        ends = torch.minimum(ends, torch.where(valid, slots + 1, 0).amax(1, keepdim=True))
        valid = valid.expand(scope.batch, -1)
    return encode_ranges(starts.expand(shape), ends.expand(shape), valid, scope.kv_len)
