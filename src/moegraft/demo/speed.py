"""Tokens per second: one mixed batch, PEFT adapter by adapter, and the base model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moegraft.demo.batch import Batch

_MIN_REPEATS, _MAX_REPEATS = 3, 9
#: Stop repeating after this many seconds, once the minimum is reached.
_BUDGET = 20.0


@dataclass(frozen=True)
class Speed:
    """Median seconds and tokens per second of one way to run the batch."""

    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Speeds:
    """The ways side by side; ``peft`` is None when it was left out.

    Attributes:
        mixed: moegraft, all rows in one batch.
        peft: the same rows, grouped by adapter, one ``generate`` per group; times added.
        base: the untouched model on the same rows.
        repeats: timed runs of each, after one warm-up; the ways take turns.
    """

    mixed: Speed
    peft: Speed | None
    base: Speed
    repeats: int


def measure(
    graft: Any,
    base: Any,
    models: Mapping[str | None, Any] | None,
    batch: Batch,
    new_tokens: int,
) -> Speeds:
    """Time the three ways; every row writes exactly ``new_tokens`` tokens in each.

    Args:
        graft: the attached model.
        base: an untouched copy of it.
        models: see :func:`moegraft.demo.compare.peft_models`; None leaves PEFT out.
        batch: the rows.
        new_tokens: tokens per row.
    """
    whole = batch.arguments(new_tokens, fixed=True)
    ways: dict[str, Callable[[], object]] = {
        "mixed": lambda: graft.generate(**whole, adapters=list(batch.adapters)),
        "base": lambda: base.generate(**whole),
    }
    if models is not None:
        parts = [
            (model, batch.select(batch.rows_of(name)).arguments(new_tokens, fixed=True))
            for name, model in models.items()
            if batch.rows_of(name)
        ]
        ways["peft"] = lambda: [model.generate(**part) for model, part in parts]
    times = _time(ways)
    tokens = len(batch.adapters) * new_tokens
    found = {name: _speed(seconds, tokens) for name, seconds in times.items()}
    repeats = len(times["mixed"])
    return Speeds(found["mixed"], found.get("peft"), found["base"], repeats)


@torch.no_grad()
def _time(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Warm up, then time the ways in turns, so that a busy moment hits all of them alike."""
    for run in ways.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    begin = time.perf_counter()
    for repeat in range(_MAX_REPEATS):
        if repeat >= _MIN_REPEATS and time.perf_counter() - begin > _BUDGET:
            break
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def _speed(seconds: list[float], tokens: int) -> Speed:
    median = statistics.median(seconds)
    return Speed(median, tokens / median)
