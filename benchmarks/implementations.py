"""Who is compared: for each implementation, the programs that stand for it on a shape, or why it cannot do the shape."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpu_kernels.offdevice import aot, emit
from tpu_kernels.offdevice.aot import Array
from tpu_kernels.offdevice.plan import reduced

from .shapes import Shape

HERE = Path(__file__).resolve().parent
OURS = "range-attention"
BASE = "sdpa"
KIND = "bfloat16"
_SPLASH_BLOCKS = (512, 1024, 2048)


class CannotError(Exception):
    """The implementation cannot do the shape; the text says why."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run an implementation: the fastest of them counts.

    Attributes:
        label: what sets it apart (block sizes); "" where there is one only.
        job: a JAX function, or a torch program that torch_tpu emits.
        values: position of an argument -> its values, where they decide which blocks are visited.
        times: how often the estimated part stands in the whole call.
        whole: the whole call's job, for its memory, where `times` is not 1.
    """

    label: str
    job: aot.FunctionJob | emit.FunctionJob | emit.ModuleJob
    values: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    times: float = 1.0
    whole: emit.FunctionJob | emit.ModuleJob | None = None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Something that computes attention.

    Attributes:
        name, summary: for reports.
        candidates: (shape, generation) -> the programs; raises CannotError.
        sources: files whose text decides the programs.
        packages: distributions whose version does.
        kernel: name of the installed kernel whose source does, or "".
    """

    name: str
    summary: str
    candidates: Callable[[Shape, str], list[Candidate]]
    sources: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()
    kernel: str = ""

    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(name for name in self.packages if version(name) is None)

    def spec(self) -> Any:
        """The installed kernel's KernelSpec."""
        from tpu_kernels.specs import load_specs

        return next(each for each in load_specs() if each.name == self.kernel)


@functools.cache
def kernel_digest(name: str) -> str:
    """Of the source of the installed kernel called `name`."""
    from tpu_kernels import staging
    from tpu_kernels.specs import load_specs

    return next(staging.content_hash(spec.folder) for spec in load_specs() if spec.name == name)


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def arrays(shape: Shape) -> tuple[Array, Array, Array]:
    """q, k, v."""
    keys = (shape.batch, shape.kv_heads, shape.kv_len)
    return (
        Array(KIND, (shape.batch, shape.q_heads, shape.q_len, shape.head_dim)),
        Array(KIND, (*keys, shape.head_dim)),
        Array(KIND, (*keys, shape.v_head_dim)),
    )


def out_array(shape: Shape) -> Array:
    return Array(KIND, (shape.batch, shape.q_heads, shape.q_len, shape.v_head_dim))


# --- this package's kernel -----------------------------------------------------------------------------------------


def range_mask(shape: Shape) -> np.ndarray | None:
    """The range mask that transformers' mask becomes (mask_encoding.py), int32 [batch, 1, q_len, 2]; None where
    `is_causal` tells. A static cache always comes with a mask."""
    if shape.plain and shape.pass_ != "decode":
        return None
    made = np.stack(shape.ranges(), -1)[None, None]
    return np.repeat(made, shape.batch, 0)


def _range_attention(shape: Shape, target: str) -> list[Candidate]:
    from tpu_kernels import routing
    from tpu_kernels.tuning import TABLE, tuning_of

    spec = IMPLEMENTATIONS[OURS].spec()
    asked = request(shape)
    reason = routing.refusal(asked, spec)
    if reason is not None:
        raise CannotError(f"routed to a fallback: {reason}")
    mask = range_mask(shape)
    call = tuning_call(shape)
    tuning = tuning_of(target, spec.folder / TABLE, call)
    static: dict[str, Any] = {
        "kernel": OURS,
        "scale": shape.head_dim**-0.5,
        "softcap": 0.0,
        "causal": mask is None and shape.sees == "causal",
        "has_validity": False,
        "precision": "default",
        **dataclasses.asdict(tuning),
    }
    tensors: tuple[Array | None, ...] = (
        *arrays(shape),
        None if mask is None else Array("int32", mask.shape),
        Array(KIND, (shape.q_heads,)) if shape.sinks else None,
    )
    values = {} if mask is None else {3: mask}
    if shape.pass_ == "training":
        job = aot.FunctionJob(
            f"{HERE / 'training_step.py'}:forward_and_backward", (*tensors, out_array(shape)), target, static
        )
    else:
        static["function"] = call.function
        job = aot.FunctionJob("tpu_kernels.offdevice.kernel_call:call", tensors, target, static)
    return [Candidate("", job, values)]


