"""From what a user types to a KernelSpec: an installed kernel, a kernel folder, or any Hub repository."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

from . import hub
from .builds import cache_dir
from .specs import COMMIT, REPOSITORY, Capabilities, KernelFunction, KernelSpec, Source, SpecError, load_specs, read_spec

# What a repository without a spec.toml is asked for. The checks tell what of it is true.
_EVERYTHING = Capabilities(
    dtypes=("float32", "bfloat16"),
    masks=("none", "ranges", "ranges+validity"),
    max_head_dim=1 << 20,
    gqa=True,
    v_head_dim_may_differ=True,
    softcap=True,
    sinks=True,
    dropout=False,
    position_bias=False,
    gradients=False,
    devices=("tpu", "cpu"),
    generations=("v4", "v5e", "v5p", "v6e", "tpu7x"),
)
_WITHOUT_RANGES = ("none",)
_DECODE_ROWS = 64


def find(text: str) -> KernelSpec:
    """The kernel that `text` stands for.

    Args:
        text: the name of an installed kernel; a kernel folder or its spec.toml; or a Hub repository, "org/name" (version 1),
            "org/name@v2" or "org/name@<commit>".

    Raises:
        SpecError: for a text that is none of these, or a spec.toml that cannot be read.
        KernelLoadError: for a repository that cannot be loaded, or whose publisher is not trusted.
    """
    installed = {spec.name: spec for spec in load_specs()}
    if text in installed:
        return installed[text]
    path = Path(text).expanduser()
    if path.name == "spec.toml":
        path = path.parent
    if (path / "spec.toml").exists():
        return read_spec(path)
    repo, _, pin = text.partition("@")
    if not REPOSITORY.fullmatch(repo):
        raise SpecError(
            f"{text!r} is neither an installed kernel ({', '.join(installed)}), nor a kernel folder with a spec.toml, nor "
            "a Hub repository, org/name[@vN or @commit]."
        )
    if not pin:
        for spec in installed.values():
            if spec.source.hub == repo:
                return spec
    return _of_repository(repo, _source(text, repo, pin or "v1"))


def _source(text: str, repo: str, pin: str) -> Source:
    if version := re.fullmatch(r"v([1-9][0-9]*)", pin):
        return Source(repo, version=int(version[1]))
    if COMMIT.fullmatch(pin):
        return Source(repo, revision=pin)
    raise SpecError(f"{text!r}: {pin!r} must be a version, such as v1, or a full commit id.")


def _of_repository(repo: str, source: Source) -> KernelSpec:
    """A spec made up for a repository: loaded, and its functions looked at."""
    name = re.sub("[^a-z0-9]+", "-", repo.lower()).strip("-")
    made = KernelSpec(
        name=name if name[0].isalpha() else f"hub-{name}",
        module="kernel",
        version=source.version,
        summary=f"Hub repository {repo}",
        source=source,
        capabilities=_EVERYTHING,
        functions=(),
        folder=cache_dir() / "hub",
        found_by=f"Hub repository {repo}",
    )
    module = hub.load_kernel(made).module
    forward = getattr(module, "forward", None)
    if not callable(forward):
        raise hub.KernelLoadError(
            f"kernel {repo}: its module has no function forward(q, k, v, starts, ends, ...), so it cannot be called. "
            "docs/publish-a-kernel.md says what a kernel has to offer."
        )
    takes_ranges = "causal" not in inspect.signature(forward).parameters
    functions = [KernelFunction("forward")]
    if takes_ranges and callable(getattr(module, "decode", None)):
        functions.append(KernelFunction("decode", _DECODE_ROWS))
    gradients = takes_ranges and all(callable(getattr(module, each, None)) for each in ("forward_with_lse", "backward"))
    if gradients:
        functions += [KernelFunction("forward_with_lse"), KernelFunction("backward")]
    masks = _EVERYTHING.masks if takes_ranges else _WITHOUT_RANGES
    return replace(
        made, functions=tuple(functions), capabilities=replace(_EVERYTHING, masks=masks, gradients=gradients)
    )
