"""Ctrl-C is held back in the block, and not lost; tests/test_stress.py sends it to a process that compiles."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import threading
import types

import jax
import pytest
import torch

from tpu_kernels import bridge
from tpu_kernels.interrupts import interrupts_wait


@pytest.fixture(autouse=True)
def interruptible():
    """A process started in the background may ignore Ctrl-C, and its children with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted:
    """Ctrl-C comes while it is finalized, where Python prints what is raised and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_comes_after_the_block():
    done = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_a_finalizer_comes_after_the_block():
    with pytest.raises(KeyboardInterrupt):
        with interrupts_wait():
            Interrupted()


def kernel(interrupted: bool, ran: list[bool]):
    """A function whose trace is interrupted, the first time, in a finalizer."""

    def call(x: jax.Array) -> jax.Array:
        if interrupted and not ran:
            Interrupted()
        ran.append(True)
        return 2 * x

    return call


@pytest.mark.parametrize("interrupted", [True, False])
def test_ctrl_c_in_a_finalizer_comes_after_the_trace(interrupted):
    """jax has a callback in Python's garbage collector, which runs while a kernel is traced: Ctrl-C in there was lost."""
    ran = []
    run = bridge.emulated(kernel(interrupted, ran), ())
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        run(torch.ones(3))
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0)) and ran == [True]


def test_ctrl_c_in_a_finalizer_comes_after_the_trace_for_a_tpu(monkeypatch):
    made = {}
    pallas = types.SimpleNamespace(jax_op=lambda name, function: made.update({name: function}))
    monkeypatch.setitem(sys.modules, "torch.tpu.pallas", pallas)
    ran = []
    call = kernel(True, ran)
    bridge.on_tpu(call, "ns::name")
    traced = made["ns::name"]
    assert inspect.signature(traced) == inspect.signature(call) and traced.__annotations__ == call.__annotations__
    with pytest.raises(KeyboardInterrupt):
        traced(torch.ones(3))
    assert ran == [True]


def test_an_error_in_the_block_comes_out_and_ctrl_c_works_again():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ImportError, match="no such"):
        with interrupts_wait():
            raise ImportError("no such")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_the_handler_alone():
    seen = []

    def work() -> None:
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
