"""Python's garbage collector, held off while many small objects are made that all stay."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

#: Seconds from one collection to the next while pauses overlap without an end.
PERIOD = 1.0
#: One of so many such collections looks at all objects, the others at young ones.
ALL_EVERY = 10

# Re-entrant: what is collected may begin and end blocks of its own.
_lock = threading.RLock()
#: Who collects here, or begins a strict block.
_collecting = threading.RLock()
_pauses = 0
_strict_pauses = 0
_was_enabled = False
_last = 0.0
_collections = 0


@contextmanager
def gc_paused(strict: bool = False) -> Iterator[None]:
    """Within the block the collector does not run by itself, in any thread; it ends where it began.

    A large adapter has tens of thousands of tensors. Each time some hundred of them were made the
    collector would look at all objects again, which took a third of a load. Nested blocks, also
    of several threads, end with the last one. Where others always follow before that, as in a
    server that loads without a break, a block's end collects, once a second at most.

    Args:
        strict: not even that happens within the block; for captures, which are over soon.
    """
    global _pauses, _strict_pauses, _was_enabled, _last
    with _collecting if strict else nullcontext(), _lock:
        if not _pauses:
            _was_enabled, _last = gc.isenabled(), time.monotonic()
            gc.disable()
        _pauses += 1
        _strict_pauses += strict
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            _strict_pauses -= strict
            if not _pauses and _was_enabled:
                gc.enable()
        _collect()


def _collect() -> None:
    """Collect if it is time, unless another thread does."""
    if _collecting.acquire(blocking=False):
        try:
            generation = _due()
            if generation is not None:
                gc.collect(generation)
        finally:
            _collecting.release()


def _due() -> int | None:
    """Return which generation to collect now; None = nothing."""
    global _last, _collections
    with _lock:
        now = time.monotonic()
        if not _pauses or _strict_pauses or not _was_enabled or now - _last < PERIOD:
            return None
        _last = now
        _collections += 1
        return 1 if _collections % ALL_EVERY else 2
