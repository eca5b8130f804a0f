"""Copies in the host's memory, by threads of our own.

Torch spreads one copy over all its threads, and each copy ends when the last of them is done. An
adapter is hundreds of copies of a few milliseconds: where other work keeps a core busy, or where
there are more threads than cores, they wait for each other most of the time (measured: 6 to 20
times as long with two threads as with one). Here each copy is one thread's, and several run at
once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
#: Threads at most: a few saturate the memory of a desktop, some more that of a server.
MAX_THREADS = 12
#: Less work than this is done before threads have started.
_MIN_BYTES = 32 << 20
#: Parts per thread that the work is cut into; one may take longer than another.
_PARTS = 8
#: From this many values on torch uses several threads for one copy.
_SERIAL = 32768 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def usable_cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_threads(work: Callable[[T], object], items: Sequence[T], num_bytes: int) -> None:
    """Call ``work`` with each item, in several threads if there is much to do.

    Args:
        work: releases Python's lock for most of its time; safe to run beside itself. On the host
            alone: what streams are current is another thread's affair.
        items: what to do.
        num_bytes: what all of it moves.

    Raises:
        Exception: the first one of ``work``, when all threads have ended.
    """
    threads = min(MAX_THREADS, usable_cores(), len(items))
    if threads < 2 or num_bytes < _MIN_BYTES:
        for item in items:
            work(item)
        return

    inference = torch.is_inference_mode_enabled()

    def work_off(some: Sequence[T]) -> None:
        with torch.inference_mode(inference):  # each thread has its own
            for item in some:
                work(item)

    parts = min(len(items), _PARTS * threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="moegraft-copy") as pool:
        for done in [pool.submit(work_off, items[part::parts]) for part in range(parts)]:
            done.result()


def copy_entries(
    target: torch.Tensor, source: torch.Tensor, order: torch.Tensor | None = None
) -> None:
    """``target[i] = source[order[i]]``, cast to the target's dtype, by this thread alone.

    Args:
        target: ``[n, rows, columns]`` on the CPU, any strides.
        source: the same shape (or more entries, with ``order``), any strides and float dtype.
        order: int64 ``[n]``; None = as they are.
    """
    places: Iterable[int] = range(len(target)) if order is None else order.tolist()
    if source.dtype != target.dtype:
        _cast(target, source.detach(), places)
        return
    bits = _BITS[target.element_size()]
    to, given = target.view(bits).numpy(), source.detach().view(bits).numpy()
    target_of = None if order is None else _inverse(order.numpy(), len(given))
    if order is None:
        np.copyto(to, given)
    elif target_of is not None:
        to[target_of] = given
    else:
        for i, place in enumerate(places):
            to[i] = given[place]


def transpose_entries(matrix: torch.Tensor, staging: torch.Tensor) -> None:
    """``matrix[i] = matrix[i].T`` where it lies, by this thread alone.

    Args:
        matrix: ``[n, rows, columns]`` on the CPU, contiguous, any float dtype. Each entry becomes
            ``[columns, rows]`` in the same memory; the tensor itself keeps its shape.
        staging: 1-D, the same dtype, at least as long as an entry; best if it stays in a cache.
    """
    bits = _BITS[matrix.element_size()]
    values, buffer = matrix.detach().view(bits).numpy(), staging.view(bits).numpy()
    n, rows, columns = values.shape
    some = len(buffer) // max(1, rows * columns)
    for i in range(0, n if values.size else 0, some):
        part = values[i : i + some]
        turned = buffer[: part.size]
        np.copyto(turned.reshape(len(part), columns, rows), part.transpose(0, 2, 1))
        np.copyto(part.reshape(-1), turned)


def _inverse(order: Any, count: int) -> Any | None:
    """Return the inverse of an order that has each of ``count`` entries once; None for others.

    With it all entries are one copy. With one copy each, of some microseconds, several threads
    would spend their time on handing Python's lock to each other.
    """
    if len(order) != count or (np.bincount(order, minlength=count) != 1).any():
        return None
    inverse = np.empty_like(order)
    inverse[order] = np.arange(count)
    return inverse


def _cast(target: torch.Tensor, source: torch.Tensor, places: Iterable[int]) -> None:
    """Copy and cast in pieces that are too small for torch to share out."""
    rows = max(1, _SERIAL // max(1, target.shape[2]))
    columns = min(target.shape[2], _SERIAL)
    for i, place in enumerate(places):
        for row in range(0, target.shape[1], rows):
            for column in range(0, target.shape[2], max(1, columns)):
                part = slice(row, row + rows), slice(column, column + columns)
                target[(i, *part)].copy_(source[(place, *part)])
