"""Attention for TPU where each query row sees one contiguous run of keys."""

from .attention import forward

__all__ = ["forward"]
