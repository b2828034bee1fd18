"""What was counted: calls per layer, route and reason; and the table that `explain()` returns."""

from __future__ import annotations

import gc
import io
import logging
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import hub, packing, tuning
from .reasons import REASONS
from .routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .request import AttentionRequest

logger = logging.getLogger("tpu_kernels")

# More distinct shapes than this are worth a word: as many as Dynamo compiles one function for, and a decode shape.
_MANY_SHAPES = 9


class _Layer:
    """Counts of one attention module. Holds the module weakly, so that the ledger keeps no model alive."""

    __slots__ = ("counts", "label", "ref")

    def __init__(self, module: Any) -> None:
        self.ref = weakref.ref(module)
        self.label = layer_label(module)
        self.counts: Counter[tuple[Route, str, str]] = Counter()


def layer_label(module: Any) -> str:
    """"LlamaAttention.3", or the class name alone where the module has no layer index."""
    index = getattr(module, "layer_idx", None)
    name = type(module).__name__
    return name if index is None else f"{name}.{index}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the routing table. `traced` is how often the call was compiled into a graph (its runs are not seen)."""

    layer: str
    route: str
    reason: str
    detail: str
    device: str
    calls: int
    traced: int


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Sizes of one call that change from input to input, and the route that it took."""

    route: str
    batch: int
    q_len: int
    kv_len: int


@dataclass(frozen=True)
class Explanation:
    """Where attention calls went since the last `reset()`.

    rows: per layer, route and reason. masks: how often a mask could not become a row range, by reason.
    never_called: names of live models that asked for this attention and whose attention never reached it.
    kernels: which copy of each kernel this process has loaded, and what decided for it.
    shapes: the distinct shapes that eager calls came with. On a TPU each is a program to compile.
    notes: what else is worth knowing, a sentence each. ranks: how many processes' tables were merged into this one.
    """

    rows: tuple[Row, ...]
    masks: dict[str, int]
    never_called: tuple[str, ...]
    kernels: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def total_calls(self) -> int:
        return sum(row.calls + row.traced for row in self.rows)

    @property
    def kernel_calls(self) -> int:
        return sum(row.calls + row.traced for row in self.rows if row.reason == "kernel")

    @property
    def fallback_calls(self) -> int:
        return self.total_calls - self.kernel_calls

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        buffer = io.StringIO()
        console = Console(file=buffer, width=120, force_terminal=False)
        table = Table("layer", "route", "reason", "on", "calls", "traced", title="attention calls")
        for row in self.rows:
            reason = row.reason + (f" ({row.detail})" if row.detail else "")
            table.add_row(row.layer, row.route, reason, row.device, str(row.calls), str(row.traced))
        console.print(table)
        console.print(
            f"{self.total_calls} calls: {self.kernel_calls} on a kernel, {self.fallback_calls} fell back."
            + (f" ({self.ranks} processes)" if self.ranks > 1 else "")
        )
        for note in self.notes:
            console.print(f"  {note}")
        for kernel in self.kernels:
            console.print(f"  {kernel}")
        for code in sorted({row.reason for row in self.rows} - {"kernel"}):
            console.print(f"  {REASONS[code]}")
        for code, count in sorted(self.masks.items()):
            console.print(f"  dense mask, {count} built: {code}")
        for name in self.never_called:
            console.print(
                f"  {name}: accepts the name but its attention never called the attention interface"
                " (not run since reset(), or the model has its own attention code that ignores the name)."
            )
        return buffer.getvalue()

    __repr__ = __str__


class Ledger:
    """Counts routes. One lives in the package; `explain()` reads it and `reset()` clears it."""

    def __init__(self) -> None:
        self._layers: dict[int, _Layer] = {}
        self._traced: Counter[tuple[str, Route, str, str]] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._shapes: set[Shape] = set()
        self._positions: dict[str, tuple[torch.Tensor, torch.Tensor | None, int, int]] = {}
        self._models = _Models()

    def count(self, module: Any, route: Route, detail: str, device: str) -> None:
        """One eager call. About a microsecond."""
        layer = self._layers.get(id(module))
        if layer is None or layer.ref() is not module:  # ids are used again after a module is gone
            if layer is not None:
                self._layers[-id(layer)] = layer
            layer = self._layers[id(module)] = _Layer(module)
        layer.counts[route, detail, device] += 1
        if route.target != "kernel":
            self._warn_once(type(module).__name__, route, detail)

    def met(self, request: AttentionRequest, route: Route) -> None:
        """An eager call with shapes or options that no call had before."""
        self._shapes.add(Shape(route.name, request.batch, request.q_len, request.kv_len))
        if request.device == "tpu" and len(self._shapes) > _MANY_SHAPES and ("", "shapes") not in self._warned:
            self._warned.add(("", "shapes"))
            logger.warning("%s", changing_shapes(self._shapes))

    def met_positions(
        self, module: Any, positions: Any, mask: torch.Tensor | None, q_len: int, kv_len: int, device: str
    ) -> None:
        """An eager call with position_ids. On CPU one look tells packed documents that see each other; elsewhere it would
        wait for the device, so `explain()` takes it, at the last such call of the module's class."""
        name = type(module).__name__
        if (name, "packed") in self._warned or not packing.is_readable(positions, mask):
            return
        if device != "cpu":
            self._positions[name] = (positions, mask, q_len, kv_len)
        elif packing.documents_mix(positions, mask, q_len, kv_len):
            self._warn_packed(name)

    def _warn_packed(self, name: str) -> None:
        self._warned.add((name, "packed"))
        logger.warning("%s: %s", name, packing.WARNING)

    def count_traced(self, label: str, route: Route, detail: str, device: str) -> None:
        """One call compiled into a graph."""
        self._traced[label, route, detail, device] += 1
        if route.target != "kernel":
            self._warn_once(label.rsplit(".", 1)[0], route, detail)

    def clear(self) -> None:
        self._layers.clear()
        self._traced.clear()
        self._warned.clear()
        self._shapes.clear()
        self._positions.clear()

    def watch_models(self) -> Callable[[], None]:
        """Let `explain()` look through the heap for models only after modules were built. Returns what ends it."""
        return self._models.watch()

    def _warn_once(self, model: str, route: Route, detail: str) -> None:
        if (model, route.reason) in self._warned:
            return
        self._warned.add((model, route.reason))
        what = f" [{detail}]" if detail else ""
        logger.warning("%s runs on %s: %s%s", model, route.name, REASONS[route.reason], what)

    def explain(self, masks: dict[str, int], names: Iterable[str], model: Any = None) -> Explanation:
        """The table. `names` are the attention names this package registered; `model` limits it to one model."""
        for name, call in self._positions.items():
            if packing.documents_mix(*call):
                self._warn_packed(name)
        self._positions.clear()
        paths: dict[int, str] = {}
        never: list[str] = []
        wanted = set(names)
        modules_called = [module for layer in self._layers.values() if (module := layer.ref()) is not None]
        called = {id(module) for module in modules_called}
        models = [model] if model is not None else self._models.alive(modules_called)
        traced_labels = {label for label, *_ in self._traced}
        for root in models:
            modules = dict(root.named_modules())
            for path, module in modules.items():
                paths.setdefault(id(module), path)
            if uses(root, wanted) and not any(
                id(module) in called or layer_label(module) in traced_labels for module in modules.values()
            ):
                never.append(type(root).__name__)
        rows: Counter[tuple[str, str, str, str, str]] = Counter()
        traced: Counter[tuple[str, str, str, str, str]] = Counter()
        for layer in self._layers.values():
            module = layer.ref()
            if model is not None and (module is None or id(module) not in paths):
                continue
            label = paths.get(id(module), "") if module is not None else ""
            for (route, detail, device), calls in layer.counts.items():
                rows[label or layer.label, route.name, route.reason, detail, device] += calls
        labels = {layer_label(module): paths[id(module)] for root in models for module in root.modules()}
        for (label, route, detail, device), calls in self._traced.items():
            if model is not None and label not in labels:
                continue
            traced[labels.get(label, label), route.name, route.reason, detail, device] += calls
        keys = sorted(rows.keys() | traced.keys(), key=lambda key: (_natural(key[0]), *key[1:]))
        return Explanation(
            tuple(Row(*key, calls=rows[key], traced=traced[key]) for key in keys),
            dict(masks),
            tuple(sorted(never)),
            tuple(f"kernel {name}: {kernel}" for name, kernel in hub.loaded_kernels()),
            tuple(sorted(self._shapes)),
            tuple(self._notes({row[4] for row in keys})),
        )

    def _notes(self, devices: set[str]) -> Iterator[str]:
        if len(self._shapes) > _MANY_SHAPES:
            yield changing_shapes(self._shapes)
        for name, what in sorted(self._warned):
            if what == "packed":
                yield f"{name}: {packing.WARNING}"
        if "cpu" in devices and (chip := tuning.attached_chip()):
            yield f"attention ran on CPU, emulated, though this host has a {chip}: {PLACE_ON_TPU}"


