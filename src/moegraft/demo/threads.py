"""How many CPU threads to run the demo on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moegraft.demo.batch import Batch

_TOKENS = 4


@contextmanager
def best_threads(base: Any, batch: Batch) -> Iterator[int]:
    """Run the block on torch's number of threads or on one, whichever serves ``base`` faster.

    A small model gains little from threads, and loses most of its time when other programs keep
    the cores busy, since every operator waits for all threads.

    Args:
        base: the untouched model.
        batch: the demo's rows.
    """
    usual = torch.get_num_threads()
    try:
        if usual > 1:
            torch.set_num_threads(1)
            single = _seconds(base, batch)
            torch.set_num_threads(usual)
            if single < _seconds(base, batch):
                torch.set_num_threads(1)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(usual)


def _seconds(model: Any, batch: Batch) -> float:
    """Return the shorter of two times for a few tokens, after a warm-up."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model.generate(**batch.arguments(_TOKENS, fixed=True))
        times.append(time.perf_counter() - start)
    return min(times[1:])
