"""The child side of `process.Worker`: `python -m tpu_kernels.offdevice.worker` reads jobs on stdin, one JSON
a line."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

# Job kind -> "module:function" of the code that does it, imported when the first such job comes.
# The function takes (job, stage), calls stage(name) as it goes on, and returns a JSON-able dict.
KINDS = {
    "compile_function": "tpu_kernels.offdevice.compiler:compile_function",
    "compile_module": "tpu_kernels.offdevice.compiler:compile_module",
    "emit_function": "tpu_kernels.offdevice.torch_trace:emit_function",
    "emit_module": "tpu_kernels.offdevice.torch_trace:emit_module",
    "trace_calls": "tpu_kernels.offdevice.plan_trace:trace_calls",
    "schedule_function": "tpu_kernels.offdevice.schedule:schedule_function",
    "schedule_module": "tpu_kernels.offdevice.schedule:schedule_module",
}

Stage = Callable[[str], None]


def load(reference: str) -> Any:
    """The object that "package.module:name" names."""
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def main() -> int:
    # Libraries print to stdout; answers go out on a descriptor of their own, and the rest joins stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        request = json.loads(line)

        def answer(message: dict[str, Any], number: int = request["id"]) -> None:
            answers.write(json.dumps({"id": number, **message}) + "\n")

        try:
            answer({"stage": "import"})
            work = load(KINDS[request["kind"]])
            answer({"value": work(request["job"], lambda name, answer=answer: answer({"stage": name}))})
        # Whatever a job raises is its result: the compiler's refusals come as many types.
        except Exception as error:  # noqa: BLE001
            text = f"{type(error).__name__}: {error}"
            if request["job"].get("traceback"):
                text += "\n" + traceback.format_exc()
            answer({"error": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
