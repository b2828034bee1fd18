"""TPU attention kernels for Hugging Face transformers.

    import tpu_kernels; tpu_kernels.register()
    AutoModelForCausalLM.from_pretrained(..., device_map="tpu", attn_implementation="tpu_attention")

Importing this package imports neither jax, torch_tpu nor a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .reasons import FallbackError
from .registration import Registration, register, unregister

if TYPE_CHECKING:
    import torch

    from .bucketing import PromptBuckets
    from .ledger import Explanation
    from .paged_cache import continuous_batching
    from .partials import attention_with_lse, merge_partials, position_ranges
    from .tensor_parallel import gather_explanations, merge_explanations, tensor_parallel_plan

__version__ = "0.1.0"
__all__ = [
    "FallbackError",
    "PromptBuckets",
    "Registration",
    "attention_with_lse",
    "continuous_batching",
    "explain",
    "gather_explanations",
    "merge_explanations",
    "merge_partials",
    "position_ranges",
    "register",
    "reset",
    "tensor_parallel_plan",
    "unregister",
]

# Found in these modules on first use, so that importing the package imports no torch.
_LAZY = {
    "PromptBuckets": "bucketing",
    "continuous_batching": "paged_cache",
    **dict.fromkeys(("attention_with_lse", "merge_partials", "position_ranges"), "partials"),
    **dict.fromkeys(("gather_explanations", "merge_explanations", "tensor_parallel_plan"), "tensor_parallel"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def explain(model: torch.nn.Module | None = None) -> Explanation:
    """Where attention calls went since the last `reset()`: per layer, the route, the reason and the number of calls.

    Args:
        model: limit the table to one model; by default every live model.

    Returns:
        An `Explanation`; print it for the table, or read its `rows`. `never_called` names models that accept the
        attention name but never called the attention interface.
    """
    from .attention import LEDGER
    from .masks import dense_reasons
    from .registration import registered_names

    return LEDGER.explain(dense_reasons.as_dict(), registered_names(), model)


def reset() -> None:
    """Forget all counted calls, shapes and warnings given."""
    from .attention import LEDGER, forget_plans
    from .masks import dense_reasons

    LEDGER.clear()
    forget_plans()
    dense_reasons.clear()
