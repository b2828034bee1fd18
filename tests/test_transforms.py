"""torch.func and forward-mode AD through tpu_attention, whose ops have autograd's derivative only: exact, off the kernel.

Expected: the same transform of attention written out in the test, in float64.
"""

import pytest
import torch
import torch._dynamo
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vjp, vmap

import tpu_kernels
from tpu_kernels.attention import tpu_attention
from tpu_kernels.partials import attention_with_lse

Q = 6


class Layer(torch.nn.Module):
    layer_idx = 0


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register()
    tpu_kernels.reset()
    yield
    torch._dynamo.reset()


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, Q, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]


def ours(q, k, v):
    return tpu_attention(Layer(), q, k, v, None)[0].cos().sum()


def written_out(q, k, v):
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    seen = torch.ones(Q, Q, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).cos().sum()


def by_forward_ad(function, q, k, v, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(q, tangent), k, v)).tangent


TRANSFORMS = {
    "grad": lambda f, q, k, v, t: grad(f)(q, k, v),
    "grad of the values": lambda f, q, k, v, t: grad(f, argnums=2)(q, k, v),
    "vjp": lambda f, q, k, v, t: vjp(lambda q: f(q, k, v), q)[1](torch.ones_like(f(q, k, v)))[0],
    "jvp": lambda f, q, k, v, t: jvp(lambda q: f(q, k, v), (q,), (t,))[1],
    "jacfwd": lambda f, q, k, v, t: jacfwd(lambda scale: f(q * scale, k, v))(torch.tensor(1.0)),
    "second": lambda f, q, k, v, t: grad(lambda x: (grad(f)(x, k, v) * t).sum())(q),
    "each example's": lambda f, q, k, v, t: vmap(grad(lambda *one: f(*(x[None] for x in one))))(q, k, v),
    "forward mode": by_forward_ad,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_are_those_of_attention(name):
    q, k, v, tangent = operands()
    found = TRANSFORMS[name](ours, q, k, v, tangent)
    expected = TRANSFORMS[name](written_out, q, k, v, tangent)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)
    assert ("eager", "transformed") in {(row.route, row.reason) for row in tpu_kernels.explain().rows}


@pytest.mark.parametrize("name", ["grad", "jvp"])
def test_compiled(name):
    q, k, v, tangent = operands()
    found = torch.compile(lambda q: TRANSFORMS[name](ours, q, k, v, tangent))(q)
    expected = TRANSFORMS[name](written_out, q, k, v, tangent)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_a_graph_compiled_for_the_kernel_is_not_taken_under_a_transform():
    q, k, v, _ = operands()
    compiled = torch.compile(ours, backend="aot_eager")
    plain = compiled(q, k, v)
    found = grad(compiled)(q, k, v)
    torch.testing.assert_close(found, grad(written_out)(q, k, v).float(), rtol=1e-4, atol=1e-5)
    assert torch.equal(compiled(q, k, v), plain)


def test_float16_in_forward_mode():
    q, k, v, tangent = operands(torch.float16)
    found = TRANSFORMS["jvp"](ours, q, k, v, tangent)
    expected = TRANSFORMS["jvp"](written_out, q, k, v, tangent)
    assert expected.abs() > 0.5
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def test_vmap_without_a_derivative_stays_on_the_kernel():
    q, k, v, _ = operands()
    many = torch.stack([q, -q, 2 * q])
    found = vmap(lambda q: tpu_attention(Layer(), q, k, v, None)[0])(many)
    for out, each in zip(found, many, strict=True):
        torch.testing.assert_close(out, tpu_attention(Layer(), each, k, v, None)[0])
    assert {row.reason for row in tpu_kernels.explain().rows} == {"kernel"}


def test_the_rest_runs_on_the_kernel_again():
    q, k, v, _ = operands()
    grad(ours)(q, k, v)
    tpu_kernels.reset()
    ours(q, k, v)
    assert {row.reason for row in tpu_kernels.explain().rows} == {"kernel"}


def test_strict_and_partial_results_refuse():
    q, k, v, _ = operands()
    with pytest.raises(ValueError, match=r"torch.func.*backward\(\)"):
        grad(lambda q: attention_with_lse(q, k, v)[0].sum())(q)
    tpu_kernels.register(strict=True)
    try:
        with pytest.raises(tpu_kernels.FallbackError, match="torch.func"):
            grad(ours)(q, k, v)
    finally:
        tpu_kernels.register(strict=False)


def test_meta_tensors_give_shapes():
    q, k, v, _ = operands()
    out, _ = tpu_attention(Layer(), *(x.to("meta") for x in (q, k, v)), None)
    assert out.shape == (2, Q, 4, 16) and out.device.type == "meta"


def test_heads_of_no_size():
    q, k, v, _ = operands()
    assert tpu_attention(Layer(), q, k, v[..., :0], None)[0].shape == (2, Q, 4, 0)
    with pytest.raises(ValueError, match="head_dim 0"):
        tpu_attention(Layer(), q[..., :0], k[..., :0], v, None)
    # Scores are all 0: a row is the mean of the values it sees.
    out, _ = tpu_attention(Layer(), q[..., :0], k[..., :0], v, None, scaling=1.0)
    mean = v.cumsum(2) / torch.arange(1, Q + 1)[:, None]
    torch.testing.assert_close(out.transpose(1, 2), mean.repeat_interleave(2, 1))
