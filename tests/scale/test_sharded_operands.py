"""Fault kind 44, heads that the processes do not divide and operands sharded apart: each rank's part, or a clear refusal.

A process group of torch's own that moves nothing stands for the others. Real processes: test_tensor_parallel.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpu_kernels
from tpu_kernels.attention import tpu_attention

MODULE = torch.nn.Identity()


@pytest.fixture(autouse=True)
def _fresh():
    tpu_kernels.register()
    tpu_kernels.reset()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def join(rank: int, size: int, *shape: int):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    names = ("data", "model")[-len(shape or (size,)) :]
    return dist.device_mesh.init_device_mesh("cpu", shape or (size,), mesh_dim_names=names)


def tensors(heads=8, kv_heads=4, length=12):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, length, 16, generator=generator) for n in (heads, kv_heads, kv_heads)]


def spread(mesh, whole, placements):
    """The DTensor of which this rank holds its part of `whole`."""
    part = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = part.tensor_split(mesh.size(axis), placement.dim)
            part = parts[mesh.get_local_rank(axis)]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("size", "rank"), [(2, 1), thorough(2, 0), thorough(4, 0), thorough(4, 3)])
@pytest.mark.parametrize("kind", ["dense", "bias", "sinks", *map(thorough, ("causal", "padding"))])
def test_each_rank_gives_its_heads_of_the_whole(kind, size, rank):
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(1)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    mask, extra = None, {}
    if kind == "padding":
        mask = (causal & (torch.arange(12) > 3) | torch.eye(12).bool())[None, None]
    elif kind == "dense":
        mask = causal & (torch.rand(2, 1, 12, 12, generator=generator) < 0.7) | torch.eye(12).bool()
    elif kind == "bias":
        extra = {"position_bias": torch.randn(1, 8, 12, 12, generator=generator)}
    elif kind == "sinks":
        extra = {"s_aux": torch.randn(8, generator=generator)}
    want, _ = tpu_attention(MODULE, q, k, v, mask, **extra)
    mesh = join(rank, size)
    given = {
        name: spread(mesh, whole, [Shard(1 if name == "position_bias" else 0)]) for name, whole in extra.items()
    }
    out, _ = tpu_attention(MODULE, *(spread(mesh, x, [Shard(1)]) for x in (q, k, v)), mask, **given)
    assert out.placements == (Shard(2),) and out.shape == want.shape
    torch.testing.assert_close(out.to_local(), want.tensor_split(size, 2)[rank], atol=2e-6, rtol=0)


def test_a_mesh_of_two_dimensions():
    q, k, v = tensors()
    want, _ = tpu_attention(MODULE, q, k, v, None)
    mesh = join(3, 4, 2, 2)
    out, _ = tpu_attention(MODULE, *(spread(mesh, x, [Replicate(), Shard(1)]) for x in (q, k, v)), None)
    torch.testing.assert_close(out.to_local(), want[:, :, 4:], atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(3, 3, 2), (8, 1, 2), *(thorough(*each) for each in ((3, 1, 2), (6, 3, 2), (8, 2, 4), (5, 5, 4)))]
)
def test_heads_that_do_not_divide(heads, kv_heads, size):
    """Replicated they are attended to; split, a rank that would hold other groups refuses."""
    q, k, v = tensors(heads, kv_heads)
    want, _ = tpu_attention(MODULE, q, k, v, None)
    mesh = join(0, size)
    whole, _ = tpu_attention(MODULE, *(spread(mesh, x, [Replicate()]) for x in (q, k, v)), None)
    assert torch.equal(whole.to_local(), want)
    split = [spread(mesh, x, [Shard(1)]) for x in (q, k, v)]
    if heads == kv_heads:  # groups of one head stay together, wherever they are
        part, _ = tpu_attention(MODULE, *split, None)
        torch.testing.assert_close(part.to_local(), want.tensor_split(size, 2)[0], atol=2e-6, rtol=0)
    else:
        with pytest.raises(ValueError, match=f"{heads} query heads and {kv_heads} KV heads do not divide evenly"):
            tpu_attention(MODULE, *split, None)


APART = {
    "lengths split": ([Shard(2)] * 3, "Shard.*Split heads alike in all three"),
    "batch split": ([Shard(0)] * 3, "Split heads alike in all three"),
    "head size split": ([Shard(3)] * 3, "Split heads alike in all three"),
    "keys whole": ([Shard(1), Replicate(), Replicate()], "key .*Replicate"),
    "values whole": ([Shard(1), Shard(1), Replicate()], "value .*Replicate"),
    "queries whole": ([Replicate(), Shard(1), Shard(1)], "query .*Replicate"),
    "sums that are due": ([Partial()] * 3, "without moving data"),
    "keys plain": ([Shard(1), None, None], "key plain"),
}


@pytest.mark.parametrize("case", APART)
def test_operands_that_are_sharded_apart_are_refused(case):
    placements, says = APART[case]
    mesh = join(0, 2)
    given = [
        x if each is None else spread(mesh, x, [each]) for x, each in zip(tensors(), placements, strict=True)
    ]
    with pytest.raises(ValueError, match=says):
        tpu_attention(MODULE, *given, None)
    assert not tpu_kernels.explain().rows


@pytest.mark.parametrize(
    ("name", "made", "says"),
    [
        ("s_aux", lambda mesh: torch.zeros(8), "sinks have shape .8,.; expected one value for each of 4"),
        ("s_aux", lambda mesh: spread(mesh, torch.zeros(8), [Replicate()]), "sinks have shape"),
        ("attention_mask", lambda mesh: torch.ones(2, 8, 12, 12, dtype=torch.bool), "does not fit .* in axis 1"),
        ("attention_mask", lambda mesh: spread(mesh, torch.ones(2, 1, 12, 12).bool(), [Shard(2)]), "mask is split"),
    ],
)
def test_what_belongs_to_all_heads_beside_some_heads_is_refused(name, made, says):
    mesh = join(1, 2)
    q, k, v = (spread(mesh, x, [Shard(1)]) for x in tensors())
    with pytest.raises(ValueError, match=says):
        tpu_attention(MODULE, q, k, v, **{"attention_mask": None, name: made(mesh)})
