"""Attention on row ranges for TPU: each query row sees one contiguous run of keys.

`forward` and `decode` are JAX functions; `flash_attn_forward` is the same kernel as transformers calls attention.
"""

from .decode import decode
from .forward import forward
from .torch_binding import flash_attn_forward, supports_flash_attn

__all__ = ["decode", "flash_attn_forward", "forward", "supports_flash_attn"]
