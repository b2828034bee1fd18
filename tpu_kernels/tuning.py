"""Block sizes and memory budgets by TPU generation."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass

import torch

# Scoped VMEM a kernel may plan with, in bytes: the core's VMEM (jax's TpuInfo; v4 16 MiB, v5e 128, v5p 64, v6e 128,
# tpu7x 64) less room for the compiler's own spills. v5e is kept at 64 MiB, the smaller of two published figures.
_MIB = 1 << 20
_VMEM_BYTES = {"v4": 14 * _MIB, "v5e": 56 * _MIB, "v5p": 56 * _MIB, "v6e": 100 * _MIB, "tpu7x": 56 * _MIB}

# Device names as torch_tpu 0.2 gives them (it reads the PCI bus and opens no device).
_GENERATIONS = {"TPU v4": "v4", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e", "TPU v7": "tpu7x"}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Static arguments of a kernel function. 0 lets the kernel choose."""

    block_q: int = 0
    block_kv: int = 0
    vmem_bytes: int = 0


def attached_chip() -> str:
    """torch_tpu's name of the attached TPU ("TPU v6e"), "" where there is none. No device is opened."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "tpu":
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_tpu calls get_device_name experimental
        return str(torch.tpu.get_device_name())  # type: ignore[attr-defined]


@functools.cache
def generation() -> str:
    """The TPU generation that kernels are built for: TPU_KERNELS_TARGET, else the attached chip's, else ""."""
    if target := os.environ.get("TPU_KERNELS_TARGET"):
        if target not in _VMEM_BYTES:
            raise ValueError(f"TPU_KERNELS_TARGET={target!r} is not one of {', '.join(_VMEM_BYTES)}.")
        return target
    return _GENERATIONS.get(attached_chip(), "")


def tuning_of_generation(generation: str) -> Tuning:
    """Block sizes and VMEM budget on a TPU generation; "" is the smallest."""
    return Tuning(vmem_bytes=_VMEM_BYTES.get(generation, 0))


@functools.cache
def tuning_for(device: str, function: str) -> Tuning:
    """Block sizes and VMEM budget for a kernel function on "tpu" or "cpu" (emulated: the kernel's own choice)."""
    if device != "tpu":
        return Tuning()
    return tuning_of_generation(generation())
