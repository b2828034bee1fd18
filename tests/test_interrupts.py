"""Ctrl-C is held back in the block, and not lost; tests/test_stress.py sends it to a process that compiles."""

from __future__ import annotations

import signal
import threading

import pytest

from tpu_kernels.interrupts import interrupts_wait


def test_ctrl_c_comes_after_the_block():
    done = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is before


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
