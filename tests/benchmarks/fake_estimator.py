"""An estimator that answers at once, for tests of what is made of estimates."""

from __future__ import annotations

import numpy as np

from tpu_kernels.offdevice import aot, emit
from tpu_kernels.offdevice.schedule import Operation, Schedule
from tpu_kernels.offdevice.targets import TARGETS

MIB = 2**20


class FakeEstimator:
    """Kernels of ours take 1 ms, with chosen blocks what `tuned` says; SDPA 2 ms, splash its block size in us.

    `broken` names what does not compile; `vmem` is what everything needs.
    """

    made = 0
    asked: list[str] = []
    broken = ""
    tuned: dict[tuple[int, int], float] = {}
    vmem = 3 * MIB

    def __init__(self, name):
        FakeEstimator.made += 1
        self.target = TARGETS[name]
        self.emitter = self

    def close(self):
        pass

    def _schedule(self, what, seconds):
        self.asked.append(what)
        failed = bool(self.broken) and self.broken in what
        error = "RESOURCE_EXHAUSTED: vmem" * failed
        compiled = aot.Compiled(not failed, "compile", error, self.target.name, {"k": self.vmem})
        if failed:
            return Schedule(compiled)
        cycles = round(seconds * self.target.clock_hz)
        kernel = Operation("k", True, 1, cycles, 0.0, 64 * MIB, {"MATMUL": 0.5}, ((0, 900, 10, 100), (9, 1000, 4, 1700)))
        return Schedule(compiled, seconds=seconds, operations=(kernel,))

    def function(self, job, values=None):
        assert job.target == self.target.name
        assert all(np.asarray(each).shape == job.arguments[place].shape for place, each in (values or {}).items())
        block = job.static.get("block")
        if block:
            return self._schedule(f"{job.function.rpartition(':')[2]}{block}", 1e-6 * block)
        chosen = (job.static["block_q"], job.static["block_kv"])
        return self._schedule(job.function.rpartition(":")[2], self.tuned.get(chosen, 1e-3))

    def run(self, job, folder):
        (folder / "graph0.mlir").write_text("module {}")
        return emit.Emitted(True, "lower", "", (folder / "graph0.mlir",))

    def module(self, path):
        return self._schedule("module", 2e-3)

    def compile(self, path):
        return aot.Compiled(True, "compile", "", self.target.name, temp_bytes=7 * MIB)
