"""JAX's splash attention for TPU as a kernel of tpu-kernels: full and causal attention."""

from .forward import forward

__all__ = ["forward"]
