"""What a TPU would do with a model's attention, told before there is a TPU.

    plan = make_plan(read_config("Qwen3-0.6B/config.json"), target="v6e", batch=8, prompt=4096, new_tokens=512)
    for row in plan.rows:
        print(row.phase, row.layers, row.route, row.reason, row.kernel_seconds, row.sdpa_seconds)

The model is traced with no weights, each distinct attention call is compiled by libtpu for the generation, and its
time is estimated from the compiler's schedule, beside SDPA as a compiled transformers model calls it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .aot import Array, FunctionJob
from .emit import ModuleJob
from .schedule import Estimator, Schedule
from .targets import target as find_target

DTYPES = ("bfloat16", "float32", "float16")
# Grid steps of SDPA that are followed in one estimate; what is larger is estimated for fewer sequences and heads.
_STEPS = 20_000
_SDPA_BLOCK = 512


class PlanError(ValueError):
    """The plan cannot be made; the text names the argument and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One distinct attention call of one phase.

    Attributes:
        phase: "prefill" or "decode" (one token).
        layers: names of the modules that make this call.
        query, key, value: shapes, [batch, heads, length, head size].
        sees: which keys a query row sees.
        mask: how the mask reaches the call: none, causal, ranges, ranges+validity, dense_bool, dense_float.
        softcap, sinks: whether the call has them.
        route: "range-attention.forward" and the like, or the fallback: sdpa, eager.
        reason, sentence, remedy: why; what would have to change for a better route.
        compiled: whether the call compiles for the target, on its route.
        error: why not, or why there is no estimate.
        vmem_bytes, temp_bytes: VMEM of the kernel, temporary HBM of the call.
        kernel_seconds, sdpa_seconds: estimated for one call, None where there is no estimate.
        sdpa_temp_bytes: temporary HBM of SDPA's call.
        sdpa_error: why there is no estimate of SDPA.
    """

    phase: str
    layers: tuple[str, ...]
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    sees: str
    mask: str
    softcap: bool
    sinks: bool
    route: str
    reason: str
    sentence: str
    remedy: str
    compiled: bool
    error: str
    vmem_bytes: int
    temp_bytes: int
    kernel_seconds: float | None
    sdpa_seconds: float | None
    sdpa_temp_bytes: int
    sdpa_error: str

    @property
    def on_kernel(self) -> bool:
        return self.reason == "kernel"

    @property
    def seconds(self) -> float | None:
        """Of one call on its route."""
        return self.kernel_seconds if self.on_kernel else self.sdpa_seconds if self.route == "sdpa" else None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What happens to a model's attention on a target.

    Attributes:
        model: model_type. target: generation. batch, prompt, new_tokens, dtype: as asked.
        decode_position: tokens in the cache at the decode step that is estimated (the middle of the new tokens).
        rows: each distinct call.
        notes: what the plan could not do, or the user should know.
        failures: phases that could not be traced.
    """

    model: str
    target: str
    batch: int
    prompt: int
    new_tokens: int
    dtype: str
    decode_position: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything was traced and compiles."""
        return not self.failures and all(row.compiled for row in self.rows)

    def total(self, phase: str, *, sdpa: bool = False) -> float | None:
        """Seconds of all attention calls of a phase; None where one has no estimate, or there are none."""
        rows = [row for row in self.rows if row.phase == phase]
        times = [(row.sdpa_seconds if sdpa else row.seconds, len(row.layers)) for row in rows]
        if not times or any(time is None for time, _ in times):
            return None
        return sum((time or 0.0) * layers for time, layers in times)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        totals = {
            phase: {"seconds": self.total(phase), "sdpa_seconds": self.total(phase, sdpa=True)}
            for phase in ("prefill", "decode")
        }
        return {**dataclasses.asdict(self), "ok": self.ok, "attention_seconds": totals, "estimate": "static schedule"}


def read_config(model: str) -> dict[str, Any]:
    """The fields of a model's configuration.

    Args:
        model: a folder with a config.json, such a file, or a repository's name on the Hub ("Qwen/Qwen3-0.6B").

    Raises:
        PlanError: when there is no such thing, or it is not a transformers configuration.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise PlanError(f"MODEL {model!r} is a folder without config.json: give a folder that save_pretrained wrote")
    elif not path.exists():
        if model.startswith((".", "/", "~")) or model.count("/") > 1 or path.suffix == ".json" or not model:
            raise PlanError(f"MODEL {model!r}: no such file or folder")
        path = _from_hub(model)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise PlanError(f"MODEL {model!r}: {path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise PlanError(f"MODEL {model!r}: {path} has no model_type, so it is not a transformers configuration")
    return fields


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise PlanError(
            f"MODEL {model!r} is no file or folder here, and its config.json cannot be had from the Hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}): give a folder, or a config.json file"
        ) from None


def make_plan(
    config: Mapping[str, Any],
    *,
    target: str,
    batch: int = 1,
    prompt: int = 4096,
    new_tokens: int = 512,
    dtype: str = "",
    timeout: float = 300.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan for a configuration (see the module).

    Args:
        config: fields of a transformers configuration, `model_type` among them.
        target: v4, v5e, v5p, v6e or tpu7x.
        batch: sequences. prompt: tokens of each. new_tokens: generated after it; they size the static cache.
        dtype: bfloat16, float32 or float16; "" for the configuration's, else bfloat16.
        timeout: seconds that one compilation may take.
        progress: called with a line when something begins or is done.

    Raises:
        PlanError, targets.UnknownTargetError: for bad arguments.
    """
    goal = find_target(target)
    for name, value in (("batch", batch), ("prompt", prompt), ("new_tokens", new_tokens)):
        if value < 1:
            raise PlanError(f"{name} is {value}; it must be at least 1")
    dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise PlanError(f"dtype is {dtype!r}; supported: {', '.join(DTYPES)}")
    position = prompt + new_tokens // 2
    common = {"config": dict(config), "batch": batch, "dtype": dtype}
    phases = {
        "prefill": {**common, "phase": "prefill", "prompt": prompt, "cache": 0},
        "decode": {**common, "phase": "decode", "prompt": position, "cache": prompt + new_tokens},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Estimator(goal.name, timeout=timeout) as first,
        Estimator(goal.name, timeout=timeout) as second,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        # Two workers: both phases are traced side by side, then one compiles the kernels and the other SDPA.
        progress(f"tracing {config['model_type']} with no weights")
        traced = list(pool.map(lambda worker, job: _trace(worker, job, folder), (first, second), phases.values()))
        calls: list[tuple[str, dict[str, Any]]] = []
        notes = _notes(config, prompt + new_tokens)
        failures: list[str] = []
        for phase, (found, dense, error) in zip(phases, traced, strict=True):
            if error:
                (notes if "NoDecodeError" in error else failures).append(f"{phase}: {error}")
            elif not found:
                notes.append(
                    f"{phase}: the model made no call through transformers' attention interface, so no kernel can take it"
                )
            calls += [(phase, call) for call in found]
            notes += [f"{phase}: a mask stays dense: {reason}" for reason in dense]
        kernels = pool.submit(lambda: [_kernel(first, call, progress, phase) for phase, call in calls])
        plain = pool.submit(lambda: [_sdpa(second, call, progress, phase, Path(folder)) for phase, call in calls])
        rows = tuple(
            _row(phase, call, kernel, sdpa)
            for (phase, call), kernel, sdpa in zip(calls, kernels.result(), plain.result(), strict=True)
        )
    return Plan(
        str(config["model_type"]), goal.name, batch, prompt, new_tokens, dtype, position, rows, tuple(notes), tuple(failures)
    )


def _notes(config: Mapping[str, Any], length: int) -> list[str]:
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and length > limit:
        return [f"prompt and new tokens are {length} positions, and the configuration has {limit}"]
    return []


def _trace(estimator: Estimator, job: Mapping[str, Any], folder: str) -> tuple[list[dict[str, Any]], list[str], str]:
    """(calls, why masks are dense, error)."""
    outcome = estimator.emitter.call("trace_calls", {**job, "folder": folder})
    if not outcome.ok:
        return [], [], f"{outcome.stage}: {outcome.error}"
    return outcome.value["calls"], list(outcome.value["dense"]), ""


def reduced(call: Mapping[str, Any]) -> tuple[int, int]:
    """(batch, query heads a KV head's group counts once: KV heads) that one estimate follows; the rest is alike."""
    request = call["request"]
    batch, kv_heads = request["batch"], request["kv_heads"]
    group = request["q_heads"] // kv_heads
    blocks = -(-request["q_len"] // _SDPA_BLOCK) * -(-request["kv_len"] // _SDPA_BLOCK)
    while batch * kv_heads * group * blocks > _STEPS and batch * kv_heads > 1:
        if batch > 1:
            batch = 1 if batch % 2 else batch // 2
        else:
            kv_heads = 1 if kv_heads % 2 else kv_heads // 2
    return batch, kv_heads


def _smaller(call: Mapping[str, Any], batch: int, kv_heads: int) -> tuple[Callable[[list[int]], tuple[int, ...]], float]:
    """(shape -> its shape with fewer sequences and heads, how many times longer the whole call takes)."""
    request = call["request"]
    heads = {request["q_heads"]: request["q_heads"] // request["kv_heads"] * kv_heads, request["kv_heads"]: kv_heads}

    def cut(shape: list[int]) -> tuple[int, ...]:
        if len(shape) == 1:  # sinks, a value a query head
            return (heads[shape[0]],)
        return (batch, heads.get(shape[1], shape[1]), *shape[2:])

    return cut, request["batch"] / batch * request["kv_heads"] / kv_heads


@dataclasses.dataclass(frozen=True)
class _Figures:
    """What one route of a call gives."""

    compiled: bool = True
    error: str = ""
    vmem_bytes: int = 0
    temp_bytes: int = 0
    seconds: float | None = None


def _kernel(estimator: Estimator, call: Mapping[str, Any], progress: Callable[[str], None], phase: str) -> _Figures | None:
    """The call on its kernel; None where the route is a fallback."""
    import numpy as np

    kernel = call["kernel"]
    if kernel is None:
        return None
    label = f"{phase}, {len(call['layers'])} layers: {call['route']}"
    progress(f"{label}: compiling for {estimator.target.name}")
    mask = np.load(call["mask_values"]) if call["mask_values"] else None

    def run(cut: Callable[[list[int]], tuple[int, ...]]) -> Schedule:
        arguments = tuple(
            None if each is None else Array(each["dtype"], cut(each["shape"]) if index != 3 else tuple(each["shape"]))
            for index, each in enumerate(kernel["arguments"])
        )
        values = {}
        if mask is not None and arguments[0] is not None and arguments[3] is not None:
            values = {3: mask[: arguments[0].shape[0]]}
            shape = (arguments[0].shape[0], *arguments[3].shape[1:])
            arguments = (*arguments[:3], Array(arguments[3].dtype, shape), *arguments[4:])
        job = FunctionJob("tpu_kernels.offdevice.kernel_call:call", arguments, estimator.target.name, kernel["static"])
        return estimator.function(job, values)

    return _figures(run, call, label, progress)


def _sdpa(
    estimator: Estimator, call: Mapping[str, Any], progress: Callable[[str], None], phase: str, folder: Path
) -> _Figures:
    """The call as transformers' "sdpa" makes it in a compiled model."""
    request = call["request"]
    label = f"{phase}, {len(call['layers'])} layers: sdpa"
    progress(f"{label}: compiling for {estimator.target.name}")

    def run(cut: Callable[[list[int]], tuple[int, ...]]) -> Schedule:
        batch, q_heads, q_len, head_dim = cut([request[key] for key in ("batch", "q_heads", "q_len", "head_dim")])
        _, kv_heads, kv_len, v_head_dim = cut([request[key] for key in ("batch", "kv_heads", "kv_len", "v_head_dim")])
        parameters = {
            "batch": batch,
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
            "dtype": request["dtype"],
            "dense_mask": request["mask"] != "none",
            "scale": call["scale"],
        }
        with tempfile.TemporaryDirectory(dir=folder) as place:
            emitted = estimator.emitter.run(ModuleJob("tpu_kernels.offdevice.models:sdpa_call", parameters), Path(place))
            if not emitted.ok:
                return Schedule(_not_emitted(estimator.target.name, emitted.stage, emitted.error))
            return estimator.module(emitted.modules[0])

    return _figures(run, call, label, progress)


def _not_emitted(name: str, stage: str, error: str) -> Any:
    from .aot import Compiled

    return Compiled(False, f"torch_tpu's {stage}", error, name)


def _figures(
    run: Callable[[Callable[[list[int]], tuple[int, ...]]], Schedule],
    call: Mapping[str, Any],
    label: str,
    progress: Callable[[str], None],
) -> _Figures:
    """Memory of the whole call; time of it, or of a part that is alike, times as often as it stands in the whole."""
    batch, kv_heads = reduced(call)
    cut, times = _smaller(call, batch, kv_heads)
    whole = run(tuple)
    part = run(cut) if times > 1 and whole.compiled.ok else whole
    seconds = part.seconds * times if part.ok else None
    if not whole.compiled.ok:
        progress(f"{label}: does not compile ({whole.error.splitlines()[0][:100]})")
    else:
        progress(f"{label}: compiled" + (f", {seconds * 1e3:.3f} ms by its schedule" if seconds is not None else ""))
    return _Figures(
        whole.compiled.ok,
        whole.error if not whole.compiled.ok else part.error,
        whole.compiled.vmem_bytes,
        whole.compiled.temp_bytes,
        seconds,
    )


def _row(phase: str, call: Mapping[str, Any], kernel: _Figures | None, sdpa: _Figures) -> Row:
    request = call["request"]
    own = kernel or (sdpa if call["route"] == "sdpa" else _Figures(error="eager attention is not compiled here"))
    return Row(
        phase=phase,
        layers=tuple(call["layers"]),
        query=(request["batch"], request["q_heads"], request["q_len"], request["head_dim"]),
        key=(request["kv_batch"], request["kv_heads"], request["kv_len"], request["head_dim"]),
        value=(request["kv_batch"], request["kv_heads"], request["kv_len"], request["v_head_dim"]),
        sees=call["sees"],
        mask=request["mask"],
        softcap=request["softcap"],
        sinks=request["sinks"],
        route=call["route"],
        reason=call["reason"],
        sentence=call["sentence"],
        remedy="" if call["reason"] == "kernel" else call["remedy"],
        compiled=own.compiled,
        error=own.error,
        vmem_bytes=own.vmem_bytes,
        temp_bytes=own.temp_bytes,
        kernel_seconds=kernel.seconds if kernel else None,
        sdpa_seconds=sdpa.seconds,
        sdpa_temp_bytes=sdpa.temp_bytes,
        sdpa_error=sdpa.error,
    )
