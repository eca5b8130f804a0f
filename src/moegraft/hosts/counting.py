"""What a plugin did in this process, as counts: the proof that its kernels ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Counts:
    """Counts under fixed names.

    Args:
        meanings: name -> what it counts.

    Example: ``Counts({"calls": "calls of a layer"}).add("calls")``.
    """

    def __init__(self, meanings: Mapping[str, str]) -> None:
        self.meanings = meanings
        self._counts: Counter[str] = Counter()

    def add(self, name: str, times: int = 1) -> None:
        """Add to a count."""
        assert name in self.meanings, name
        self._counts[name] += times

    def all(self) -> dict[str, int]:
        """Return all counts; 0 for what never happened."""
        return {name: self._counts[name] for name in self.meanings}
