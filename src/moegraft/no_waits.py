"""Find out whether code waits for the GPU, before a CUDA graph is captured from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits(check: bool) -> Iterator[None]:
    """Make a step that waits for the GPU an error, ahead of the capture that it would break.

    A broken capture may leave CUDA unusable. Torch's switch is one for all threads, so it is left
    alone where others may wait for the GPU with good reason.
    """
    # TMonitor is the thread of a progress bar.
    threads = [t for t in threading.enumerate() if type(t).__name__ != "TMonitor"]
    if not check or threads != [threading.current_thread()]:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
