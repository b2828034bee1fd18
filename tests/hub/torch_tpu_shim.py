"""Run as a program with a scratch folder: the shim with the real torch_tpu started; prints one JSON line.

A process of its own, because starting torch_tpu renames a device for the whole process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kernels
import torch
import torch_tpu  # noqa: F401
from kernels.backends import _backend
from kernels.importer import _loaded_kernels
from torch_tpu import _loader

sys.path.insert(0, str(Path(__file__).parent))
from small_kernel import BODY, write_kernel

from tpu_kernels import builds, hub
from tpu_kernels.specs import read_spec


def repository(root: Path, backend: str, variant: str | None = None) -> Path:
    """A built kernel with one variant; every one has an id of its own."""
    folder = root / "build" / f"torch-{variant or backend}"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    document = {
        "name": "small-kernel",
        "id": f"_small_kernel_{variant or backend}_0000001",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(document))
    return root


def attempt(root: Path, backend: str | None = None) -> str:
    try:
        kernels.get_local_kernel(root, backend=backend)
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    _loaded_kernels.clear()
    return "loaded"


def others(repositories: dict[str, Path]) -> dict[str, str]:
    found = {name: attempt(root) for name, root in repositories.items()}
    return found | {"torch-cpu, asked for": attempt(repositories["torch-cpu"], "cpu")}


def main(scratch: Path) -> dict[str, object]:
    _loader._init_device("tpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    tpu = repository(scratch / "tpu", "tpu")
    repositories = {
        "torch-universal": repository(scratch / "universal", "cpu", "universal"),
        "torch-cpu": repository(scratch / "cpu", "cpu"),
        "torch-cuda": repository(scratch / "cuda", "cuda"),
    }
    result: dict[str, object] = {
        "accelerator": accelerator.type,
        "attribute_before": hasattr(torch.backends, "tpu"),
        "without_shim": attempt(tpu),
        "others_before": others(repositories),
    }
    with builds.backend_shim():
        result["with_shim"] = [_backend().name, kernels.get_local_kernel(tpu).__name__]
    result["attribute_after"] = hasattr(torch.backends, "tpu")
    result["others_after"] = others(repositories)
    # As the _ops.py does that kernel-builder writes into a build, to choose its namespace.
    body = BODY + "\nimport torch\n\nSEES_TPU = hasattr(torch.backends, 'tpu')\n"
    loaded = hub.load_kernel(read_spec(write_kernel(scratch / "specs", body=body)))
    result["load_kernel"] = [loaded.source, loaded.module.SEES_TPU]
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
