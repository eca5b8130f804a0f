"""One lock per name, there as long as somebody holds it or waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NameLocks:
    """Changes of one name come one after the other, those of different names run side by side."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.RLock] = {}
        self._interested: dict[str, int] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Hold a name's lock; waits for another thread that holds it."""
        with self._guard:
            lock = self._locks.setdefault(name, threading.RLock())
            self._interested[name] = self._interested.get(name, 0) + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                self._interested[name] -= 1
                if not self._interested[name]:
                    del self._interested[name], self._locks[name]

    def __len__(self) -> int:
        """How many names are held or waited for."""
        with self._guard:
            return len(self._locks)
