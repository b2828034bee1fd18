"""Calls of the TPU runner as torch programs, under names that a worker process can import by path."""

# No `from __future__ import annotations`: torch_tpu wants annotations as objects.
import dataclasses

import torch

from benchmarks import device, shapes
from benchmarks.estimate import tasks
from benchmarks.implementations import IMPLEMENTATIONS
from tpu_kernels.offdevice.torch_trace import Program


def program(*, shape, implementation, label) -> Program:
    """What the runner compiles for a row of the table, on placeholders."""
    row = dataclasses.replace(shapes.load()[shape], q_heads=4, kv_heads=2, q_len=512, kv_len=512)
    task = next(each for each in tasks([row], [IMPLEMENTATIONS[implementation]], "v6e") if each.candidate.label == label)
    inputs = device.make_inputs(row, "cpu")
    function, arguments = device.function_of(task, inputs, "tpu")
    meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments]
    return Program(function, tuple(meta))
