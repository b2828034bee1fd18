"""Ctrl-C held back where half of the work would leave the process unusable, or where it would not be heard."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """SIGINT within the block is raised after it.

    For imports of jax: they register MLIR dialects in C++, which cannot be done twice, so that an import cut in half can
    never be made good. And for traces: Python forgets what is raised in finalizers and in callbacks of the garbage
    collector; jax has such a callback, and a trace gives the collector much to do. Python runs signal handlers in the main
    thread alone; in others there is nothing to hold back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:  # None: set outside Python
        yield
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)