PLACE_ON_TPU = (
    'load the model with device_map="tpu" (device_map="auto" takes only devices that accelerate knows), or move it: '
    'model.to("tpu").'
)


def changing_shapes(shapes: Iterable[Shape]) -> str:
    """Which sizes change, how often, and what keeps them few."""
    sizes = {
        "batch size": {shape.batch for shape in shapes},
        "number of queries (prompt length)": {shape.q_len for shape in shapes},
        "number of keys": {shape.kv_len for shape in shapes},
    }
    remedies = {
        "batch size": "keep the batch size fixed",
        "number of queries (prompt length)": "pad prompts to buckets (tpu_kernels.PromptBuckets)",
        "number of keys": "use a static cache of one length (cache_implementation='static' with max_cache_len)",
    }
    changing = sorted((name for name in sizes if len(sizes[name]) > 1), key=lambda name: -len(sizes[name]))
    told = ", ".join(f"{name} has {len(sizes[name])} values ({_range(sizes[name])})" for name in changing)
    return (
        f"attention met {len(set(shapes))} distinct shapes, each a program to compile on a TPU: {told}. To meet fewer: "
        + "; ".join(remedies[name] for name in changing)
        + "."
    )


def _range(values: set[int]) -> str:
    return f"{min(values)} to {max(values)}"


