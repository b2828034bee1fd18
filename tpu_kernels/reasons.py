"""Why a call did not run on a kernel: stable codes, one sentence each, and what the user can do about it.

Codes are part of the public contract (`explain()`, logs and tests name them); sentences may be reworded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """One stable reason. `code` never changes; `sentence` says what happened, `remedy` what would change it."""

    code: str
    sentence: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}" + (f" {self.remedy}" if self.remedy else "")


_ALL = (
    Reason("kernel", "The call ran on the kernel."),
    Reason("disabled", "TPU_KERNELS_DISABLE is set.", "Unset it to use kernels."),
    Reason(
        "device",
        "Kernels run on device 'tpu' (and are emulated on 'cpu'); the tensors are elsewhere.",
        "Load the model with device_map='tpu'.",
    ),
    Reason(
        "dtype",
        "The kernel does not compute in this dtype.",
        "Load the model with dtype=torch.bfloat16 or torch.float32.",
    ),
    Reason("dropout", "Attention dropout is active and the kernel has none.", "Set attention_dropout=0.0."),
    Reason(
        "gradients",
        "A gradient is needed and the kernel has no backward.",
        "Use torch.no_grad() for inference.",
    ),
    Reason(
        "transformed",
        "torch.func (grad, vjp, jvp) or forward-mode AD differentiates the call; the kernel has the derivative of autograd "
        "only.",
        "Use backward() or torch.autograd.grad.",
    ),
    Reason("position_bias", "The model adds a position bias to the scores, which the kernel cannot add."),
    Reason(
        "dense_mask",
        "The mask is not a row range: each query-key pair has its own element. With few keys SDPA is faster, and the kernel "
        "gives no gradient then.",
        "Masks built by transformers' own builders become ranges; see explain() for the mask's own reason.",
    ),
    Reason(
        "range_mask",
        "The mask limits rows to ranges of keys (padding, a window, a cache longer than the queries), which the kernel "
        "does not take.",
    ),
    Reason(
        "selected_keys",
        "The model selects the keys of each query by index (sparse attention), which is no row range; the selection was put "
        "into the mask. With few keys SDPA is faster.",
    ),
    Reason("mask_batch", "The range mask has another batch size than the query."),
    Reason("head_dim", "The head dimension is not one that the kernel supports."),
    Reason("length", "The number of queries or keys is not one that the kernel supports."),
    Reason("v_head_dim", "Query and value head dimensions differ and the kernel needs them equal."),
    Reason("gqa", "Query and key heads differ in number and the kernel needs them equal."),
    Reason("softcap", "The kernel has no logit softcap."),
    Reason("sinks", "The kernel has no attention sinks."),
    Reason("batch_broadcast", "Query, key and value have different batch sizes."),
    Reason("empty", "The query, the keys or the values are empty (a zero-sized dimension)."),
    Reason(
        "output_attentions",
        "Attention weights were asked for, which no fused kernel keeps.",
        "Leave output_attentions unset.",
    ),
    Reason("unknown_kwarg", "The call carries a keyword argument that this package does not know."),
    Reason("no_kernel", "No kernel is installed for this call."),
)

REASONS: dict[str, Reason] = {reason.code: reason for reason in _ALL}


class FallbackError(RuntimeError):
    """Raised instead of falling back when strict mode is on (`register(strict=True)` or TPU_KERNELS_STRICT=1)."""
