"""Masks as ranges against transformers' own dense masks, for every builder in its masking_utils.

Each case calls transformers' builder twice, once with this package's mask function and once with sdpa_mask (no skips):
the expanded ranges must equal the dense mask exactly. test_transformers_releases.py runs this file on the other release.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface
from transformers import masking_utils as mu

from tpu_kernels import masks
from tpu_kernels.mask_encoding import expand_range_mask


def _dense(*args, **kwargs):
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return mu.sdpa_mask(*args, **kwargs)


AttentionMaskInterface.register("ranges_under_test", masks.tpu_attention_mask)
AttentionMaskInterface.register("dense_reference", _dense)


class Cache:
    """What the builders read of a cache: where queries start, how many keys come back, from which position."""

    def __init__(self, q_offset, kv_length, kv_offset=0, compileable=False, sliding=False):
        self.q_offset, self.sizes = q_offset, (kv_length, kv_offset)
        self.is_compileable, self.is_sliding = compileable, [sliding]

    def get_query_offset(self, _layer_idx):
        return self.q_offset

    def get_mask_sizes(self, _q_length, _layer_idx):
        return self.sizes


class Config:
    """What the builders read of a configuration."""

    is_causal = True

    def __init__(self, model_type, sliding_window, attention_chunk_size):
        self.model_type, self.sliding_window, self.attention_chunk_size = (
            model_type, sliding_window, attention_chunk_size
        )  # fmt: skip
        self._attn_implementation = "ranges_under_test"


@functools.cache
def config_class(model, module="transformers.models"):
    return type("SomeConfig", (Config,), {"__module__": f"{module}.{model}.configuration"})


def config(model_type="llama", sliding_window=None, attention_chunk_size=None):
    model = {"gemma3_text": "gemma3"}.get(model_type, model_type)
    return config_class(model)(model_type, sliding_window, attention_chunk_size)


def build(builder, implementation, settings_, batch, q_len, cache=None, **kwargs):
    if implementation != settings_._attn_implementation:
        settings_ = copy.copy(settings_)
        settings_._attn_implementation = implementation
    if cache is not None:
        name = "cache" if "cache" in inspect.signature(inspect.unwrap(builder)).parameters else "past_key_values"
        kwargs[name] = cache
    elif "past_key_values" in inspect.signature(builder).parameters:
        kwargs["past_key_values"] = None
    else:
        kwargs["cache"] = None
    return builder(config=settings_, inputs_embeds=torch.zeros(batch, q_len, 4), **kwargs)


def check(builder, settings_, batch, q_len, ranges_expected=True, causal=True, **kwargs):
    """The two masks agree; returns ours."""
    want = build(builder, "dense_reference", settings_, batch, q_len, **kwargs)
    got = build(builder, "ranges_under_test", settings_, batch, q_len, **kwargs)
    kv_len = want.shape[-1]
    if got is None:
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        seen = seen.tril() if causal and q_len > 1 else seen
        seen = seen.expand(batch, 1, q_len, kv_len)
    elif got.dtype == torch.int32:
        seen = expand_range_mask(got, q_len, kv_len)
    else:
        seen = got
    assert torch.equal(seen, want.expand(batch, 1, q_len, kv_len))
    if ranges_expected:
        assert got is None or got.dtype == torch.int32
    else:
        assert got.dtype == torch.bool
    return got


def padding_of(kind, batch, length, generator):
    if kind == "none":
        return None
    keep = torch.ones(batch, length, dtype=torch.int64)
    for row in range(batch):
        count = int(torch.randint(0, length + 1, (), generator=generator))
        if kind == "left":
            keep[row, :count] = 0
        elif kind == "right":
            keep[row, length - count :] = 0
        elif kind == "holes":
            keep[row] = torch.randint(0, 2, (length,), generator=generator)
    return keep


BUILDERS = {
    "causal": mu.create_causal_mask,
    "sliding": mu.create_sliding_window_causal_mask,
    "chunked": mu.create_chunked_causal_mask,
    "bidirectional": mu.create_bidirectional_mask,
    "bidirectional_sliding": mu.create_bidirectional_sliding_window_mask,
}


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(sorted(BUILDERS)),
    batch=st.integers(1, 3),
    q_len=st.integers(1, 9),
    past=st.integers(0, 12),
    cache=st.sampled_from(["none", "dynamic", "static", "static_tensor", "sliding"]),
    tail=st.integers(0, 6),
    padding=st.sampled_from(["none", "ones", "left", "right", "holes"]),
    size=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_every_builder_with_caches_and_padding(kind, batch, q_len, past, cache, tail, padding, size, seed):
    generator = torch.Generator().manual_seed(seed)
    made = config(sliding_window=size, attention_chunk_size=size)
    state = None
    if cache == "none":
        past = tail = 0
    elif cache == "dynamic":
        state, tail = Cache(past, past + q_len), 0
    elif cache == "static":
        state = Cache(past, past + q_len + tail, compileable=True)
    elif cache == "static_tensor":
        state = Cache(torch.tensor(past), past + q_len + tail, compileable=True)
    elif kind in ("sliding", "chunked", "bidirectional_sliding"):
        tail = 0
        dropped = max(past - size + 1, 0)
        state = Cache(past, past - dropped + q_len, dropped, sliding=True)
    else:
        cache, past, tail = "none", 0, 0
    keep = padding_of(padding, batch, past + q_len, generator)
    check(
        BUILDERS[kind], made, batch, q_len, cache=state, attention_mask=keep,
        causal=not kind.startswith("bidirectional"),
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["causal", "sliding", "chunked"]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    batch=st.integers(1, 2),
    size=st.integers(1, 5),
)
def test_packed_documents(kind, lengths, batch, size):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    made = config(sliding_window=size, attention_chunk_size=size)
    check(BUILDERS[kind], made, batch, positions.shape[1], attention_mask=None, position_ids=positions)


def image_blocks(lengths):
    """Ids as gemma3 numbers them: -1 for text, 0, 1, ... for each image."""
    ids, image = [], 0
    for index, length in enumerate(lengths):
        ids += [image if index % 2 else -1] * length
        image += index % 2
    return torch.tensor([ids])


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    kind=st.sampled_from(["causal", "sliding"]),
    packed=st.booleans(),
    padding=st.sampled_from(["none", "left", "right"]),
    static=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_image_blocks(lengths, kind, packed, padding, static, seed):
    ids = image_blocks(lengths).expand(2, -1)
    q_len = ids.shape[1]
    kwargs = {"attention_mask": padding_of(padding, 2, q_len, torch.Generator().manual_seed(seed))}
    if static:
        kwargs["cache"] = Cache(torch.tensor(0), q_len + 4, compileable=True)
    elif packed and padding == "none":
        half = q_len // 2
        kwargs["position_ids"] = torch.cat([torch.arange(half), torch.arange(q_len - half)])[None]
    check(
        BUILDERS[kind], config("gemma3_text", sliding_window=4), 2, q_len, block_sequence_ids=ids, **kwargs
    )  # fmt: skip


def test_blocks_that_may_stand_apart_stay_dense():
    ids = torch.tensor([[0, -1, 0, 1, -1, 1]])
    masks.dense_reasons.clear()
    got = check(mu.create_causal_mask, config(), 1, 6, ranges_expected=False, attention_mask=None, block_sequence_ids=ids)
    assert got.shape == (1, 1, 6, 6)
    assert list(masks.dense_reasons.as_dict()) == ["block ids of model type llama are not known to be contiguous"]


@pytest.mark.parametrize("which", ["or_mask_function", "and_mask_function"])
def test_a_users_own_mask_function_stays_dense(which):
    masks.dense_reasons.clear()

    def every_third(_b, _h, q, k):
        return (q + k) % 3 == 0

    check(mu.create_causal_mask, config(), 2, 7, ranges_expected=False, attention_mask=None, **{which: every_third})
    (reason,) = masks.dense_reasons.as_dict()
    assert "every_third is not one of transformers' own" in reason


def test_transformers_own_functions_given_by_the_user_become_ranges():
    kwargs = {"and_mask_function": mu.sliding_window_overlay(3), "attention_mask": None}
    check(mu.create_causal_mask, config(), 2, 7, **kwargs)


@pytest.mark.parametrize("model", sorted(masks.DENSE_MODELS))
def test_models_that_compute_on_masks_get_dense_ones(model):
    check(mu.create_causal_mask, config(model), 1, 4, ranges_expected=False, attention_mask=None)


def test_every_part_of_such_a_model_gets_dense_masks():
    """Parts have model types of their own (siglip2_vision_model): the class says where a part belongs."""
    from transformers import PreTrainedConfig
    from transformers.models.parakeet import configuration_parakeet
    from transformers.models.siglip2 import configuration_siglip2

    for module in (configuration_siglip2, configuration_parakeet):
        parts = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
        assert parts and all(issubclass(each, PreTrainedConfig) for each in parts)
        for part in parts:
            assert masks.model_of(part()) in masks.DENSE_MODELS, part


@pytest.mark.parametrize("model", sorted(masks.OWN_ATTENTION | masks.EAGER_MASKS))
def test_models_with_attention_of_their_own_get_the_mask_of_eager(model):
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[0, :2] = False
    arguments = dict(batch_size=2, q_length=6, kv_length=6, attention_mask=padding, dtype=torch.float32)
    got = masks.tpu_attention_mask(**arguments, config=config(model))
    assert torch.equal(got, mu.eager_mask(**arguments)) and got.min() == torch.finfo(torch.float32).min


def test_one_part_of_a_model_may_need_the_mask_of_eager():
    """gemma4's audio tower cuts its mask in blocks; its other parts take ranges."""
    arguments = dict(batch_size=1, q_length=6, kv_length=6, dtype=torch.float32, attention_mask=torch.ones(1, 6).bool())
    for part, dtype in (("gemma4_audio", torch.float32), ("gemma4_text", torch.int32), ("gemma4_vision", torch.int32)):
        made = config_class("gemma4")(part, None, None)
        assert masks.tpu_attention_mask(**arguments, config=made).dtype == dtype


