"""Training through tpu_attention: the differentiable op, checkpointing, compilation, and loss curves beside SDPA's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import tpu_kernels
from tpu_kernels import fallback, masks
from tpu_kernels.attention import tpu_attention

B, HQ, HKV, D = 2, 4, 2, 16
TEXT = Path(__file__).parents[1] / "LICENSE"


class Layer(torch.nn.Module):
    """What tpu_attention reads of an attention module."""

    layer_idx = 0
    num_key_value_groups = HQ // HKV


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register(strict=True)  # a fallback would pass every comparison below
    tpu_kernels.reset()
    yield
    tpu_kernels.register(strict=False)
    torch._dynamo.reset()


def tensors(q_len=8, kv_len=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, HQ, q_len, D), (B, HKV, kv_len, D), (B, HKV, kv_len, D))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def ranges(q_len, kv_len):
    """Causal from the end, the first row of the first example without keys, two holes in the keys."""
    ends = (torch.arange(q_len) + 1 + kv_len - q_len).clamp(min=0).expand(B, q_len).to(torch.int32).clone()
    ends[0, 0] = 0
    valid = torch.ones(B, kv_len, dtype=torch.bool)
    valid[1, [1, 4]] = False
    return masks.encode_ranges(torch.zeros_like(ends), ends, valid, kv_len)


def gradients(function, inputs):
    """Of the sum of the cosines of the output, by name; None where there is none."""
    inputs = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    function(**inputs).cos().sum().backward()
    return {name: x.grad for name, x in inputs.items()}


def ours(mask=None, **options):
    def function(q, k, v, sinks=None):
        return tpu_attention(Layer(), q, k, v, mask, s_aux=sinks, **options)[0]

    return function


def eager(mask=None, softcap=0.0):
    def function(q, k, v, sinks=None):
        dense = None if mask is None else masks.expand_range_mask(mask, q.shape[2], k.shape[2])
        out, _ = fallback.eager(
            q, k, v, dense, causal=mask is None and q.shape[2] > 1, scale=D**-0.5, dropout=0.0, softcap=softcap,
            sinks=sinks, position_bias=None,
        )  # fmt: skip
        return out.transpose(1, 2)

    return function


def learned(q_len=8, kv_len=8, dtype=torch.float32, sinks=False):
    inputs = dict(zip("qkv", tensors(q_len, kv_len, dtype), strict=True))
    if sinks:
        inputs["sinks"] = torch.linspace(-1, 2, HQ).to(dtype)
    return {name: x.requires_grad_() for name, x in inputs.items()}


def close(got, want, atol=3e-6):
    assert got.keys() == want.keys()
    for name in want:
        say = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(got[name], want[name], atol=atol, rtol=1e-5, msg=say)


# --- the op --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(8, 8), (1, 40), (5, 200), (40, 7)])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_eager(lengths, masked):
    """(1, 40) is a decoding step with a growing cache: without gradients its keys would be padded."""
    mask = ranges(*lengths) if masked else None
    close(gradients(ours(mask), learned(*lengths)), gradients(eager(mask), learned(*lengths)))


def test_softcap_and_sinks():
    mask = ranges(8, 9)
    got = gradients(ours(mask, softcap=1.5), learned(8, 9, sinks=True))
    close(got, gradients(eager(mask, softcap=1.5), learned(8, 9, sinks=True)))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sinks"])
def test_only_inputs_that_require_a_gradient_get_one(wanted):
    inputs = learned(sinks=True)
    everything = gradients(ours(), inputs)
    for name, x in inputs.items():
        x.requires_grad_(name == wanted)
    got = gradients(ours(), inputs)
    assert [name for name, x in got.items() if x is not None] == [wanted]
    assert torch.equal(got[wanted], everything[wanted])


def test_autocast():
    """float32 parameters, bfloat16 attention: gradients come back in float32, as accurate as eager's."""
    mask = ranges(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(ours(mask), learned())
    want = gradients(eager(mask), learned())
    assert all(x.dtype == torch.float32 for x in got.values())
    close(got, want, atol=3e-2)


def test_second_derivatives_are_refused():
    q, k, v = (x.requires_grad_() for x in tensors())
    (grad,) = torch.autograd.grad(tpu_attention(Layer(), q, k, v, None)[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives.*'eager'"):
        grad.sum().backward()


def test_the_lse_is_differentiable():
    q, k, v = (x.requires_grad_() for x in tensors())
    static = (D**-0.5, 0.0, True, False, "highest", 0, 0, 0)
    op = torch.ops.tpu_kernels.range_attention_forward_with_lse
    _, lse = op(q, k, v, None, None, *static)
    got = torch.autograd.grad(lse.square().sum(), (q, k, v), allow_unused=True)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * D**-0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    want = torch.autograd.grad(scores.logsumexp(-1).square().sum(), (q, k))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=2e-6, rtol=1e-6)
    close(dict(zip("qk", got, strict=False)), dict(zip("qk", want, strict=True)))
    assert got[2] is None or not got[2].any()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck reads it itself
@pytest.mark.parametrize("sinks", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_opcheck(sinks):
    """Schema, fakes, autograd registration, and AOTAutograd with fixed and with symbolic sizes."""
    q, k, v = tensors(5, 9)
    static = (0.25, 3.0, False, True, "highest", 0, 0, 0)
    extra = torch.zeros(HQ) if sinks else None
    forward = torch.ops.tpu_kernels.range_attention_forward_with_lse.default
    out, lse = forward(q, k, v, ranges(5, 9), extra, *static)
    backward = torch.ops.tpu_kernels.range_attention_backward.default
    torch.library.opcheck(backward, (q, k, v, ranges(5, 9), extra, out, lse, torch.ones_like(out), None, *static))
    for x in (q, k, v, *([] if extra is None else [extra])):
        x.requires_grad_()
    torch.library.opcheck(forward, (q, k, v, ranges(5, 9), extra, *static))


# --- checkpointing and compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    inputs = learned(8, 8)

    def recomputed(q, k, v):
        return checkpoint(lambda *x: ours()(*x), q, k, v, use_reentrant=use_reentrant)

    close(gradients(recomputed, inputs), gradients(ours(), inputs), atol=1e-6)


def test_selective_checkpoint_saves_the_op():
    """The policy keeps the op's results: backward recomputes the rest and runs attention's forward no second time."""
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    op = torch.ops.tpu_kernels.range_attention_forward_with_lse.default

    def policy(_context, function, *_args, **_kwargs):
        return CheckpointPolicy.MUST_SAVE if function == op else CheckpointPolicy.PREFER_RECOMPUTE

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += function == op
            return function(*args, **(kwargs or {}))

    def run(q, k, v):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(lambda *x: ours()(*(y.sin() for y in x)), q, k, v, use_reentrant=False, context_fn=contexts)

    with Counting() as count:
        got = gradients(run, learned())
    assert count.calls == 1
    close(got, gradients(lambda q, k, v: ours()(q.sin(), k.sin(), v.sin()), learned()), atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_graph_under_compile(dynamic):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer, mask = Layer(), ranges(8, 8)
    compiled = torch.compile(
        lambda q, k, v: tpu_attention(layer, q, k, v, mask)[0], fullgraph=True, backend=counter, dynamic=dynamic
    )
    close(gradients(compiled, learned()), gradients(ours(mask), learned()))
    compiled_once = counter.frame_count  # with dynamic sizes, Dynamo may start over after the backend has seen the graph
    gradients(compiled, learned())
    assert counter.frame_count == compiled_once and (dynamic or compiled_once == 1)
    with torch.no_grad():
        compiled(*tensors())
    assert counter.frame_count > compiled_once  # inference takes another function


# --- models --------------------------------------------------------------------------------------------------------


def llama(attention, **config):
    torch.manual_seed(0)
    made = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention, **config,
    )  # fmt: skip
    return LlamaForCausalLM(made).train()


def model_gradients(model, **inputs):
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: x.grad for name, x in model.named_parameters()}


def batch():
    ids = torch.frombuffer(bytearray(TEXT.read_bytes()[:48]), dtype=torch.uint8).long().reshape(2, 24)
    keep = torch.ones_like(ids)
    keep[0, :7] = 0
    return dict(input_ids=ids, attention_mask=keep, labels=ids.masked_fill(keep == 0, -100), use_cache=False)


def test_a_padded_batch():
    close(model_gradients(llama("tpu_attention"), **batch()), model_gradients(llama("sdpa"), **batch()), atol=2e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_of_a_model(use_reentrant):
    model = llama("tpu_attention")
    want = model_gradients(model, **batch())
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    close(model_gradients(model, **batch()), {name: x.clone() for name, x in want.items()}, atol=1e-6)


def test_adapters_of_another_dtype():
    """As PEFT trains: bfloat16 weights, float32 adapters on q and v alone, under autocast."""
    found = {}
    for attention in ("sdpa", "tpu_attention"):
        model = llama(attention).to(torch.bfloat16).requires_grad_(False)
        torch.manual_seed(1)
        adapters = {}
        for index, layer in enumerate(model.model.layers):
            for name in ("q_proj", "v_proj"):
                base = getattr(layer.self_attn, name)
                adapter = torch.nn.Linear(base.in_features, base.out_features, bias=False)
                adapters[f"{index}.{name}"] = adapter.weight
                base.register_forward_hook(lambda _module, x, out, adapter=adapter: out + adapter(x[0].float()))
        with torch.autocast("cpu", torch.bfloat16):
            model(**batch()).loss.backward()
        found[attention] = {name: weight.grad for name, weight in adapters.items()}
    assert all(grad.dtype == torch.float32 and grad.any() for grad in found["sdpa"].values())
    close(found["tpu_attention"], found["sdpa"], atol=2e-2 * max(grad.abs().max() for grad in found["sdpa"].values()))


def test_packed_documents():
    """A loss on the second document has no gradient at the first one's tokens."""
    model = llama("tpu_attention")
    ids = torch.arange(24)[None]
    labels = ids.clone()
    labels[:, :11] = -100  # the second document's first token is predicted by the first one's last
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss.backward()
    grad = model.model.embed_tokens.weight.grad
    assert (grad[:10] == 0).all() and (grad[10:23].abs().sum(-1) > 0).all()


def test_a_compiled_training_step():
    model = llama("tpu_attention")
    want = model_gradients(model, **batch())
    want = {name: x.clone() for name, x in want.items()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    close(model_gradients_of(compiled, model), want, atol=2e-6)


def model_gradients_of(compiled, model):
    loss = compiled(**batch()).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: x.grad for name, x in model.named_parameters()}


def losses(attention, steps, dtype):
    """AdamW on random windows of this project's licence text, byte by byte."""
    model = llama(attention).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    curve = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 48, (2,), generator=generator)
        ids = torch.stack([text[at : at + 48] for at in starts])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve)


@pytest.mark.parametrize(
    ("steps", "dtype"),
    [
        (10, torch.float32),
        pytest.param(200, torch.float32, marks=pytest.mark.slow),
        pytest.param(200, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["10-f32", "200-f32", "200-bf16"],
)
def test_loss_curves_agree(steps, dtype, capsys):
    """As close to SDPA's curve as eager attention's is: a few times closer or farther is chance."""
    curves = {name: losses(name, steps, dtype) for name in ("sdpa", "eager", "tpu_attention")}
    (row,) = {(row.route, row.calls) for row in tpu_kernels.explain().rows}  # the same for both layers
    assert row == ("range-attention.forward_with_lse", steps)
    gap, usual = ((curves[name] - curves["sdpa"]).abs().max().item() for name in ("tpu_attention", "eager"))
    first, last = (curves["tpu_attention"][part].mean().item() for part in (slice(0, 3), slice(-3, None)))
    with capsys.disabled():
        print(f"\n{steps} steps {dtype}: loss {first:.3f} -> {last:.3f}; max gap to sdpa {gap:.2e}, eager's {usual:.2e}")
    assert last < first - (0.3 if steps == 10 else 1.5)
    assert gap <= 4 * usual + 1e-6