def request(shape: Shape) -> Any:
    """The call as routing sees it."""
    import torch

    from tpu_kernels.request import AttentionRequest

    mask = range_mask(shape)
    features = dict.fromkeys((each.name for each in dataclasses.fields(AttentionRequest)), False)  # what is not named
    named = {
        "batch": shape.batch, "kv_batch": shape.batch, "mask_batch": 0 if mask is None else shape.batch,
        "q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "q_len": shape.q_len, "kv_len": shape.kv_len,
        "head_dim": shape.head_dim, "v_head_dim": shape.v_head_dim, "dtype": torch.bfloat16, "device": "tpu",
        "mask": ("causal" if shape.sees == "causal" else "none") if mask is None else "ranges",
        "sinks": shape.sinks, "needs_grad": shape.pass_ == "training", "unknown": (),
    }  # fmt: skip
    return AttentionRequest(**(features | named))


def tuning_call(shape: Shape) -> Any:
    """The call as this package's kernel's table of block sizes knows it (`tuning.Call`)."""
    from tpu_kernels import routing
    from tpu_kernels.tuning import Call

    asked = request(shape)
    function = routing.pick_function(asked, IMPLEMENTATIONS[OURS].spec())
    rows = shape.q_len * (asked.group_size if function == "decode" else 1)
    return Call(function, KIND, asked.mask, shape.head_dim, shape.v_head_dim, rows, shape.kv_len)


# --- torch_tpu's SDPA ----------------------------------------------------------------------------------------------