@pytest.mark.parametrize(("version", "shared", "ranges"), [("5.22.2", 2, True), ("5.24.0", 0, True), ("5.24.0", 2, False)])
def test_masks_that_a_model_slices_stay_dense(version, shared, ranges, monkeypatch):
    """From 5.23 on gemma4's layers with shared keys get the last rows of the mask, without its key validity."""
    monkeypatch.setattr(masks.transformers, "__version__", version)
    made = config_class("gemma4")("gemma4_text", None, None)
    made.num_kv_shared_layers = shared
    check(mu.create_causal_mask, made, 1, 4, ranges_expected=ranges, attention_mask=None)


def test_a_model_whose_code_nobody_has_read_gets_dense_masks():
    masks.dense_reasons.clear()
    strange = config_class("llama", "transformers_modules")("llama", None, None)
    check(mu.create_causal_mask, strange, 1, 4, ranges_expected=False, attention_mask=None)
    assert any("not transformers' own" in reason for reason in masks.dense_reasons.as_dict())
    derived = type("MyConfig", (config_class("llama"),), {"__module__": "mine"})("mine", None, None)
    check(mu.create_causal_mask, derived, 1, 4, attention_mask=None)


def mask_arithmetic(function: ast.FunctionDef) -> set[str]:
    """Expressions of a modeling function that index, read or compute on a mask made by transformers' builders."""
    made = {
        target.id: node.lineno  # until then the name may stand for the user's 2-D mask
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if re.fullmatch(r"create_\w*mask\w*", getattr(node.value.func, "id", getattr(node.value.func, "attr", "")))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if any(isinstance(node, ast.Name) and node.id == "attention_interface" for node in ast.walk(function)):
        made["attention_mask"] = 0
    if not made:
        return set()

    def is_mask(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in made and node.lineno > made[node.id]

    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=value) | ast.Attribute(value=value) | ast.UnaryOp(op=ast.Invert(), operand=value):
                touched = is_mask(value)
            case ast.BinOp(left=left, right=right):
                touched = is_mask(left) or is_mask(right)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch")), args=arguments):
                touched = any(map(is_mask, arguments))
            case _:
                touched = False
        if touched:
            found.add(ast.unparse(node))
    return found


# Models that the scan finds and that need no dense mask, with the expression that was looked at.
HARMLESS = {
    "diffusion_gemma": {"mask_mapping[self.text_config.layer_types[i]]"},  # a choice between masks
}


@pytest.mark.slow
def test_no_other_model_of_this_release_computes_on_its_mask():
    scanned = 0
    unknown = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        scanned += 1
        if "mask" not in text:
            continue
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        found = set().union(*map(mask_arithmetic, functions))
        model = path.parent.name
        if found - HARMLESS.get(model, set()) and model not in masks.DENSE_MODELS | masks.OWN_ATTENTION | masks.EAGER_MASKS:
            unknown[model] = found
    assert scanned > 300
    assert not unknown, "look at these, then add them to masks.DENSE_MODELS, or to HARMLESS here"


# Models that the scan below finds and whose own attention never meets a mask of ours, and why.
HARMLESS_OWN = {
    "mamba2": "has no attention",
    "paligemma": "leaves attention to its parts",
    "pi0": "leaves attention to its parts",
    "clap": "masks of its own, for shifted windows",
    "conditional_detr": "the mask of pixels",
    "decision_transformer": "only under eager",
    "detr": "the mask of pixels",
    "git": "finds its attention class by name, and so takes no other",
    "gpt2": "only under eager",
    "maskformer": "the mask of pixels",
    "pegasus_x": "the encoder's own additive mask",
}


def attention_of_its_own(text: str) -> bool:
    """Whether a modeling file builds masks and adds one to scores in a class, or never calls the attention interface."""
    if "masking_utils" not in text or not re.search(r"\bcreate_\w*mask\w*\(", text):
        return False
    if "ALL_ATTENTION_FUNCTIONS" not in text:
        return True
    for made in ast.walk(ast.parse(text)):
        if isinstance(made, ast.ClassDef) and "softmax" in ast.unparse(made):
            for node in ast.walk(made):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                    left, right = ast.unparse(node.left), ast.unparse(node.right)
                    if re.search("attn|attention|score", left) and re.match(r"\w*mask\b", right):
                        return True
    return False


@pytest.mark.slow
def test_no_other_model_of_this_release_has_attention_of_its_own():
    paths = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
    found = {path.parent.name for path in paths if attention_of_its_own(path.read_text(encoding="utf-8"))}
    assert len(paths) > 300 and len(found & masks.OWN_ATTENTION) > 30
    unknown = found - masks.OWN_ATTENTION - masks.EAGER_MASKS - masks.DENSE_MODELS - HARMLESS_OWN.keys()
    assert not unknown, "look at these, then add them to masks.OWN_ATTENTION, or to HARMLESS_OWN here"


def test_no_other_model_of_this_release_is_kept_off_sdpa():
    """No mask means "every key" to the code of such models, so their causal masks are never skipped."""
    models = Path(transformers.__file__).parent / "models"
    calling: dict[str, bool] = {}
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "ALL_ATTENTION_FUNCTIONS" in text:
            model = path.parent.name
            calling[model] = calling.get(model, False) or "_supports_sdpa = True" in text
    unsupported = {model for model, supported in calling.items() if not supported}
    assert len(calling) > 300
    assert unsupported <= masks.NEVER_SDPA
    assert {model for model in masks.NEVER_SDPA if model in calling} == unsupported


def test_masks_of_models_kept_off_sdpa_are_never_skipped():
    got = build(mu.create_causal_mask, "ranges_under_test", config("nllb_moe"), 2, 5, attention_mask=None)
    assert rows_of(got, 5, 5) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    kwargs = dict(config=config("nllb_moe"), mask_function=mu.bidirectional_mask_function, allow_is_bidirectional_skip=True)
    assert masks.tpu_attention_mask(2, 5, 5, **kwargs) is None


def test_an_unknown_release_gets_dense_masks(monkeypatch):
    monkeypatch.setattr(masks.transformers, "__version__", "5.31.0")
    masks.dense_reasons.clear()
    check(mu.create_causal_mask, config(), 1, 4, ranges_expected=False, attention_mask=None)
    assert any("5.31.0" in reason for reason in masks.dense_reasons.as_dict())


def rows_of(mask, q_len, kv_len):
    return [row.nonzero()[:, 0].tolist() for row in expand_range_mask(mask, q_len, kv_len)[0, 0]]


def test_known_answer_window_counts_the_query_itself():
    got = build(BUILDERS["sliding"], "ranges_under_test", config(sliding_window=3), 1, 5, attention_mask=None)
    assert rows_of(got, 5, 5) == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_known_answer_chunks_start_at_the_first_real_token():
    keep = torch.tensor([[0, 1, 1, 1, 1, 1]])
    got = build(BUILDERS["chunked"], "ranges_under_test", config(attention_chunk_size=3), 1, 6, attention_mask=keep)
    assert rows_of(got, 6, 6) == [[], [1], [1, 2], [1, 2, 3], [4], [4, 5]]


def test_known_answer_static_decode():
    cache = Cache(torch.tensor(4), 8, compileable=True)
    got = build(
        BUILDERS["causal"], "ranges_under_test", config(), 1, 1, cache=cache,
        attention_mask=torch.tensor([[0, 0, 1, 1, 1]]),
    )  # fmt: skip
    assert rows_of(got, 1, 8) == [[2, 3, 4]]


def test_known_answer_two_documents():
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    got = build(BUILDERS["causal"], "ranges_under_test", config(), 1, 5, attention_mask=None, position_ids=positions)
    assert rows_of(got, 5, 5) == [[0], [0, 1], [2], [2, 3], [2, 3, 4]]


@pytest.mark.parametrize(
    ("q_len", "cache", "is_none"),
    [
        (5, None, True),
        (5, Cache(0, 5), True),
        (1, Cache(7, 8), True),
        (5, Cache(0, 9), False),
        (5, Cache(3, 8), False),
        (1, Cache(7, 12), False),
        (1, Cache(torch.tensor(7), 8), False),
        (1, Cache(7, 8, compileable=True), False),
    ],
)
def test_none_only_where_it_is_exact(q_len, cache, is_none):
    got = build(mu.create_causal_mask, "ranges_under_test", config(), 2, q_len, cache=cache, attention_mask=None)
    assert (got is None) == is_none


def test_none_never_with_a_padding_mask():
    got = build(mu.create_causal_mask, "ranges_under_test", config(), 2, 5, attention_mask=torch.ones(2, 5))
    assert got is not None


def test_a_window_longer_than_the_keys_is_plain_causal():
    def mask(window):
        return build(BUILDERS["sliding"], "ranges_under_test", config(sliding_window=window), 1, 6, attention_mask=None)

    assert mask(6) is None and mask(7) is None
    assert mask(5) is not None


class NoHostReads(TorchDispatchMode):
    """Fails on any operator that hands a tensor's value to Python."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::item", "aten::equal"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["causal", "sliding", "chunked", "bidirectional"])
def test_no_value_is_read_on_the_host(kind):
    made = config(sliding_window=3, attention_chunk_size=3)
    keep = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    cache = Cache(torch.tensor(0), 9, compileable=True)
    with NoHostReads():
        build(BUILDERS[kind], "ranges_under_test", made, 2, 5, attention_mask=keep, cache=cache)


@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_memory_stays_linear(kind):
    """A dense mask of this size would be 16 GiB."""
    length = 1 << 17
    made = config(sliding_window=100, attention_chunk_size=100)
    got = build(BUILDERS[kind], "ranges_under_test", made, 1, length, attention_mask=torch.ones(1, length))
    assert got.numel() <= 4 * (length + length // 128)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_one_graph_under_compile(kind, dynamic):
    torch._dynamo.reset()
    made = config(sliding_window=3, attention_chunk_size=3)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(keep, offset):
        cache = Cache(offset, 12, compileable=True)
        return build(BUILDERS[kind], "ranges_under_test", made, 2, 5, attention_mask=keep, cache=cache)

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    for seed, offset in ((0, 0), (1, 3), (2, 7)):
        keep = padding_of("holes", 2, 12, torch.Generator().manual_seed(seed)).bool()
        assert torch.equal(compiled(keep, torch.tensor(offset)), step(keep, torch.tensor(offset)))
    assert counter.frame_count == 1


def test_packed_documents_in_one_graph():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    made = config()

    def step(positions):
        return build(
            BUILDERS["causal"], "ranges_under_test", made, 1, 6, attention_mask=None, position_ids=positions
        )

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=False)
    for positions in ([0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3], [0, 0, 0, 0, 1, 0]):
        got = compiled(torch.tensor([positions]))
        want = build(
            BUILDERS["causal"], "dense_reference", config(), 1, 6, attention_mask=None,
            position_ids=torch.tensor([positions]),
        )  # fmt: skip
        assert torch.equal(expand_range_mask(got, 6, 6), want.expand(1, 1, 6, 6))
    assert counter.frame_count == 1
