"""Attention on row ranges for TPU: each query row sees one contiguous run of keys.

`forward`, `decode`, and for training `forward_with_lse` and `backward`, are JAX functions; `flash_attn_forward` is the
same kernel as transformers calls attention.
"""

from .backward import backward
from .decode import decode
from .dense import forward_dense
from .forward import forward, forward_with_lse
from .paged import paged
from .torch_binding import flash_attn_forward, supports_flash_attn

__all__ = [
    "backward", "decode", "flash_attn_forward", "forward", "forward_dense", "forward_with_lse", "paged",
    "supports_flash_attn",
]  # fmt: skip
