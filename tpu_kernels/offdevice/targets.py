"""The TPU generations that libtpu compiles for without a TPU, with the figures that plans and estimates need.

Figures are per JAX device, as the ahead-of-time topology exposes it: v4 and tpu7x give one TensorCore a
device (half a chip), v5p gives both cores of a chip as one device ("megacore").

Sources: VMEM, HBM, MXU count and width are jax 0.12.0.1's `jax._src.tpu_info`; HBM bandwidth is the Cloud TPU
documentation's per-chip figure (https://cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x) divided by the
devices of a chip. Clocks of v4, v5e and v5p follow from peak = 2 x MXUs x width^2 x cores x clock; those of
v6e and tpu7x are not
published: they are the values at which MXUs x width^2 x 2 x 2 rows a cycle (read off compiled programs) gives
    the
published peak.
"""

from __future__ import annotations

import dataclasses

MIB = 2**20
GIB = 2**30


class UnknownTargetError(ValueError):
    """The name is not one of a supported TPU generation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One TPU generation, per JAX device."""

    name: str
    topology: str  # libtpu's name of a small topology of this generation
    device_kind: str  # what jax and torch_tpu call the device
    cores: int  # TensorCores a device
    vmem_bytes: int  # a core
    hbm_bytes: int  # a device
    hbm_bytes_per_second: float  # a device, peak
    clock_hz: float
    mxus: int  # a core
    mxu_width: int
    mxu_rows_per_cycle: int

    @property
    def flops_per_second(self) -> float:
        """Peak dense bfloat16 FLOP/s of a device."""
        return 2.0 * self.cores * self.mxus * self.mxu_width**2 * self.mxu_rows_per_cycle * self.clock_hz


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="v4",
            topology="v4:2x2x1",
            device_kind="TPU v4",
            cores=1,
            vmem_bytes=16 * MIB,
            hbm_bytes=16 * GIB,  # half of 32 GiB
            hbm_bytes_per_second=614e9,  # half of 1228
            clock_hz=1.05e9,
            mxus=4,
            mxu_width=128,
            mxu_rows_per_cycle=1,
        ),
        Target(
            name="v5e",
            topology="v5e:1x1",
            device_kind="TPU v5 lite",
            cores=1,
            vmem_bytes=128 * MIB,
            hbm_bytes=16 * GIB,
            hbm_bytes_per_second=819e9,
            clock_hz=1.5e9,
            mxus=4,
            mxu_width=128,
            mxu_rows_per_cycle=1,
        ),
        Target(
            name="v5p",
            topology="v5p:2x2x1",
            device_kind="TPU v5",
            cores=2,
            vmem_bytes=64 * MIB,
            hbm_bytes=95 * GIB,
            hbm_bytes_per_second=2765e9,
            clock_hz=1.75e9,
            mxus=4,
            mxu_width=128,
            mxu_rows_per_cycle=1,
        ),
        Target(
            name="v6e",
            topology="v6e:1x1",
            device_kind="TPU v6 lite",
            cores=1,
            vmem_bytes=128 * MIB,
            hbm_bytes=32 * GIB,
            hbm_bytes_per_second=1640e9,
            clock_hz=1.75e9,
            mxus=2,
            mxu_width=256,
            mxu_rows_per_cycle=2,
        ),
        Target(
            name="tpu7x",
            topology="tpu7x:2x2x1",
            device_kind="TPU7x",
            cores=1,
            vmem_bytes=64 * MIB,
            hbm_bytes=96 * GIB,  # half of 192 GiB
            hbm_bytes_per_second=3690e9,  # half of 7380
            clock_hz=2.2e9,
            mxus=2,
            mxu_width=256,
            mxu_rows_per_cycle=2,
        ),
    )
}

_ALIASES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "trillium": "v6e",
    "7x": "tpu7x",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
}


def target(name: str) -> Target:
    """The generation called `name` (v4, v5e, v5p, v6e, tpu7x; 7x, v7x, ironwood and trillium are understood
    too).

    Raises:
        UnknownTargetError: for any other name, with the supported ones named.
    """
    key = name.strip().lower()
    found = TARGETS.get(_ALIASES.get(key, key))
    if found is None:
        raise UnknownTargetError(
            f"unknown TPU generation {name!r}: libtpu can compile ahead of time for {', '.join(TARGETS)} here"
        )
    return found


def target_of_device_kind(device_kind: str) -> Target | None:
    """The generation of a device that calls itself `device_kind` ("TPU v6 lite"), or None when it is none of
    ours."""
    return next((each for each in TARGETS.values() if each.device_kind == device_kind), None)
