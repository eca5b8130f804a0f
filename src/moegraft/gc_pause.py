"""Python's garbage collector, held off while many small objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Within the block the collector does not run, in any thread; it ends where it began.

    A large adapter has tens of thousands of tensors. Each time some hundred of them were made the
    collector would look at all objects again, which took a third of a load. Nested blocks, also
    of several threads, end with the last one.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
