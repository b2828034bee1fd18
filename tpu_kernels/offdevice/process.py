"""Worker processes: many jobs one after another, each with a time limit, and a crash costs only the job that
crashed.

The child (`worker.py`) reads one JSON job a line and answers with JSON lines; a line tells each stage that a
job enters, so that a job which kills its process, or never ends, can still name its stage.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_STDERR_TAIL = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one job ended.

    Attributes:
        ok: whether the job returned a value.
        value: what it returned ({} when not ok).
        stage: the stage it was in when it ended ("start" before the worker took it).
        error: what went wrong; empty when ok.
        seconds: wall time seen by the caller.
    """

    ok: bool
    value: dict[str, Any]
    stage: str
    error: str
    seconds: float


def worker_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which a process can use libtpu's compiler and torch_tpu's tracer on a machine with
    no TPU."""
    environment = dict(os.environ)
    # A worker must import this package even where it runs from a source tree that is not installed.
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{PACKAGE_ROOT}{os.pathsep}{path}" if path else str(PACKAGE_ROOT)
    environment |= {
        # jax must not open a device, and no library may ask the cloud metadata server what machine this is.
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        # libtpu wants both set to something valid; the topology to compile for is named in each call.
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Without it libtpu's lock file lets one process a machine load the library.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # torch_tpu is imported by the jobs that need it.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HF_HUB_OFFLINE": environment.get("HF_HUB_OFFLINE", "1"),
        "TF_CPP_MIN_LOG_LEVEL": environment.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "PYTHONUNBUFFERED": "1",
    }
    return environment | dict(extra or {})


class Worker:
    """One worker process, started on first use and again after a crash. Use from one thread at a time.

    Args:
        environment: variables on top of `worker_environment()`.
        timeout: seconds that a job may take, unless `call` says otherwise.
        on_stage: called with (job kind, stage) as jobs move on.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        timeout: float = 300.0,
        on_stage: Callable[[str, str], None] | None = None,
    ) -> None:
        self._environment = dict(environment or {})
        self._timeout = timeout
        self._on_stage = on_stage
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stderr: IO[bytes] | None = None
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, kind: str, job: Mapping[str, Any], timeout: float | None = None) -> Outcome:
        """Run one job and wait for it. Never raises for what happens inside the job: the outcome tells."""
        started = time.monotonic()
        deadline = started + (self._timeout if timeout is None else timeout)
        process = self._running()
        self._jobs += 1
        stage = "start"

        def ended(error: str, ok: bool = False, value: dict[str, Any] | None = None) -> Outcome:
            return Outcome(ok, value or {}, stage, error, time.monotonic() - started)

        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"id": self._jobs, "kind": kind, "job": dict(job)}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ended(f"the worker process died: {self._death()}")
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close(force=True)
                return ended(f"took longer than {deadline - started:.0f} s")
            if line is None:
                return ended(f"the worker process died: {self._death()}")
            message = json.loads(line)
            if message["id"] != self._jobs:
                continue
            if "stage" in message:
                stage = message["stage"]
                if self._on_stage is not None:
                    self._on_stage(kind, stage)
            elif "error" in message:
                return ended(message["error"])
            else:
                return ended("", ok=True, value=message["value"])

    def close(self, force: bool = False) -> None:
        """End the process; `force` kills it in the middle of a job."""
        process, self._process = self._process, None
        if process is None:
            return
        if not force and process.stdin is not None:
            try:
                process.stdin.close()
                process.wait(timeout=5)
            except (OSError, subprocess.TimeoutExpired):
                force = True
        if force:
            process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # what was not sent to a process that died
                process.stdin.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close(force=True)
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tpu_kernels.offdevice.worker"],
            env=worker_environment(self._environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()
        return self._process

    def _death(self) -> str:
        """Why the process ended, with the end of what it wrote to stderr."""
        process = self._process
        assert process is not None
        code = process.wait()
        tail = ""
        if self._stderr is not None:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _STDERR_TAIL))
            tail = self._stderr.read().decode(errors="replace").strip()
        self.close(force=True)
        what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{what}\n{tail}" if tail else what


def _pump(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def run_all(
    jobs: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300.0,
    on_stage: Callable[[str, str], None] | None = None,
) -> Iterator[Outcome]:
    """Run jobs (kind, job) on `workers` processes; yields the outcomes in the order of the jobs, as they
    come."""
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    made = [Worker(environment, timeout=timeout, on_stage=on_stage) for _ in range(workers)]
    for worker in made:
        idle.put(worker)

    def run(kind: str, job: Mapping[str, Any]) -> Outcome:
        worker = idle.get()
        try:
            return worker.call(kind, job)
        finally:
            idle.put(worker)

    executor = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        yield from executor.map(lambda pair: run(*pair), list(jobs))
    finally:
        # Where the caller stops early, jobs that have not begun must not begin.
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in made:
            worker.close(force=True)