def _part(shape: Shape) -> Shape:
    """The shape with as few sequences and KV heads as one estimate of SDPA can follow; those left out are alike."""
    batch, kv_heads = reduced({"request": dataclasses.asdict(shape)})
    return dataclasses.replace(shape, batch=batch, kv_heads=kv_heads, q_heads=shape.q_heads // shape.kv_heads * kv_heads)


def _in_parts(shape: Shape, job: Callable[[Shape], emit.FunctionJob | emit.ModuleJob]) -> list[Candidate]:
    part = _part(shape)
    times = shape.batch * shape.kv_heads / (part.batch * part.kv_heads)
    return [Candidate("", job(part), times=times, whole=job(shape) if times > 1 else None)]


def _dense_mask(shape: Shape) -> Array:
    """As numbers to add: the layers of a model share the work of making it."""
    batch = shape.batch if shape.pass_ == "decode" else 1
    return Array(KIND, (batch, 1, shape.q_len, shape.kv_len))


def _sdpa(shape: Shape, target: str) -> list[Candidate]:
    def job(part: Shape) -> emit.FunctionJob:
        if shape.pass_ == "training":
            return emit.FunctionJob(f"{HERE / 'torch_calls.py'}:sdpa_and_gradients", (*arrays(part), out_array(part)))
        mask = None if shape.plain else _dense_mask(part)
        return emit.FunctionJob(
            f"{HERE / 'torch_calls.py'}:sdpa", (*arrays(part), mask), {"causal": mask is None and shape.sees == "causal"}
        )

    if shape.pass_ == "training" and shape.sees != "causal":
        raise CannotError("the training step is written for causal attention only")
    return _in_parts(shape, job)


def _sdpa_transformers(shape: Shape, target: str) -> list[Candidate]:
    if shape.pass_ == "training":
        raise CannotError("autograd needs a device, so transformers' own call is not emitted for training")

    def job(part: Shape) -> emit.ModuleJob:
        parameters = {
            name: getattr(part, name)
            for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim")
        }
        more = {"dtype": KIND, "dense_mask": shape.sees != "full", "scale": shape.head_dim**-0.5}
        return emit.ModuleJob("tpu_kernels.offdevice.models:sdpa_call", parameters | more)

    return _in_parts(shape, job)


# --- peers ---------------------------------------------------------------------------------------------------------


def _peer(
    function: str,
    blocks: tuple[int, ...],
    *,
    variants: Callable[[Shape], list[tuple[int, str]]] = lambda shape: [],
    sinks: bool = False,
    sees: tuple[str, ...] = ("causal", "full", "window", "documents"),
    v_head_dim: bool = True,
    whole_lanes: bool = False,
    aligned: bool = False,
) -> Callable[[Shape, str], list[Candidate]]:
    """Programs of a function in peers.py, one for each block size, and for further (block size, variant).

    sinks, sees, v_head_dim: what it can do. whole_lanes: head sizes over 128 must be multiples of it.
    aligned: it does not keep the keys that its caller filled a length up with apart.
    """

    def candidates(shape: Shape, target: str) -> list[Candidate]:
        if shape.pass_ == "decode":
            raise CannotError("no decode: it computes whole blocks of query rows and reads the whole cache")
        if shape.sees not in sees:
            raise CannotError(f"no mask of kind {shape.sees!r}")
        if shape.sinks and not sinks:
            raise CannotError("no sinks")
        if shape.head_dim != shape.v_head_dim and not v_head_dim:
            raise CannotError("no head size of v other than k's")
        if whole_lanes and shape.head_dim > 128 and shape.head_dim % 128:
            raise CannotError("head sizes over 128 must be multiples of 128")
        if aligned and shape.q_len % 128:
            raise CannotError("the length must be whole blocks")
        tensors = (
            *arrays(shape),
            Array(KIND, (shape.q_heads,)) if shape.sinks else None,
            out_array(shape) if shape.pass_ == "training" else None,
        )
        static = {"sees": shape.sees, "window": shape.window, "document": shape.document, "interpret": False}
        return [
            Candidate(
                f"blocks of {block}" + (f", {variant}" if variant else ""),
                aot.FunctionJob(
                    f"{HERE / 'peers.py'}:{function}", tensors, target, {**static, "block": block, "variant": variant}
                ),
            )
            for block, variant in [*((block, "") for block in blocks), *variants(shape)]
        ]

    return candidates


def _tokamax_variants(shape: Shape) -> list[tuple[int, str]]:
    """What its authors offer for some calls, and refuse for others."""
    if shape.sees == "causal" and shape.pass_ == "forward":
        return [(1024, "diagonal"), (2048, "diagonal")]
    if shape.sees == "window" and not shape.sinks and shape.q_heads > shape.kv_heads:
        return [(256, "stacked")]
    return []


_PEERS = (HERE / "peers.py",)

IMPLEMENTATIONS: dict[str, Implementation] = {
    each.name: each
    for each in (
        Implementation(
            OURS,
            "this package, as its op calls the kernel",
            _range_attention,
            (HERE / "training_step.py",),
            ("jax", "torch"),
            OURS,
        ),
        Implementation(
            BASE,
            "torch_tpu's SDPA at its best: is_causal where that tells, KV heads as they are",
            _sdpa,
            (HERE / "torch_calls.py",),
            ("torch", "torch_tpu"),
        ),
        Implementation(
            "sdpa-transformers",
            "SDPA as a compiled transformers model calls it: a dense mask, K and V repeated",
            _sdpa_transformers,
            (),
            ("torch", "torch_tpu", "transformers"),
        ),
        Implementation(
            "torch-tpu-splash",
            "torch_tpu's splash_sdpa",
            _peer("torch_tpu_splash", (512,), sees=("causal", "full", "window"), aligned=True),
            _PEERS,
            ("jax", "torch_tpu"),
        ),
        Implementation(
            "jax-splash",
            "JAX's splash attention",
            _peer("jax_splash", _SPLASH_BLOCKS, sinks=True),
            _PEERS,
            ("jax",),
        ),
        Implementation(
            "jax-flash",
            "JAX's older flash attention, K and V repeated",
            _peer("jax_flash", (1024,), sees=("causal", "full", "documents"), v_head_dim=False, whole_lanes=True),
            _PEERS,
            ("jax",),
        ),
        Implementation(
            "tokamax-splash",
            "tokamax's splash attention",
            _peer("tokamax_splash", (512, 1024, 2048), sinks=True, variants=_tokamax_variants),
            _PEERS,
            ("jax", "tokamax"),
        ),
    )
}