def _natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which layers.10 comes after layers.9."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in text.split("."))


def live_models() -> list[torch.nn.Module]:
    """The PreTrainedModels alive in this process that are not part of another one (read from the garbage collector)."""
    from transformers import PreTrainedModel

    # type() and not isinstance(): proxies in the heap must not be woken by a __class__ look-up.
    found = [obj for obj in gc.get_objects() if issubclass(type(obj), PreTrainedModel)]
    inner = {id(sub) for root in found for sub in root.modules() if sub is not root}
    return [root for root in found if id(root) not in inner]


class _Models:
    """The live models, found again only when there may be others: the heap of a large process takes 0.1 s to walk."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.nn.Module]] = []
        self._outside: list[weakref.ref[Any]] = []
        self._changed = True
        self._watched = False

    def watch(self) -> Callable[[], None]:
        """From now on notice each module that is put into another, as every model that is built does. (A copy is not built:
        it is noticed when one of its modules is called.)"""
        from torch.nn.modules.module import register_module_module_registration_hook

        hook = register_module_module_registration_hook(self._notice)
        self._changed = self._watched = True

        def end() -> None:
            hook.remove()
            self._watched = False

        return end

    def _notice(self, *_: object) -> None:
        self._changed = True

    def alive(self, called: Iterable[Any]) -> list[torch.nn.Module]:
        """The models, as `live_models`. called: modules; one that was in no model found before may be in another now."""
        models = [model for ref in self._found if (model := ref()) is not None]
        if self._changed or not self._watched or not _outside(called, models) <= self._alone():
            self._changed = False
            models = live_models()
            self._found = [weakref.ref(model) for model in models]
            outside = _outside(called, models)
            self._outside = [weakref.ref(module) for module in called if id(module) in outside]
        return models

    def _alone(self) -> set[int]:
        return {id(module) for ref in self._outside if (module := ref()) is not None}


def _outside(modules: Iterable[Any], models: list[torch.nn.Module]) -> set[int]:
    """Ids of the modules that no model has."""
    return {id(module) for module in modules} - {id(module) for model in models for module in model.modules()}


def uses(model: torch.nn.Module, names: set[str]) -> bool:
    """Whether some configuration in `model` asks for one of the attention `names`."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "_attn_implementation", None) in names for config in configs)
