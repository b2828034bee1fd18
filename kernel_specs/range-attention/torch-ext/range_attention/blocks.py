"""Block sizes: how many query rows and keys one step of the kernel works on, chosen from shapes and VMEM."""

from typing import NamedTuple

LANES = 128
DEFAULT_VMEM_BYTES = 16 * 2**20  # v4, the smallest per-core VMEM of the supported generations
# (rows, keys a block, keys a tile) of the kernels that keep scores transposed, best first.
_SIZES = (
    (512, 8192, 512), (512, 4096, 512), (512, 2048, 512), (512, 1024, 512), (256, 1024, 512), (256, 512, 512),
    (256, 512, 256), (128, 512, 256), (128, 256, 256), (128, 256, 128), (128, 128, 128),
)  # fmt: skip
# Keys and values that a step of `decode` copies: enough to hide what a step costs and how late a copy begins (half a
# microsecond, in which tpu7x could copy 1.8 MB), few enough to start soon.
_DECODE_STEP_BYTES = 6 * 2**20
DECODE_AHEAD = 4  # tiles whose scores are computed before the softmax of the one before them


class Blocks(NamedTuple):
    """rows: query rows a block; kv: keys copied to VMEM a step; tile: keys in one softmax update (divides kv).

    subs: blocks of query rows that one step works on: more than one in `forward`, and in `decode`, where each belongs
    to a KV head of its own.
    """

    rows: int
    kv: int
    tile: int
    subs: int = 1


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def share(x: int, most: int, multiple: int) -> int:
    """x in as few equal parts as parts of at most `most` allow: the size of one, rounded up."""
    return round_up(-(-x // -(-x // most)), multiple)


def length_last(length: int, dim: int) -> bool:
    """Whether a TPU keeps an array [.., length, dim] with the length last in memory, which pads it less.

    The kernels then read it so: read the other way, it would first be copied into twice its size for a dim of 64.
    """
    if dim % LANES == 0 or dim % 8 or dim < 16:
        return False
    return round_up(length, LANES) * dim < round_up(length, 8) * round_up(dim, LANES)


def vmem_need(blocks: Blocks, kv_len: int, head_dim: int, v_dim: int, itemsize: int) -> int:
    """Bytes of VMEM that one call of `forward` is expected to use, register spills included (an upper estimate)."""
    d, dv = round_up(head_dim, LANES), round_up(v_dim, LANES)
    rows, kv, tile, subs = blocks
    copied = 2 * itemsize * (kv + subs * rows) * (d + dv)  # the pipeline holds two of every block
    carried = 4 * rows * (dv + 3 * 8) * (subs if kv < kv_len else min(subs, 2))  # accumulator, running maximum, sums, ranges
    scores = 4 * rows * (4 * tile + 2 * dv)  # two tiles' scores, as much again of weights and spills, products
    return copied + carried + scores + 4 * 4 * tile * LANES  # validity, spread over the lanes


def choose_blocks(
    q_len: int, kv_len: int, head_dim: int, v_dim: int, itemsize: int, block_q: int, block_kv: int, vmem_bytes: int
) -> tuple[Blocks, int]:
    """Blocks for one call of `forward`, and the VMEM limit to ask the compiler for. Rows are a multiple of 128.

    block_q, block_kv: the caller's wish, 0 = choose. A wish is rounded up to what the hardware tiles need, and kept
    even if the compiler may refuse it for lack of VMEM.
    """
    budget = vmem_bytes or DEFAULT_VMEM_BYTES
    # Several blocks of rows in one step matter more than many keys in it.
    candidates = [(*size, most) for least in (4, 1) for size in _SIZES for most in (16, 8, 4, 2, 1) if most >= least]
    for rows, kv, tile, most in candidates:
        rows = share(q_len, block_q or rows, LANES)
        q_blocks = -(-q_len // rows)
        subs = share(q_blocks, most, 1)
        if 1 < subs < q_blocks:  # every step begins with the first block of a pair, and leaves none alone
            subs = round_up(subs, 2)
        blocks = Blocks(rows, *_fit(kv_len, block_kv, kv, tile), subs)
        if vmem_need(blocks, kv_len, head_dim, v_dim, itemsize) <= 0.75 * budget:
            break
    return blocks, int(0.95 * budget)


def choose_dense_blocks(
    rows: int, kv_len: int, head_dim: int, v_dim: int, itemsize: int, bias_itemsize: int,
    block_q: int, block_kv: int, vmem_bytes: int,
) -> tuple[Blocks, int]:  # fmt: skip
    """`choose_blocks` for `forward_dense`, which reads a bit of a mask and maybe `bias_itemsize` bytes of a bias a pair."""
    budget = vmem_bytes or DEFAULT_VMEM_BYTES
    for rows_of_a_block, kv, tile in _SIZES:
        block_rows = round_up(min(block_q or rows_of_a_block, rows), LANES)
        blocks = Blocks(block_rows, *_fit(kv_len, block_kv, kv, tile))
        need = vmem_need(blocks, kv_len, head_dim, v_dim, itemsize) + 2 * block_rows * blocks.kv // 4
        if bias_itemsize:
            need += block_rows * (2 * bias_itemsize * blocks.kv + 8 * blocks.tile)
        if need <= 0.75 * budget:
            break
    return blocks, int(0.95 * budget)


def _fit(kv_len: int, block_kv: int, kv: int, tile: int) -> tuple[int, int]:
    """(keys a block, keys a tile) for a sequence of kv_len keys: no longer than it, and the tile divides the block."""
    if block_kv:
        kv = round_up(min(block_kv, kv_len), LANES)
        while kv % tile:
            tile -= LANES
        return kv, tile
    if kv_len <= kv:
        tile = share(kv_len, tile, LANES)
        return round_up(kv_len, tile), tile
    return kv, tile


def decode_vmem_need(blocks: Blocks, head_dim: int, v_dim: int, itemsize: int) -> int:
    """`vmem_need` for `decode`, in which rows lie along the sublanes."""
    d, dv = round_up(head_dim, LANES), round_up(v_dim, LANES)
    rows, kv, tile, subs = blocks
    copied = 2 * itemsize * subs * (kv + rows) * (d + dv)
    carried = 4 * rows * (subs * (dv + 2 * LANES) + 2 * LANES)
    return copied + carried + 4 * rows * ((2 + DECODE_AHEAD) * tile + 2 * dv)


def choose_decode_blocks(
    rows: int, kv_heads: int, kv_len: int, head_dim: int, v_dim: int, itemsize: int, block_kv: int, vmem_bytes: int
) -> tuple[Blocks, int]:
    """`choose_blocks` for `decode`, which takes all `rows` of a KV head in one block.

    Several KV heads share a step where they can: as much is copied at a time, but less of it lies past a cache's end.
    """
    budget = vmem_bytes or DEFAULT_VMEM_BYTES
    rows = round_up(rows, 32 // itemsize)  # rows of one hardware tile: 8 for float32, 16 for bfloat16
    sizes = [(1024, 1024), (1024, 512), (512, 512), (512, 256), (256, 256), (128, 128)]
    shares = [x for x in range(8, 0, -1) if kv_heads % x == 0]
    if shares == [1]:
        sizes.insert(0, (2048, 1024))
    for kv, tile, heads in ((*size, heads) for size in sizes for heads in shares):
        blocks = Blocks(rows, *_fit(kv_len, block_kv, kv, tile), heads)
        if heads > 1 and heads * blocks.kv * (head_dim + v_dim) * itemsize > _DECODE_STEP_BYTES:
            continue
        if decode_vmem_need(blocks, head_dim, v_dim, itemsize) <= 0.75 * budget:
            break
    return blocks, int(0.95 * budget)


def backward_vmem_need(blocks: Blocks, head_dim: int, v_dim: int, itemsize: int) -> int:
    """Bytes of VMEM that the hungrier of the two backward kernels is expected to use (an upper estimate)."""
    d, dv = round_up(head_dim, LANES), round_up(v_dim, LANES)
    rows, kv, tile, _ = blocks
    copied = 2 * itemsize * (rows + kv) * (d + dv)
    work = 4 * 6 * rows * tile  # scores, do v, weights, the scores' gradient, and both as operands
    clean = 4 * (rows + tile) * (d + dv)
    dq = 2 * itemsize * rows * d + 4 * rows * (2 * d + 4 * LANES)
    dkv = 2 * itemsize * kv * (d + dv) + 4 * kv * (d + dv + LANES) + 4 * tile * (d + dv)
    return copied + work + clean + max(dq, dkv)


def choose_backward_blocks(
    q_len: int, kv_len: int, head_dim: int, v_dim: int, itemsize: int, block_q: int, block_kv: int, vmem_bytes: int
) -> tuple[Blocks, int]:
    """`choose_blocks` for the backward kernels, in which rows lie along the lanes too: always a multiple of 128."""
    budget = vmem_bytes or DEFAULT_VMEM_BYTES
    candidates = [(1024, 1024, 512), (512, 1024, 512), (512, 512, 512), (512, 512, 256), (256, 512, 256)]
    candidates += [(256, 256, 256), (256, 256, 128), (128, 256, 128), (128, 128, 128)]
    for rows, kv, tile in candidates:
        rows = round_up(min(block_q or rows, q_len), LANES)
        blocks = Blocks(rows, *_fit(kv_len, block_kv, kv, tile))
        if backward_vmem_need(blocks, head_dim, v_dim, itemsize) <= 0.75 * budget:
            break
    return blocks, int(0.95 * budget)


def fused_vmem_need(blocks: Blocks, head_dim: int, v_dim: int, itemsize: int) -> int:
    """`backward_vmem_need` of the kernel of all three gradients, which holds a head's keys and sums, and works on
    `subs` blocks of rows by two tiles at a time."""
    d, dv = round_up(head_dim, LANES), round_up(v_dim, LANES)
    rows, kv, tile, subs = blocks
    size, keys = subs * rows, min(2 * tile, kv)
    copied = 2 * itemsize * (size * (2 * d + dv) + 2 * kv * (d + dv))
    summed = 4 * (size * d + kv * (d + dv))
    work = 4 * size * keys * (2 + itemsize)  # scores, do v, and as operands weights and the scores' gradient
    products = 4 * ((size + keys) * (d + dv) + size * d)
    return copied + summed + work + products


def choose_fused_blocks(
    q_len: int, kv_len: int, head_dim: int, v_dim: int, itemsize: int, block_q: int, block_kv: int, vmem_bytes: int
) -> tuple[Blocks, int] | None:
    """`choose_backward_blocks` for the kernel of all three gradients; None where VMEM cannot hold a head's keys and sums.

    All keys are one block: block_kv is the longest tile.
    """
    budget = vmem_bytes or DEFAULT_VMEM_BYTES
    for rows, tile, subs in ((512, 512, 2), (512, 512, 1), (256, 512, 1), (256, 256, 1)):
        rows = share(q_len, round_up(min(block_q or rows, q_len), LANES), LANES)
        tile = share(kv_len, round_up(min(block_kv or tile, tile), LANES), LANES)
        blocks = Blocks(rows, round_up(kv_len, tile), tile, share(-(-q_len // rows), subs, 1))
        if fused_vmem_need(blocks, head_dim, v_dim, itemsize) <= 0.75 * budget:
            return blocks, int(0.95 * budget)
    return None
