"""Do the installed versions and this environment fit together? Findings, each with its remedy. No device is opened."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

Level = Literal["ok", "note", "problem"]

# Oldest version that works, and the one that everything here is tested with.
PACKAGES = {
    "torch": ("2.14", "2.14.1"),
    "torch_tpu": ("0.2.0", "0.2.0"),
    "transformers": ("5.22.2", "5.22.2"),
    "kernels": ("0.17.2", "0.17.2"),
    "jax": ("0.12", "0.12.0.1"),
    "jaxlib": ("0.12", "0.12.0.1"),
    "libtpu": ("0.0.52", "0.0.52"),
    "numpy": ("2.0", "2.5.5"),
}
# transformers release -> the kernels versions that its own Hub loading (attn_implementation="org/repo") accepts.
_HUB_GATES = ((Version("5.23"), SpecifierSet(">=0.18.2,<0.19")), (Version("5.20.2"), SpecifierSet(">=0.17.2,<0.18")))
_TELEMETRY = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. remedy is empty unless there is something to do."""

    level: Level
    subject: str
    found: str
    remedy: str = ""


def examine(load_kernels: bool = True) -> list[Finding]:
    """Look at Python, packages, how they fit, the TPU, settings and (which imports jax) whether each kernel loads."""
    findings = [*_host(), *_packages()]
    versions = {name: _version(name) for name in PACKAGES}
    findings += _hub_gate(versions["transformers"], versions["kernels"])
    if versions["torch"] is not None:
        findings += _accelerator(versions["torch_tpu"])
        findings += _placement()
    findings += _settings()
    if load_kernels and all(versions[name] is not None for name in ("torch", "kernels", "jax", "transformers")):
        findings += _masks()
        findings += _kernels()
    return findings


def _version(package: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def _host() -> Iterator[Finding]:
    yield Finding("ok", "Python", platform.python_version())
    if sys.platform != "linux":
        yield Finding("problem", "system", sys.platform, "torch_tpu and libtpu exist for Linux only.")


def _packages() -> Iterator[Finding]:
    for name, (lowest, tested) in PACKAGES.items():
        version = _version(name)
        if version is None:
            yield Finding("problem", name, "not installed", f"pip install '{name}>={lowest}'")
        elif version < Version(lowest):
            yield Finding("problem", name, f"{version}, too old", f"pip install '{name}>={lowest}'")
        elif version.public != tested:
            yield Finding("note", name, f"{version} (tested with {tested})")
        else:
            yield Finding("ok", name, str(version))


def _hub_gate(transformers: Version | None, kernels: Version | None) -> Iterator[Finding]:
    if transformers is None or kernels is None:
        return
    wanted = next((wanted for since, wanted in _HUB_GATES if transformers >= since), None)
    if wanted is None or kernels in wanted:
        return
    yield Finding(
        "note",
        "transformers' own Hub loading",
        f'closed: attn_implementation="org/repo" needs kernels{wanted}, and {kernels} is installed',
        "tpu_kernels.register() calls kernels itself and is not affected. For the other route install a matching pair, "
        "such as transformers 5.22.2 with kernels 0.17.2.",
    )


def _accelerator(torch_tpu: Version | None) -> Iterator[Finding]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    chips = torch.accelerator.device_count() if accelerator is not None and accelerator.type == "tpu" else 0
    if chips:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_tpu calls get_device_name experimental
            name = torch.tpu.get_device_name()  # type: ignore[attr-defined]
        yield Finding("ok", "TPU", f"{chips} x {name} (found by torch_tpu, not opened)")
        if not hasattr(torch.backends, "tpu"):
            yield Finding(
                "note",
                "torch.backends.tpu",
                "missing, so kernels by itself refuses every torch-tpu build",
                "Nothing to do for this package, which stands in for it while it loads a kernel.",
            )
    elif torch_tpu is not None:
        what = "none found" + (f"; torch's accelerator is {accelerator.type}" if accelerator is not None else "")
        yield Finding("note", "TPU", what, "Kernels are emulated on CPU: right, and slow. On a TPU VM, check that the "
                      "process may read /dev/accel* or /dev/vfio, and that no other process holds the chips.")  # fmt: skip


def _placement() -> Iterator[Finding]:
    """Models of this process that ask for a kernel and sit on CPU beside a TPU."""
    from . import ledger, registration, tuning

    names = set(registration.registered_names())
    if not names or not tuning.attached_chip():
        return
    for model in ledger.live_models():
        on_cpu = any(parameter.device.type == "cpu" for parameter in model.parameters())
        if on_cpu and ledger.uses(model, names):
            yield Finding(
                "problem", f"model {type(model).__name__}", "on CPU, where its kernels are emulated",
                ledger.PLACE_ON_TPU[0].upper() + ledger.PLACE_ON_TPU[1:],
            )  # fmt: skip


def _settings() -> Iterator[Finding]:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if "tpu" in platforms.split(","):
        yield Finding(
            "problem",
            "JAX_PLATFORMS",
            platforms,
            "jax would open the TPU that torch_tpu holds: unset it, or set it to cpu (jax only traces here).",
        )
    for name in _TELEMETRY:
        if os.environ.get(name):
            yield Finding(
                "note",
                name,
                os.environ[name],
                "This package is not affected. kernels.get_kernel itself (0.17.2) sends a malformed header when telemetry "
                "is off and cannot reach the Hub: set HF_HUB_USER_AGENT_ORIGIN to any word if you call it.",
            )
    for name in (
        "TPU_KERNELS_DISABLE", "TPU_KERNELS_STRICT", "TPU_KERNELS_TARGET", "TPU_KERNELS_CACHE", "TPU_KERNELS_TRUST",
        "TPU_KERNELS_LOCK", "TPU_KERNELS_SPECS", "LOCAL_KERNELS",
    ):  # fmt: skip
        if os.environ.get(name):
            yield Finding("note", name, os.environ[name])


def _masks() -> Iterator[Finding]:
    from . import masks

    if not masks.release_is_known():
        yield Finding(
            "note",
            "masks",
            f"transformers {masks.release()} has not been compared: masks stay dense and run on SDPA",
            f"Use a release that has been: {', '.join(masks.KNOWN_RELEASES)}x.",
        )


def _kernels() -> Iterator[Finding]:
    from . import hub, specs

    try:
        installed = specs.load_specs()
    except specs.SpecError as error:
        yield Finding("problem", "kernels", "not read", str(error))
        return
    for spec in installed:
        try:
            loaded = hub.load_kernel(spec)
        except hub.KernelLoadError as error:
            yield Finding("problem", f"kernel {spec.name}", "does not load", str(error))
        else:
            yield Finding("ok", f"kernel {spec.name}", f"version {spec.version} from {loaded.source}: {loaded.location}")
