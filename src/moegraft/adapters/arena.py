"""First-fit allocation inside one fixed buffer, in 16-byte units."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable


class FreeList:
    """Free ranges of ``capacity`` units, kept sorted and merged."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    @property
    def free_units(self) -> int:
        """Units not allocated, over all ranges."""
        return sum(end - start for start, end in self._free)

    @property
    def largest(self) -> int:
        """Units of the largest range: the largest allocation that would succeed now."""
        return max((end - start for start, end in self._free), default=0)

    def largest_after(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Units of the largest range if these ``(start, units)`` were released; nothing changes."""
        after = FreeList(0)
        after._free = list(self._free)
        for start, units in ranges:
            after.release(start, units)
        return after.largest

    def allocate(self, units: int) -> int | None:
        """Return the start of a free range of ``units``, or None when none is large enough.

        Nothing (0 units) always fits, even when nothing is free.
        """
        if not units:
            return 0
        for i, (start, end) in enumerate(self._free):
            if end - start >= units:
                if end - start == units:
                    del self._free[i]
                else:
                    self._free[i] = (start + units, end)
                return start
        return None

    def allocate_at(self, start: int, units: int) -> bool:
        """Take ``units`` from ``start`` on; False when some of them are not free."""
        for i, (low, high) in enumerate(self._free):
            if low <= start and start + units <= high:
                rest = [(low, start), (start + units, high)]
                self._free[i : i + 1] = [(a, b) for a, b in rest if a < b]
                return True
        return False

    def release(self, start: int, units: int) -> None:
        """Give a range back."""
        if not units:
            return
        insort(self._free, (start, start + units))
        merged: list[tuple[int, int]] = []
        for low, high in self._free:
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                assert not merged or merged[-1][1] < low, "a range was released twice"
                merged.append((low, high))
        self._free = merged

    def grow(self, capacity: int) -> None:
        """Append the range between the old and a larger capacity."""
        old, self.capacity = self.capacity, capacity
        self.release(old, capacity - old)
