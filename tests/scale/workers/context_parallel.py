"""Ring attention: each rank holds a shard of queries, keys and values; the keys go round, partial results are merged.

Every rank makes the whole inputs from one seed, attends to its own shard over the ring, and reports how far its rows and
its gradients are from one call over all keys.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from rank import report

from tpu_kernels import attention_with_lse, merge_partials, position_ranges

Q_HEADS, KV_HEADS, SHARD, DIM = 4, 2, 8, 16


def ring(q, k, v, positions, window, sinks):
    """This rank's rows of attention over every rank's keys. Shards are equal runs of positions, in order of rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held, parts = torch.stack((k, v)), []
    for step in range(ranks):
        owner = (rank - step) % ranks
        starts, ends = position_ranges(positions, owner * SHARD, SHARD, window=window)
        parts.append(attention_with_lse(q, held[0], held[1], starts=starts, ends=ends))
        if step + 1 < ranks:
            arrived = torch.empty_like(held)
            for request in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, held.detach(), (rank + 1) % ranks),
                    dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks),
                ]
            ):
                request.wait()
            held = arrived
    return merge_partials(*zip(*parts, strict=True), sinks=sinks)


def main() -> None:
    dist.init_process_group("gloo")
    rank, length = dist.get_rank(), dist.get_world_size() * SHARD
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, DIM, generator=make) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    whole = torch.arange(length)
    own = slice(rank * SHARD, (rank + 1) * SHARD)
    # Striped queries balance causal work over the ring; the keys stay in runs.
    shards = {"in runs": whole[own], "striped": whole[rank :: dist.get_world_size()]}
    errors = {}
    for window, sinks in ((None, None), (5, None), (5, torch.tensor([0.5, -1.0, 2.0, 0.0]))):
        starts, ends = position_ranges(whole, 0, length, window=window)
        wanted = merge_partials(*([x] for x in attention_with_lse(q, k, v, starts=starts, ends=ends)), sinks=sinks)
        for name, positions in shards.items():
            made = ring(q[:, :, positions], k[:, :, own], v[:, :, own], positions, window, sinks)
            case = f"{name}, {'causal' if window is None else f'window {window}'}{', sinks' if sinks is not None else ''}"
            errors[case] = max(
                (x - y[:, :, positions]).abs().max().item() for x, y in zip(made, wanted, strict=True)
            )
    errors["gradient of queries"] = gradient_error(q, k, v, own)
    errors["gradients of keys and values"] = key_gradient_error(q, k, v, own)
    report({"errors": errors, "world": int(os.environ["WORLD_SIZE"])})
    dist.destroy_process_group()


def gradient_error(q, k, v, own) -> float:
    """The queries' gradient needs no communication: it is exact on each rank's shard by itself."""
    positions = torch.arange(q.shape[2])
    whole = q.clone().requires_grad_()
    starts, ends = position_ranges(positions, 0, q.shape[2])
    (wanted,) = torch.autograd.grad(attention_with_lse(whole, k, v, starts=starts, ends=ends)[0].square().sum(), whole)
    shard = q[:, :, own].clone().requires_grad_()
    out, _ = ring(shard, k[:, :, own], v[:, :, own], positions[own], None, None)
    (made,) = torch.autograd.grad(out.square().sum(), shard)
    return (made - wanted[:, :, own]).abs().max().item()


def key_gradient_error(q, k, v, own) -> float:
    """Each rank has a part of the gradient of every shard it attended to; the parts' sum is the owner's gradient."""
    positions = torch.arange(q.shape[2])
    whole = [each.clone().requires_grad_() for each in (k, v)]
    starts, ends = position_ranges(positions, 0, q.shape[2])
    out, lse = attention_with_lse(q, *whole, starts=starts, ends=ends)
    wanted = torch.autograd.grad(out.square().sum() + lse.sum(), whole)
    shards = [torch.stack((k, v))[:, :, :, n * SHARD : (n + 1) * SHARD].clone() for n in range(dist.get_world_size())]
    parts = []
    for owner, shard in enumerate(shards):
        starts, ends = position_ranges(positions[own], owner * SHARD, SHARD)
        parts.append(attention_with_lse(q[:, :, own], *shard.requires_grad_(), starts=starts, ends=ends))
    out, lse = merge_partials(*zip(*parts, strict=True))
    made = torch.stack(torch.autograd.grad(out.square().sum() + lse.sum(), shards))
    dist.all_reduce(made)
    mine = made[dist.get_rank()]
    # A key's gradient is a sum over all later queries: relative to the largest.
    return max(((x - y[:, :, own]).abs().max() / y.abs().max()).item() for x, y in zip(mine, wanted, strict=True))


if __name__ == "__main__":
    main()
