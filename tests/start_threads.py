"""Threads of tests that wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterable


def start_all(threads: Iterable[threading.Thread]) -> None:
    """Start threads that coverage does not trace.

    Of two threads that set their trace functions at once, Python 3.11 ends one before it has begun,
    and the others would wait for it.
    """
    traced = threading.gettrace()
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        for thread in threads:
            thread.start()
    finally:
        threading.settrace(traced)  # type: ignore[arg-type]
