"""Put the code of JAX kernels into a StableHLO module that torch_tpu made (see `torch_tpu_offline`).

jax publishes no MLIR bindings; those that it carries are used, as jax's own export does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One call: the kernel as jax.export serialises it (a StableHLO portable artifact), and how much goes in
    and out."""

    artifact: bytes
    inputs: int
    outputs: int


def splice(text: str, calls: Sequence[KernelCall], *, results: int, arguments: int) -> str:
    """The module `text` with each kernel called where it belongs.

    Args:
        text: its `main` returns its own results and then, call by call, the inputs of each kernel; it takes
            its own arguments and then, call by call, the outputs of each kernel.
        calls: the kernels in the order of those results and arguments.
        results: how many results are main's own.
        arguments: how many arguments are main's own.

    Raises:
        ValueError: when the spliced module is not valid MLIR, or kernels depend on each other in a circle.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context(), ir.Location.unknown():
        functions: dict[bytes, tuple[str, str]] = {}
        for call in calls:
            if call.artifact not in functions:
                functions[call.artifact] = _functions(call.artifact, f"kernel{len(functions)}_")
        end = text.rstrip().rindex("}")
        module = ir.Module.parse(text[:end] + "\n".join(body for _, body in functions.values()) + "\n}\n")
        main = next(each for each in module.body.operations if _symbol(each) == "main")
        block = main.regions[0].blocks[0]
        terminator = list(block.operations)[-1]
        parameters = list(block.arguments)
        next_input, next_output = results, arguments
        for call in calls:
            # Read anew each time: an input may be an earlier kernel's output, which has just been replaced.
            inputs = list(terminator.operands)[next_input : next_input + call.inputs]
            outputs = parameters[next_output : next_output + call.outputs]
            next_input += call.inputs
            next_output += call.outputs
            with ir.InsertionPoint(terminator):
                callee = ir.FlatSymbolRefAttr.get(functions[call.artifact][0])
                made = ir.Operation.create(
                    "func.call",
                    results=[each.type for each in outputs],
                    operands=inputs,
                    attributes={"callee": callee},
                )
            for old, new in zip(outputs, made.results, strict=True):
                old.replace_all_uses_with(new)
        with ir.InsertionPoint(terminator):
            ir.Operation.create("func.return", operands=list(terminator.operands)[:results])
        terminator.operation.erase()
        _sort(block, ir)
        for index in range(len(parameters) - 1, arguments - 1, -1):
            block.erase_argument(index)
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(kind.inputs[:arguments], kind.results[:results])
        )
        for name, count in (("arg_attrs", arguments), ("res_attrs", results)):
            if name in main.attributes:
                main.attributes[name] = ir.ArrayAttr.get(list(ir.ArrayAttr(main.attributes[name]))[:count])
        if not module.operation.verify():
            raise ValueError("the module with kernels in it is not valid MLIR")
        return str(module)


def _functions(artifact: bytes, prefix: str) -> tuple[str, str]:
    """(name of the kernel's entry, text of its functions), the functions renamed to begin with `prefix`,
    private."""
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir

    module = _jax.mlir.deserialize_portable_artifact(artifact)
    functions = [each for each in module.body.operations if each.operation.name == "func.func"]
    # A function may be called "<lambda>": new names are made of the position.
    names = {_symbol(each): f"{prefix}{index}" for index, each in enumerate(functions)}

    def rename(operation: Any) -> Any:
        for attribute in list(operation.attributes):
            name, value = (attribute, operation.attributes[attribute]) if isinstance(attribute, str) else attribute
            if isinstance(value, ir.FlatSymbolRefAttr) and value.value in names:
                operation.attributes[name] = ir.FlatSymbolRefAttr.get(names[value.value])
        return ir.WalkResult.ADVANCE

    for each in functions:
        each.operation.walk(rename)
    for each in functions:
        each.operation.attributes["sym_name"] = ir.StringAttr.get(names[_symbol(each)])
        each.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
    return names["main"], "\n".join(each.operation.get_asm() for each in functions)


def _symbol(operation: Any) -> str:
    from jax._src.lib.mlir import ir

    attributes = operation.operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""


def _sort(block: Any, ir: Any) -> None:
    """Move the operations of a block into an order in which values are made before they are used.

    The kernel calls were put at the end, behind their users. Otherwise the order stays.
    """
    operations = [each.operation for each in block.operations]
    terminator = operations.pop()
    made_by = {result: index for index, each in enumerate(operations) for result in each.results}
    needs: list[list[int]] = []
    for operation in operations:
        found: set[int] = set()

        def visit(inner: Any, found: set[int] = found) -> Any:
            found.update(made_by[value] for value in inner.operands if value in made_by)
            return ir.WalkResult.ADVANCE

        operation.walk(visit)
        needs.append(sorted(found))
    state = [0] * len(operations)  # 0 not seen, 1 on the stack, 2 placed
    order: list[int] = []
    for start in range(len(operations)):
        stack = [start]
        while stack:
            index = stack[-1]
            if state[index] == 2:
                stack.pop()
                continue
            waiting = [each for each in needs[index] if state[each] != 2 and each != index]
            if not waiting:
                state[index] = 2
                order.append(index)
                stack.pop()
            elif state[index] == 1 and any(state[each] == 1 for each in waiting):
                raise ValueError("kernels depend on each other in a circle")
            else:
                state[index] = 1
                stack.extend(reversed(waiting))
    for index in order:
        operations[index].move_before(terminator)
