"""Tensor parallelism as transformers does it: heads split over processes, one chip a process.

transformers hands attention plain local tensors with this process's share of the heads. What is left to do here: say
clearly when heads cannot be split, give the plan that then replicates attention, take parameters and activations that
arrive as DTensors, and put the processes' routing tables together.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import tuning
from .ledger import Explanation, Row

# The projection that makes the keys, alone or together with query and value, as transformers' models name it.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def tensor_parallel_plan(config: Any, tp_size: int, *, auto_class: Any = None) -> dict[str, str] | None:
    """`tp_plan` for `DistributedConfig(tp_size=..., tp_plan=...)`: replicates attention where its KV heads do not divide.

        distributed = DistributedConfig(tp_size=4, tp_plan=tpu_kernels.tensor_parallel_plan(config, 4))

    Args:
        config: the model's configuration. tp_size: how many processes share the model.
        auto_class: the auto class that the model is loaded with, default AutoModelForCausalLM.

    Returns:
        None where the model's own plan splits attention evenly; else rules that keep every attention parameter whole on
        each process (each computes all heads), to be merged over the model's own plan, which still splits the rest.

    Raises:
        ValueError: when the model has no tensor parallel plan, or is not known to the auto class.

    Warns:
        On a TPU host, where the model ties its embeddings: loading then may compare two sharded tensors.
    """
    from transformers import AutoModelForCausalLM

    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size!r} must be at least 1.")
    if tp_size == 1:
        return None
    text = config.get_text_config()
    if getattr(config, "tie_word_embeddings", False) and tuning.attached_chip():
        warnings.warn(_TIED, stacklevel=2)
    auto_class = AutoModelForCausalLM if auto_class is None else auto_class
    if type(config) not in auto_class._model_mapping:
        raise ValueError(f"{type(config).__name__} is not a configuration that {auto_class.__name__} can build.")
    plan = _whole_plan(config, text, auto_class._model_mapping[type(config)])
    if not plan:
        raise ValueError(
            f"{config.model_type} has no tensor parallel plan in this transformers release; run it with tp_size=1, or "
            "write a tp_plan for it."
        )
    if not _uneven(plan, text, tp_size):
        return None
    parents = {name.rpartition(".")[0] + "." for name in plan if name.rpartition(".")[2] in _KEY_PROJECTIONS}
    return {name: "replicate" for name in plan if any(name.startswith(parent) for parent in parents)}


_TIED = (
    "tie_word_embeddings with tp_size > 1: where a checkpoint holds both tied weights, transformers compares them at load "
    "by torch.equal on DTensors, whose all-reduce of minima torch_tpu cannot lower. Save the model once on CPU with "
    "safetensors (which keeps one copy), or untie it: copy the embedding into lm_head, set tie_word_embeddings=False, save."
)


def _whole_plan(config: Any, text: Any, model_class: Any) -> dict[str, str]:
    """The rules that a model of this class starts from, under the names its modules have."""
    prefix = f"{model_class.base_model_prefix}." if model_class.base_model_prefix else ""
    if text is not config:
        prefix += "language_model."
    return {f"{prefix}{name}": style for name, style in (text.base_model_tp_plan or {}).items()}


def _uneven(plan: dict[str, str], text: Any, tp_size: int) -> bool:
    """Whether the plan splits heads that do not divide."""
    if not any(name.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise" for name, style in plan.items()):
        return False
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    return any(each % tp_size for each in heads)


def check_heads_at_load() -> Callable[[], None]:
    """From now on `from_pretrained` raises, before it splits a model, where attention under a name registered here would
    have heads that do not divide. transformers has no hook there: this wraps `maybe_distribute_model`, the step that splits.

    Returns:
        What puts the step back. It does nothing on a release without such a step; the first mask raises there.
    """
    from transformers import PreTrainedModel

    from .registration import registered_names

    step = "maybe_distribute_model"
    original = getattr(PreTrainedModel, step, None)
    if original is None:
        return lambda: None

    def checked(cls: Any, model: Any, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(model.config.get_text_config(), "_attn_implementation", None) in registered_names():
            check_heads(model.config, distributed_config)
        return original.__func__(cls, model, distributed_config, *args, **kwargs)

    own = PreTrainedModel.__dict__.get(step)
    setattr(PreTrainedModel, step, classmethod(checked))

    def put_back() -> None:
        if own is None:  # the step is inherited
            delattr(PreTrainedModel, step)
        else:
            setattr(PreTrainedModel, step, own)

    return put_back


def check_heads(config: Any, distributed: Any = None) -> None:
    """Raise where the plan of this model splits heads that do not divide; else the projections fail later, in a view whose
    message names neither heads nor plan.

    Args:
        distributed: the DistributedConfig, by default the one that loading left on the configuration.

    Raises:
        ValueError: naming the heads, tp_size and the plan that works.
    """
    distributed = getattr(config, "distributed_config", None) if distributed is None else distributed
    if distributed is None or (distributed.tp_size or 1) <= 1:
        return
    text = config.get_text_config()
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    # An override may name modules below the base model's prefix; an empty one turns the plan off.
    if isinstance(distributed.tp_plan, dict):
        if not distributed.tp_plan:
            return
        for name, style in distributed.tp_plan.items():
            plan.update({rule: style for rule in plan if name == rule or name.endswith(f".{rule}")})
    if _uneven(plan, text, distributed.tp_size):
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        raise ValueError(
            f"tensor parallelism: {text.num_attention_heads} query heads and {kv_heads} KV heads do not divide by "
            f"tp_size={distributed.tp_size}. Choose a tp_size that divides both, or replicate attention: "
            f"DistributedConfig(tp_size={distributed.tp_size}, tp_plan=tpu_kernels.tensor_parallel_plan(config, "
            f"{distributed.tp_size})), which keeps the q, k, v and o projections whole on each process."
        )


def local_sinks(sinks: torch.Tensor) -> torch.Tensor:
    """This process's part of sinks that a plan has made a DTensor."""
    return sinks.to_local() if isinstance(sinks, DTensor) else sinks


