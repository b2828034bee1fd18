"""Why torch_tpu's splash_sdpa is not among the packaged kernels: what it does with the calls that splash-attention takes.

When one of these fails, torch_tpu has changed: look again at docs/hub-kernels.md ("Why torch_tpu's splash_sdpa is not").
"""

from __future__ import annotations

import inspect

import jax
import pytest
import torch
from jax.experimental import pallas as pl

from tpu_kernels import verify

FUNCTION = "_make_splash_attention_fn"  # the JAX functions behind splash_sdpa, which as a torch op runs on a TPU alone
CASES = {case.name: case for case in verify.parity_cases(large=False) if not (case.masked or case.softcap or case.sinks)}
CASES |= {
    case.name: case
    for case in (
        verify.Case("no mask, full, more keys", 1, 2, 2, 128, 256, 64, dtype="float32", causal=False, masked=False),
        verify.Case("no mask, 640 keys", 1, 2, 2, 640, 640, 64, dtype="float32", masked=False),
    )
}
WRONG = {"no mask, large scores", "no mask, full, more keys"}


@pytest.fixture
def make(monkeypatch):
    """The JAX functions' maker. They cannot be told to be emulated, so Pallas is."""
    real = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **options: real(*args, **options | {"interpret": True}))
    module = pytest.importorskip("torch_tpu._internal.ops.splash_attention")
    return getattr(module, FUNCTION)


def errors(make, case: verify.Case, window: int | None = None) -> tuple[float, float]:
    """(largest error against float64, what is allowed: see verify)."""
    q, k, v, sinks, visible, _ = verify.make(case)
    forward, _ = make(case.q_len, case.q_heads, case.kv_heads, is_causal=case.causal, local_window_size=window)
    out, _ = forward(*(jax.dlpack.from_dlpack(each) for each in (q, k, v)))
    got = torch.from_dlpack(jax.block_until_ready(out)).transpose(1, 2)
    exact = verify.reference(case, q, k, v, visible, sinks)
    peer = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2)
    allowed = 2 * (peer.double() - exact).abs().max() + torch.finfo(q.dtype).eps * exact.abs().max()
    return float((got.double() - exact).abs().max()), float(allowed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "no mask, 640 keys"])
def test_where_it_is_exact_and_where_not(make, name):
    error, allowed = errors(make, CASES[name])
    print(f"{name}: {error:.1e} (allowed {allowed:.1e})")
    assert (error > allowed) == (name in WRONG)


@pytest.mark.slow
def test_lengths_that_512_does_not_divide_are_refused(make):
    with pytest.raises(ValueError, match="q_block_size=512 should divide q_seq_len=640"):
        errors(make, CASES["no mask, 640 keys"])


@pytest.mark.slow
def test_a_window_sees_one_key_more(make):
    case = verify.Case("window", 1, 2, 2, 128, 128, 64, dtype="float32", window=5)
    error, allowed = errors(make, case, window=5)
    assert error > 1000 * allowed
    error, allowed = errors(make, case, window=4)
    assert error <= allowed


@pytest.mark.slow
def test_it_has_neither_softcap_nor_sinks_nor_emulation(make):
    assert not {"softcap", "sinks", "interpret"} & set(inspect.signature(make).parameters)
