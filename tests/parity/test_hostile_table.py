"""Every function of every kernel x every feature that its spec.toml declares, under both of Pallas' interpreters.

The two see different faults. Under interpret=True, compiled by XLA, what no step wrote is NaN; under the checking one
(hostile.py) races, reads of unwritten memory or out of bounds, and results that depend on the order of independent steps.
Each case is held to float64 under both. Features and functions come from the spec.toml files and the functions'
signatures: a new one without a case here fails a test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import hostile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import range_attention_reference as reference
import test_dense_masks
import test_paged
import torch
from range_attention_reference import Call, make_call, range_attention

from tpu_kernels.specs import Capabilities, KernelFunction, KernelSpec, load_specs, packaged_specs_dir

sys.path.insert(0, str(packaged_specs_dir() / "splash-attention" / "torch-ext"))
import splash_attention  # noqa: E402

MODULES: dict[str, ModuleType] = {"range-attention": range_attention, "splash-attention": splash_attention}
SPECS = {spec.name: spec for spec in load_specs(packaged_specs_dir())}

# What a function must have a parameter for to have the feature; None: any function has it.
PARAMETER = {
    "none": None, "causal": None, "ranges": "starts", "ranges+validity": "key_valid", "dense_bool": "mask",
    "dense_float": "bias", "gqa": None, "v_head_dim_may_differ": None, "softcap": "softcap", "sinks": "sinks",
    "float32": None, "bfloat16": None, "gradient of lse": "dlse",
}  # fmt: skip
ALONE = ("none", "causal", "float32", "bfloat16")  # what the others take the place of, or are held against
# Capabilities that are no features: bounds, where kernels run, and "gradients", which are functions of their own. Kernels
# are not handed dropout or a position bias (specs.py refuses them).
NO_FEATURES = {
    "max_head_dim", "length_multiple", "head_dim_multiple", "max_kv_len", "devices", "generations", "gradients", "dropout",
    "position_bias",
}  # fmt: skip
PARAMETERS = {
    "q", "k", "v", "starts", "ends", "key_valid", "sinks", "mask", "bias", "out", "lse", "do", "dlse", "k_pages", "v_pages",
    "block_table", "scale", "softcap", "block_q", "block_kv", "precision", "vmem_bytes", "interpret", "causal",
}  # fmt: skip


def features_of(spec: KernelSpec, function: Callable[..., Any]) -> list[str]:
    """The features of one function of a kernel, each to be shown alone. Raises LookupError for what is not known here."""
    can = spec.capabilities
    declared = {field.name: getattr(can, field.name) for field in fields(Capabilities) if field.name not in NO_FEATURES}
    named = [*can.masks, *can.dtypes, "causal", *(name for name, value in declared.items() if value is True)]
    lists = {name for name, value in declared.items() if not isinstance(value, bool)}
    if lists != {"masks", "dtypes"}:
        raise LookupError(f"capabilities {sorted(lists)} are not all known here")
    if unknown := [name for name in named if name not in PARAMETER]:
        raise LookupError(f"{spec.name} declares {unknown}, of which there is no hostile case: add it to PARAMETER")
    parameters = inspect.signature(function).parameters
    if unknown := [name for name in parameters if name not in PARAMETERS]:
        raise LookupError(f"{spec.name}.{function.__name__} takes {unknown}, which no hostile case passes: add it")
    if "dlse" in parameters:
        named.append("gradient of lse")
    if not ({"starts", "causal"} & set(parameters)):
        named.remove("causal")
    return [name for name in named if PARAMETER[name] in (None, *parameters)]


@dataclass(frozen=True)
class Case:
    kernel: str
    function: str
    features: tuple[str, ...]
    title: str

    def has(self, feature: str) -> bool:
        if feature not in PARAMETER:
            raise LookupError(f"no feature is named {feature!r}")
        return feature in self.features

    def __str__(self) -> str:
        return f"{self.kernel}.{self.function}: {self.title}"


def cases_of(spec: KernelSpec, name: str, function: Callable[..., Any]) -> list[Case]:
    """One case a feature, and one of all of them in float32."""
    features = features_of(spec, function)
    singles = [Case(spec.name, name, (each,), each) for each in features if each != "float32"]  # "none" is in float32
    masks = [each for each in features if each in spec.capabilities.masks and each != "none"]
    together = [each for each in features if each not in ALONE and each not in masks]
    # The widest mask there is; of pairs, both.
    dense = tuple(each for each in masks if each.startswith("dense"))
    together += dense or masks[-1:] or ["causal"]
    return [*singles, Case(spec.name, name, tuple(together), "all features")]


TABLE = [
    case for spec in SPECS.values() for each in spec.functions
    for case in cases_of(spec, each.name, getattr(MODULES[spec.name], each.name))
]  # fmt: skip


# --- calls ---------------------------------------------------------------------------------------------------------


def make(case: Case, q_len: int, kv_len: int, batch: int, kv_heads: int, dim: int = 16) -> Call:
    """The call of a case: masks with empty, full and mixed tiles, rows without keys, ranges past both ends."""
    if unknown := set(case.features) - set(PARAMETER):
        raise LookupError(f"no features are named {sorted(unknown)}")
    rng = np.random.default_rng(0)
    group = 2 if case.has("gqa") else 1
    v_dim = dim + 8 if case.has("v_head_dim_may_differ") else dim
    dtype = "bf16" if case.has("bfloat16") else "f32"
    call = make_call(1, dtype, batch, group * kv_heads, kv_heads, q_len, kv_len, dim, v_dim)
    if case.has("causal"):
        ends = np.minimum(np.arange(q_len) + 1 + max(kv_len - q_len, 0), kv_len)
        call.ends = np.tile(ends, (batch, 1))
    if case.has("ranges") or case.has("ranges+validity"):
        call.starts, call.ends = rng.integers(-3, kv_len, (batch, q_len)), rng.integers(0, kv_len + 4, (batch, q_len))
        call.starts[-1, : q_len // 2 + 1], call.ends[-1, : q_len // 2 + 1] = 0, kv_len  # full tiles too
    if case.has("ranges+validity"):
        call.valid = rng.random((batch, kv_len)) < 0.7
        call.valid[0, kv_len // 3 : 2 * kv_len // 3] = False
        call.valid[-1] = True
    if case.has("softcap"):
        call.softcap = 3.0
    if case.has("sinks"):
        call.sinks = rng.normal(size=group * kv_heads).astype(np.float32)
    return call


Results = dict[str, torch.Tensor]
Run = Callable[[Any], Results]  # interpret -> results, held to float64


def of_ranges(case: Case) -> Run:
    few = case.function == "decode"
    # Without "gqa" nothing but batch and KV heads is divided between cores. An odd number of these divides a group too.
    batch, kv_heads = (3, 2) if few else (1, 3) if case.features == ("gqa",) else (2, 2)
    call = make(case, 3 if few else 150, 300, batch, kv_heads)
    options = {"block_kv": 128} | ({} if few else {"block_q": 128})
    return lambda interpret: {"out": reference.check(call, case.function, interpret=interpret, **options)}


def of_lse(case: Case) -> Run:
    call = make(case, 150, 300, 2, 2)
    return lambda interpret: reference.check_lse(call, block_q=128, block_kv=128, interpret=interpret)


def of_gradients(case: Case) -> Run:
    call = make(case, 300, 300, 2, 2)  # the kernel of all three gradients takes 256 rows a step
    dlse = torch.randn(call.q.shape[:3], generator=torch.Generator().manual_seed(3)) if case.has("gradient of lse") else None
    if dlse is not None:  # a row without keys has no lse to have a gradient
        dlse = dlse * torch.from_numpy(call.mask.any(-1))[:, None]
    kept = reference.check_lse(call, block_q=128, block_kv=128)

    def run(interpret: Any) -> Results:
        options = {"block_q": 128, "block_kv": 128, "interpret": interpret}
        return reference.check_gradients(call, dlse=dlse, forward=kept, **options)

    return run


def of_pairs(case: Case) -> Run:
    q_len = 75 if case.has("gqa") else 150  # query heads of a group are rows of one block here
    call = make(case, q_len, 300, 2, 2)
    mask = bias = None
    if case.has("dense_bool"):
        mask = test_dense_masks.some(2, 1, q_len, 300)
        mask[:, :, :, 128:256] = False
        mask[1, :, -22:, :128] = True
        mask[0, :, 5] = False
    if case.has("dense_float"):
        shape = (1, call.q.shape[1], q_len, 300)
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(call.q.dtype)
        bias[:, :, 7:9, 3:200] = -torch.inf
    sinks = None if call.sinks is None else torch.from_numpy(call.sinks).to(call.q.dtype)
    options = {"softcap": call.softcap, "block_q": 128, "block_kv": 128}
    return lambda interpret: {
        "out": test_dense_masks.check(call.q, call.k, call.v, mask, bias, sinks, interpret=interpret, **options)
    }


def of_pages(case: Case) -> Run:
    call = make(case, 3, 150, 3, 2)  # ten pages: a step copies eight
    call.starts[0] = call.ends[0] = 0  # a request that has nothing
    return lambda interpret: {"out": test_paged.check(call, 16, interpret=interpret)}


def of_splash(case: Case) -> Run:
    call = make(case, 256, 256, 2, 3, dim=64)
    sinks = None if call.sinks is None else jnp.asarray(call.sinks)
    q, k, v = (jax.dlpack.from_dlpack(x) for x in (call.q, call.k, call.v))
    static = dict(scale=call.scale, softcap=call.softcap, block_q=128, block_kv=128, precision="highest", vmem_bytes=0)

    def one_at_a_time(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda *batched: jnp.stack([function(*each) for each in zip(*batched, strict=True)])

    # jax.vmap adds a grid dimension without a meaning ("parallel" or not), and the checking interpreter refuses that.
    alone = SimpleNamespace(vmap=one_at_a_time, default_matmul_precision=jax.default_matmul_precision)

    def run(interpret: Any) -> Results:
        with contextlib.ExitStack() as stack:
            if interpret is not True:
                stack.enter_context(mock.patch.object(sys.modules["splash_attention.forward"], "jax", alone))
            made = splash_attention.forward(
                q, k, v, None, None, None, sinks, interpret=interpret, causal=case.has("causal"), **static
            )
        out = torch.from_dlpack(jax.block_until_ready(made)).clone()
        reference.hold_output(call, out)
        return {"out": out}

    return run


RUNS: dict[tuple[str, str], Callable[[Case], Run]] = {
    ("range-attention", "forward"): of_ranges,
    ("range-attention", "decode"): of_ranges,
    ("range-attention", "forward_with_lse"): of_lse,
    ("range-attention", "backward"): of_gradients,
    ("range-attention", "forward_dense"): of_pairs,
    ("range-attention", "paged"): of_pages,
    ("splash-attention", "forward"): of_splash,
}


# --- tests ---------------------------------------------------------------------------------------------------------


def parameter(case: Case) -> Any:
    # What CI has two minutes for. `forward` is in the fast loop, with fewer orders (test_hostile_emulation.py).
    long = case.title != "all features" or (case.kernel == "range-attention" and case.function in ("forward", "backward"))
    return pytest.param(case, id=str(case), marks=pytest.mark.slow if long else pytest.mark.thorough)


@pytest.mark.parametrize("case", [parameter(case) for case in TABLE])
def test_both_interpreters(case: Case) -> None:
    run = RUNS[case.kernel, case.function](case)
    plain = run(True)
    proved = hostile.prove(run, in_a_row=2)
    assert proved.keys() == plain.keys() and all(x.isfinite().all() or name == "lse" for name, x in proved.items())


def lacking(specs: Iterable[KernelSpec]) -> set[str]:
    """Functions, and features, that spec.toml files declare and no case of the table has."""
    missing = set()
    for spec in specs:
        of_kernel = [case for case in TABLE if case.kernel == spec.name]
        shown = {case.features[0] for case in of_kernel if len(case.features) == 1}
        can = spec.capabilities
        flags = {name for name in ("gqa", "v_head_dim_may_differ", "softcap", "sinks") if getattr(can, name)}
        declared = {*can.masks, *can.dtypes} | flags
        missing |= {f"{spec.name}: {each}" for each in declared - shown - {"float32"}}
        for each in spec.functions:
            titles = [case.title for case in of_kernel if case.function == each.name]
            if (spec.name, each.name) not in RUNS or not {"none", "bfloat16", "all features"} <= set(titles):
                missing.add(f"{spec.name}.{each.name}")
    return missing


def test_every_function_and_feature_of_every_spec_has_a_case() -> None:
    assert lacking(SPECS.values()) == set()
    assert len({str(case) for case in TABLE}) == len(TABLE)


def test_a_function_or_feature_without_a_case_is_noticed() -> None:
    spec = SPECS["splash-attention"]
    more = dataclasses.replace(spec, functions=(*spec.functions, KernelFunction("prefill")))
    assert lacking([more]) == {"splash-attention.prefill"}
    ranges = dataclasses.replace(spec, capabilities=dataclasses.replace(spec.capabilities, masks=("none", "ranges")))
    assert lacking([ranges]) == {"splash-attention: ranges"}
    assert lacking([dataclasses.replace(spec, name="other")]) >= {"other.forward", "other: none", "other: softcap"}


def test_what_the_table_does_not_know_is_refused() -> None:
    spec, forward = SPECS["range-attention"], range_attention.forward
    for more in ({"masks": ("none", "trees")}, {"dtypes": ("float32", "float8")}):
        with pytest.raises(LookupError, match="no hostile case"):
            features_of(dataclasses.replace(spec, capabilities=dataclasses.replace(spec.capabilities, **more)), forward)

    def slanted(q: Any, slopes: Any, *, scale: float) -> Any: ...

    with pytest.raises(LookupError, match=r"range-attention.slanted takes \['slopes'\]"):
        features_of(spec, slanted)
    with pytest.raises(LookupError, match="trees"):
        make(Case(spec.name, "forward", ("trees",), "trees"), 3, 5, 1, 1)
    with pytest.raises(LookupError, match="'trees'"):
        TABLE[0].has("trees")


def test_the_features_of_a_function_are_those_that_it_has_a_parameter_for() -> None:
    features = {name: set(features_of(SPECS["range-attention"], getattr(range_attention, name)))
                for name in ("forward", "forward_dense", "paged", "backward")}  # fmt: skip
    assert features["backward"] - features["forward"] == {"gradient of lse"}
    assert features["forward"] - features["paged"] == {"ranges+validity"}
    assert features["forward_dense"] - features["forward"] == {"dense_bool", "dense_float"}
