"""What stands in a StableHLO module: searches over its text, on any machine, with nothing imported.

They look at the types of every operation of every function in the module. What a kernel holds inside (the
Mosaic program in its custom call's payload) is not visible here; its operands and results are.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")
_BROADCAST = re.compile(r"stablehlo\.broadcast_in_dim .*: \(tensor<([^>]*)>\) -> tensor<([^>]*)>")
_KERNEL = re.compile(r"stablehlo\.custom_call @tpu_custom_call\(.*: \(([^()]*)\) -> (.*?)(?: loc\(.*)?$", re.MULTILINE)
_FUNCTION = re.compile(r"func\.func (?:public |private )?@([\w.]+)\(")
_CALL = re.compile(r"(?<!custom_)call @([\w.]+)\(")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a tensor in a module, as MLIR writes them."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def tensor_type(text: str) -> TensorType:
    """The type written `1x8x512xbf16`."""
    *sizes, dtype = text.split("x")
    return TensorType(tuple(int(size) for size in sizes), dtype)


def score_tensors(text: str, q_len: int, kv_len: int) -> dict[TensorType, int]:
    """Tensor types with q_len x kv_len (or kv_len x q_len) as their last two dimensions -> how often they are
    written.

    A module that materialises scores, probabilities, or a dense mask or bias has such types; choose lengths
    that no other dimension of the program has. With q_len 1 a row of a mask counts too.
    """
    found: collections.Counter[TensorType] = collections.Counter()
    wanted = {(q_len, kv_len), (kv_len, q_len)}
    for sizes, dtype in _TENSOR.findall(text):
        shape = tuple(int(size) for size in sizes.split("x")[:-1])
        if shape[-2:] in wanted:
            found[TensorType(shape, dtype)] += 1
    return dict(found)


def expanded_kv(text: str, *, q_heads: int, kv_heads: int, kv_len: int, head_dim: int) -> list[str]:
    """Broadcasts that repeat a K or V tensor for the query heads of its group, as "operand -> result".

    Such an operation takes a tensor with the dimensions kv_heads, kv_len and head_dim and makes one with
    q_heads / kv_heads times as many elements. Empty when kv_heads == q_heads.
    """
    group = q_heads // kv_heads
    if group == 1:
        return []
    found = []
    for operand_text, result_text in _BROADCAST.findall(text):
        operand, result = tensor_type(operand_text), tensor_type(result_text)
        if (
            {kv_heads, kv_len, head_dim} <= set(operand.shape)
            and math.prod(result.shape) == group * math.prod(operand.shape)
            and math.prod(operand.shape) % (kv_heads * kv_len * head_dim) == 0
        ):
            found.append(f"{operand} -> {result}")
    return found


def kernel_calls(text: str) -> list[tuple[list[TensorType], list[TensorType]]]:
    """(operand types, result types) of each TPU kernel (Mosaic custom call), once for each time `main` runs
    it."""
    return [
        ([tensor_type(each) for each in _types(operands)], [tensor_type(each) for each in _types(results)])
        for operands, results in _kernels_of("main", _functions(text))
    ]


def _functions(text: str) -> dict[str, str]:
    starts = [(match.group(1), match.start()) for match in _FUNCTION.finditer(text)]
    ends = [start for _, start in starts[1:]] + [len(text)]
    return {name: text[start:end] for (name, start), end in zip(starts, ends, strict=True)}


def _kernels_of(name: str, functions: dict[str, str]) -> list[tuple[str, str]]:
    body = functions.get(name, "")
    found = [(match.group(1), match.group(2)) for match in _KERNEL.finditer(body)]
    for callee in _CALL.findall(body):
        if callee != name:
            found += _kernels_of(callee, functions)
    return found


def _types(text: str) -> list[str]:
    return re.findall(r"tensor<([^>]*)>", text)
