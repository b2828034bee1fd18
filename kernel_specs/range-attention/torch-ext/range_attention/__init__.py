"""Attention on row ranges for TPU: each query row sees one contiguous run of keys. See `forward`."""

from .decode import decode
from .forward import forward

__all__ = ["decode", "forward"]
