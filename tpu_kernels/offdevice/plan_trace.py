"""The attention calls that a model makes, with no weights: one pass on device "meta" (run it in a worker: see `plan`).

Calls go through `attention.tpu_attention` itself, as if the tensors were on a TPU; what it decides, and the arguments
that it would give the kernel, are recorded. Masks are also made on the CPU, with real values, because the blocks that
a kernel visits depend on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .. import attention, masks, ops, routing, tuning
from ..reasons import REASONS
from ..request import AttentionRequest
from ..routing import Route
from . import models
from .worker import Stage

_NAME = "tpu_plan"


def trace_calls(job: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A job of `plan`: {"config", "phase", "batch", "prompt", "cache", "dtype", "folder"}; see `models.program`.

    Returns:
        "calls": each distinct attention call, as fields of `plan.Call`; "dense": why masks did not become ranges.
    """
    stage("build")
    recorder = _Recorder(position=0 if job["phase"] == "prefill" else job["prompt"])
    AttentionInterface.register(_NAME, recorder.attention)
    AttentionMaskInterface.register(_NAME, recorder.mask)
    masks.dense_reasons.clear()
    program = models.program(
        job["config"],
        attention=_NAME,
        phase=job["phase"],
        batch=job["batch"],
        prompt=job["prompt"],
        cache=job["cache"],
        dtype=job["dtype"],
    )
    model: Any = program.function
    recorder.names = {id(module): name for name, module in model.named_modules()}
    stage("trace")
    with torch.no_grad(), torch.device("meta"), recorder.as_on_a_tpu():
        model(*program.args, **program.kwargs)
    return {
        "calls": [call.described(Path(job["folder"]), job["phase"]) for call in recorder.calls.values()],
        "dense": masks.dense_reasons.as_dict(),
    }


@dataclasses.dataclass
class _Call:
    """One distinct call, and the modules that make it."""

    request: AttentionRequest
    route: Route
    scale: float
    op: tuple[tuple[Any, ...], dict[str, Any]] | None  # (tensors or None, statics by name) of the kernel's op
    values: torch.Tensor | None  # of the mask, on the CPU
    layers: list[str] = dataclasses.field(default_factory=list)

    def described(self, folder: Path, phase: str) -> dict[str, Any]:
        request, route = self.request, self.route
        kernel = None
        if self.op is not None:
            tensors, static = self.op
            kernel = {
                "arguments": [
                    None if each is None else {"dtype": str(each.dtype).removeprefix("torch."), "shape": list(each.shape)}
                    for each in tensors
                ],
                "static": {"kernel": route.kernel, "function": route.function, **static},
            }
        path = ""
        if self.values is not None:
            path = str(folder / f"{phase}-{id(self)}.npy")
            np.save(path, self.values.numpy())
        return {
            "layers": self.layers,
            "request": {**dataclasses.asdict(request), "dtype": str(request.dtype).removeprefix("torch.")},
            "scale": self.scale,
            "sees": _sees(self.values, request),
            "route": route.name,
            "reason": route.reason,
            "sentence": REASONS[route.reason].sentence,
            "remedy": REASONS[route.reason].remedy,
            "kernel": kernel,
            "mask_values": path,
        }


class _Recorder:
    def __init__(self, position: int) -> None:
        self.calls: dict[Any, _Call] = {}
        self.names: dict[int, str] = {}
        self._position = position  # of the first query, where the model holds it in a tensor
        # Masks that were made -> their values; the mask is held, so that its id stays its own.
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._decided: tuple[AttentionRequest, Route] | None = None

    @contextlib.contextmanager
    def as_on_a_tpu(self) -> Iterator[None]:
        """`tpu_attention` routes and tunes tensors on "meta" as those on a TPU, and remembers no plan."""

        def decide(request: AttentionRequest, specs: Any) -> Route:
            request = dataclasses.replace(request, device="tpu")
            self._decided = (request, routing.decide(request, specs))
            return self._decided[1]

        def tuning_for(device: str, *args: Any, **kwargs: Any) -> Any:
            return tuning.tuning_for("tpu", *args, **kwargs)

        with (
            mock.patch.object(attention, "decide", decide),
            mock.patch.object(attention, "tuning_for", tuning_for),
            # Compiled models do not pad the cache's length.
            mock.patch.object(attention, "_pads_keys", lambda *_: False),
            # torch cannot say whether autocast is on for "meta".
            mock.patch.object(torch, "is_autocast_enabled", lambda *_: False),
            # Read from values of position ids, which are not there: prompts of a plan are not packed.
            mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None),
        ):
            yield

    def mask(self, **kwargs: Any) -> torch.Tensor | None:
        made = masks.tpu_attention_mask(**kwargs)
        if made is None or made.dtype != torch.int32:
            return made
        padding = kwargs.get("attention_mask")
        known = kwargs | {
            "device": "cpu",
            "attention_mask": None if padding is None else torch.ones(padding.shape, dtype=torch.bool, device="cpu"),
        }
        if isinstance(kwargs.get("q_offset"), torch.Tensor):
            known["q_offset"] = self._position
        values = None
        # Masks of packed documents and of images hold tensors that have no values here.
        with torch.device("cpu"), contextlib.suppress(NotImplementedError):
            values = masks.tpu_attention_mask(**known)
        self._masks[id(made)] = (made, values)
        return made

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attention._plans.clear()
        self._decided = None
        with _KernelCalls() as calls:
            result = attention.tpu_attention(module, query, key, value, attention_mask, **kwargs)
        assert self._decided is not None
        request, route = self._decided
        _, values = self._masks.get(id(attention_mask), (None, None))
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        op = calls.found[-1] if calls.found else None
        static = tuple(op[1].items()) if op else ()
        digest = None if values is None else hash(values.numpy().tobytes())
        call = self.calls.setdefault((request, route, scale, static, digest), _Call(request, route, scale, op, values))
        call.layers.append(self.names.get(id(module), type(module).__name__))
        return result


class _KernelCalls(TorchDispatchMode):
    """Records calls of this package's ops: (tensors or None, statics by name)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == ops.NAMESPACE:
            names = [each.name for each in func._schema.arguments]
            tensors = [index for index, each in enumerate(func._schema.arguments) if "Tensor" in str(each.type)]
            given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
            self.found.append(
                (
                    tuple(given[names[index]] for index in tensors),
                    {name: each for index, (name, each) in enumerate(given.items()) if index not in tensors},
                )
            )
        return func(*args, **(kwargs or {}))


def _sees(values: torch.Tensor | None, request: AttentionRequest) -> str:
    """Which keys a query row sees, in words."""
    if values is None:
        return {"causal": "causal", "none": f"all {request.kv_len} keys"}.get(request.mask, request.mask)
    starts, ends = values[0, 0, -request.q_len :, 0], values[0, 0, -request.q_len :, 1]
    width = int((ends - starts).max())
    if request.q_len == 1:
        return f"{width} of {request.kv_len} slots"
    if bool((starts == starts[0]).all()):
        return f"{width} of {request.kv_len} keys" if bool((ends == ends[0]).all()) else "causal"
    return f"a window of {width}"
