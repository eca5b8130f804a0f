"""Timing on a CPU that other programs use too: all ways take turns, so a busy moment hits all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spent:
    """Seconds of one way: the median of its turns, and the least, which other programs reach last.

    Example: turns of 1, 2 and 9 ms are ``Spent(0.002, 0.001)``.
    """

    median: float
    least: float

    def record(self) -> dict[str, float]:
        """Return it for a record, in microseconds."""
        return {"us": self.median * 1e6, "us_least": self.least * 1e6}


def in_turns(
    ways: Mapping[str, Callable[[], object]], turns: int, seconds: float
) -> dict[str, Spent]:
    """Time every way once per turn, after one turn that is not counted.

    Args:
        ways: name -> what to run.
        turns: at most so many.
        seconds: no turn begins after so long, once three are done.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    begin = time.perf_counter()
    for turn in range(turns):
        if turn >= 3 and time.perf_counter() - begin > seconds:
            break
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: Spent(statistics.median(found), min(found)) for name, found in times.items()}
