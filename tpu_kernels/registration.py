"""Binding the attention and the mask function to a name in transformers, and taking it back."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packaging.version import Version

NAME = "tpu_attention"

_registered: set[str] = set()
_undo: list[Callable[[], None]] = []  # what takes back the hooks on models, while a name is registered


@dataclass(frozen=True, slots=True)
class Registration:
    """What `register()` did: the attention name, the kernels behind it, and what to know about this environment."""

    name: str
    kernels: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        kernels = ", ".join(self.kernels) or "no kernel"
        lines = [f'attn_implementation="{self.name}" runs on: {kernels}; every other call on SDPA (see explain()).']
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def register(name: str = NAME, *, kernels: Sequence[str] | None = None, strict: bool = False) -> Registration:
    """Register the attention and the mask function in transformers, so that `attn_implementation=name` selects them.

    Args:
        name: the attention name. Must not contain "flash", "sdpa", "flex_attention" or "|", nor look like "org/repo":
            transformers treats those names specially.
        kernels: names of the only kernels that calls under this attention name may take, in order of preference, for
            example ("splash-attention",); by default all installed ones, except those whose spec.toml says
            `on_request`. `tpu-kernels list` shows them.
        strict: raise `FallbackError` where a call would fall back to SDPA (also by TPU_KERNELS_STRICT=1).

    Returns:
        A `Registration` that says what was registered. Calling again with the same name changes `kernels` and `strict`.

    Raises:
        ValueError: for a name that transformers would misread or that something else has registered, a kernel that is
            not installed, or a spec.toml that cannot be read (`specs.SpecError`).
        ImportError: when jax or kernels is missing or too old. Nothing is registered then.
    """
    _check_name(name)
    _check_packages()
    from transformers import AttentionInterface, AttentionMaskInterface

    from . import attention, masks, tensor_parallel

    if name in AttentionInterface._global_mapping and name not in _registered:
        taken = AttentionInterface._global_mapping[name]
        raise ValueError(f"attention name {name!r} already belongs to {taken!r}. Choose another name.")
    chosen = _check_kernels(kernels)
    names = tuple(spec.name for spec in attention.installed_specs(chosen))
    attend = attention.tpu_attention if chosen is None else functools.partial(attention.tpu_attention, kernels=chosen)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, masks.tpu_attention_mask)
    if not _registered:
        _undo.extend((tensor_parallel.check_heads_at_load(), attention.LEDGER.watch_models()))
    _registered.add(name)
    attention.set_strict(strict)
    return Registration(name, names, _notes())


def unregister(name: str = NAME) -> None:
    """Remove what `register(name)` added. Models that still ask for `name` then fail in transformers with its KeyError.

    Raises:
        ValueError: when `name` is not registered by this package.
    """
    if name not in _registered:
        known = ", ".join(map(repr, registered_names())) or "none"
        raise ValueError(f"{name!r} is not registered by tpu_kernels (registered: {known}).")
    from transformers import AttentionInterface, AttentionMaskInterface

    del AttentionInterface._global_mapping[name]
    del AttentionMaskInterface._global_mapping[name]
    _registered.remove(name)
    if not _registered:
        while _undo:
            _undo.pop()()


def registered_names() -> tuple[str, ...]:
    """The attention names that this package has registered."""
    return tuple(sorted(_registered))


def _check_name(name: str) -> None:
    problem = ""
    if not isinstance(name, str) or not name:
        problem = "it must be a non-empty string"
    elif name in ("eager", "sdpa"):
        problem = "it is one of transformers' own"
    else:
        for part in ("flash", "flex_attention", "sdpa", "|"):
            if part in name:
                problem = f'transformers gives names that contain "{part}" a meaning of its own'
        if name.count("/") == 1:
            problem = "transformers takes names of the form org/repo for Hub repositories"
    if problem:
        raise ValueError(f"cannot register attention name {name!r}: {problem}. Use for example {NAME!r}.")


def _check_kernels(kernels: Sequence[str] | None) -> tuple[str, ...] | None:
    if kernels is None:
        return None
    if isinstance(kernels, str):
        raise ValueError(f"kernels={kernels!r} must be a sequence of kernel names, such as ({kernels!r},).")
    if not kernels or len(set(kernels)) < len(kernels):
        raise ValueError(f"kernels={kernels!r} must name at least one kernel, and none twice.")
    return tuple(kernels)


def _check_packages() -> None:
    """Find jax and kernels without importing them."""
    needs = {"jax": ("0.12", "jax"), "kernels": ("0.17.2", "kernels"), "transformers": ("5.22.2", "transformers")}
    for module, (lowest, dist) in needs.items():
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"tpu_kernels needs {dist} >= {lowest}, which is missing: pip install '{dist}>={lowest}'")
        found = importlib.metadata.version(dist)
        if Version(found) < Version(lowest):
            raise ImportError(
                f"tpu_kernels needs {dist} >= {lowest}, but {found} is installed: pip install '{dist}>={lowest}'"
            )


def _notes() -> tuple[str, ...]:
    notes = []
    if importlib.util.find_spec("torch_tpu") is None:
        notes.append("torch_tpu is not installed: no TPU here; on CPU the kernels are emulated (right, and slow).")
    return tuple(notes)