def on_local_tensors(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention on DTensors: each process attends with its own heads, and no data moves.

    Args:
        query, key, value: DTensors [B, H, S, D] on one mesh, each dimension of it replicated or splitting the heads
            (Shard(1)), and the same in all three.
        attention_mask: plain, the same in every process; or replicated. kwargs: passed on, with DTensors made local.

    Returns:
        As `attend`, the output [B, Q, Hq, Dv] a DTensor with its heads split as the query's.

    Raises:
        ValueError: for other placements, naming them and the remedy.
    """
    tensors = {"query": query, "key": key, "value": value}
    placements = {name: getattr(each, "placements", None) for name, each in tensors.items()}
    wanted = placements["query"]
    fits = all(each == wanted for each in placements.values())
    if not fits or any(each not in (Replicate(), Shard(1)) for each in wanted or ()):
        raise ValueError(
            "tpu_attention got DTensors it cannot attend to without moving data: "
            + ", ".join(f"{name} {'plain' if each is None else list(each)}" for name, each in placements.items())
            + ". Split heads alike in all three (Shard(1)) or replicate them; projections that return local tensors "
            "(transformers' own plans, use_local_output=True) need neither."
        )
    assert isinstance(query, DTensor)
    if isinstance(attention_mask, DTensor):
        if any(each != Replicate() for each in attention_mask.placements):
            raise ValueError(f"attention_mask is split ({list(attention_mask.placements)}); replicate it.")
        attention_mask = attention_mask.to_local()
    q, k, v = (each.to_local() for each in (query, key, value) if isinstance(each, DTensor))
    # Heads split unevenly would no longer be in the groups they belong to.
    if q.shape[1] * key.shape[1] != k.shape[1] * query.shape[1]:
        raise ValueError(
            f"tpu_attention: {query.shape[1]} query heads and {key.shape[1]} KV heads do not divide evenly over the mesh "
            f"(this process has {q.shape[1]} and {k.shape[1]}). Choose a mesh whose size divides both, or replicate "
            "attention."
        )
    kwargs = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in kwargs.items()}
    out, weights = attend(module, q, k, v, attention_mask, **kwargs)
    spread = [Shard(2) if each == Shard(1) else each for each in query.placements]
    return (
        DTensor.from_local(out, query.device_mesh, spread, run_check=False),
        None if weights is None else DTensor.from_local(weights, query.device_mesh, query.placements, run_check=False),
    )


def merge_explanations(explanations: Sequence[Explanation]) -> Explanation:
    """One routing table of many processes': counts are summed, and processes that went another way are named.

    Args:
        explanations: each process's, in order of rank.
    """
    if not explanations:
        raise ValueError("merge_explanations needs at least one Explanation.")
    calls: Counter[tuple[str, str, str, str, str]] = Counter()
    traced: Counter[tuple[str, str, str, str, str]] = Counter()
    masks: Counter[str] = Counter()
    routes = []
    for each in explanations:
        for row in each.rows:
            key = (row.layer, row.route, row.reason, row.detail, row.device)
            calls[key] += row.calls
            traced[key] += row.traced
        masks.update(each.masks)
        routes.append(tuple((row.layer, row.route, row.reason, row.calls, row.traced) for row in each.rows))
    usual, _ = Counter(routes).most_common(1)[0]
    notes = [
        f"rank {rank} differs from most ranks: " + _difference(own, usual)
        for rank, own in enumerate(routes)
        if own != usual
    ]
    return dataclasses.replace(
        explanations[0],
        rows=tuple(Row(*key, calls=calls[key], traced=traced[key]) for key in calls),
        masks=dict(masks),
        never_called=tuple(sorted({name for each in explanations for name in each.never_called})),
        kernels=tuple(dict.fromkeys(kernel for each in explanations for kernel in each.kernels)),
        shapes=tuple(sorted({shape for each in explanations for shape in each.shapes})),
        notes=tuple(dict.fromkeys(note for each in explanations for note in each.notes)) + tuple(notes),
        ranks=sum(each.ranks for each in explanations),
    )


def _difference(own: tuple[Any, ...], usual: tuple[Any, ...]) -> str:
    layer, route, reason, calls, traced = next((row for row in own if row not in usual), (usual or own)[0])
    if (layer, route, reason, calls, traced) not in own:
        return f"{layer} did not run {route} there as it did elsewhere"
    return f"{layer} ran on {route} ({reason}), {calls} calls and {traced} traced"


def gather_explanations(model: torch.nn.Module | None = None, group: Any = None) -> Explanation:
    """`explain(model)` of every process, merged. A collective call: each process of the group must make it.

    Args:
        model: as for `explain`. group: a process group that can move CPU tensors; by default one over gloo is made for
            this call.
    """
    import torch.distributed as dist

    from . import explain

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("gather_explanations needs torch.distributed, which is not initialised; use explain().")
    own = group is None
    if own:
        group = dist.new_group(backend="gloo")
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, explain(model), group=group)
    if own:
        dist.destroy_process_group(group)
    return merge_explanations(gathered)
