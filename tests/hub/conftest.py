"""Small kernels to load, a loader that has loaded nothing yet, and machines that pull kernels from a loopback Hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kernels.importer
import pytest

from tpu_kernels import hub, staging

from .loopback import LoopbackHub
from .small_kernel import write_kernel

REPO = "acme/small-kernel"
# How the modules of loaded kernels begin.
KERNEL_IDS = ("_small_", "_range_attention_", "_splash_attention_")
# What a developer may have set, and what would change what is tested.
SETTINGS = re.compile(
    r"(HF|HUGGING_?FACE|TPU_KERNELS)_.*|.*KERNELS(_CACHE)?|DO_NOT_TRACK|DISABLE_TELEMETRY|.*_PROXY", re.IGNORECASE
)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Nothing loaded, an empty kernel cache; kernels loaded by the test are forgotten afterwards."""
    for name in filter(SETTINGS.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_loaded", {})
    monkeypatch.setattr(kernels.importer, "_loaded_kernels", {})
    for name in [name for name in sys.modules if name.startswith(KERNEL_IDS)]:
        monkeypatch.delitem(sys.modules, name)  # other tests of this process may have loaded the kernel
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(KERNEL_IDS):
            del sys.modules[name]


@pytest.fixture
def make_kernel(tmp_path, fresh) -> Callable[..., Path]:
    """write_kernel into the test's folder."""
    return lambda **options: write_kernel(tmp_path / "specs", **options)


class Client:
    """The job server of client.py."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("client.py")
        environment = {name: value for name, value in os.environ.items() if not SETTINGS.fullmatch(name)}
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            env=environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def submit(self, job: dict[str, object]) -> int:
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    started = Client()
    yield started
    started.close()


class Job:
    """A process at work. `results` waits for it."""

    def __init__(self, pid: int, result: Path) -> None:
        self.pid, self._result = pid, result

    def results(self, timeout: float = 90.0) -> list[dict[str, object]]:
        deadline = time.monotonic() + timeout
        while not self._result.exists():
            assert time.monotonic() < deadline, f"no result in {timeout} s: {self.log()}"
            assert self.alive() or self._result.exists(), f"the process died: {self.log()}"
            time.sleep(0.01)
        results = json.loads(self._result.read_text())
        assert isinstance(results, list), results
        return results

    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def log(self) -> str:
        return self._result.with_suffix(".log").read_text()


class Machine:
    """A user's machine: a home with caches, and processes that see a loopback Hub at HF_ENDPOINT."""

    def __init__(self, home: Path, hub: LoopbackHub, client: Client) -> None:
        self.home, self.hub, self._client, self._jobs = home, hub, client, 0
        self.log = home / "bodies.log"
        (home / "project").mkdir(parents=True)

    def start(self, *calls: tuple[str, list[object]], **environment: str) -> Job:
        """Calls of client.py's functions, one after another in one process."""
        self._jobs += 1
        result = self.home / f"result{self._jobs}.json"
        settings = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TPU_KERNELS_CACHE": str(self.home / "cache"),
            "BODY_LOG": str(self.log),
        }
        job = {"environment": settings | environment, "folder": str(self.home / "project"), "calls": calls}
        return Job(self._client.submit(job | {"result": str(result)}), result)

    def run(self, *calls: tuple[str, list[object]], **environment: str) -> list[dict[str, object]]:
        return self.start(*calls, **environment).results()

    def load(self, spec: Path, **environment: str) -> dict[str, object]:
        """hub.load_kernel of the spec in folder `spec`, in a process of its own."""
        (result,) = self.run(("load", [str(spec)]), **environment)
        return result

    def bodies(self) -> int:
        """How often a kernel's body has run."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def cached(self, name: str) -> list[Path]:
        """Files of that name among the downloaded kernels."""
        return list((self.home / "hf" / "hub").glob(f"kernels--*/snapshots/*/build/*/{name}"))


@pytest.fixture
def loopback() -> Iterator[LoopbackHub]:
    with LoopbackHub() as started:
        started.trusted.add("acme")
        yield started


@pytest.fixture
def machine(tmp_path, loopback, client) -> Machine:
    return Machine(tmp_path / "home", loopback, client)


@pytest.fixture
def publish(tmp_path, loopback) -> Callable[..., str]:
    """Build a small kernel and commit it to the loopback Hub. Returns the commit."""

    def commit(branch: str = "v1", repo: str = REPO, change: Callable[[Path], object] | None = None, **options) -> str:
        root = tmp_path / "published" / str(len(list(tmp_path.glob("published/*"))))
        staging.stage(write_kernel(root / "source", **options), root / "built")
        (root / "built" / "README.md").write_text("# A kernel\n")
        if change is not None:
            change(root / "built" / "build" / "torch-tpu")
        return loopback.publish(repo, branch, root / "built")

    return commit


@pytest.fixture
def spec_for(tmp_path) -> Callable[..., Path]:
    """A spec.toml that names a Hub repository. With packaged=True the folder has a build to fall back on as well."""

    def write(pin: str = "version = 1", repo: str = REPO, packaged: bool = False, **options) -> Path:
        folder = tmp_path / "specs" / str(len(list(tmp_path.glob("specs/*"))))
        kernel = write_kernel(folder, source=f'hub = "{repo}"\n{pin}', value="packaged", **options)
        if not packaged:
            (kernel / "build.toml").unlink()
        return kernel

    return write
