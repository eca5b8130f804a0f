"""The tensors of a safetensors file, read once into memory of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from moegraft.adapters.arrange import Places, arranged
from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.header import read_header
from moegraft.adapters.safe_open import open_regular, path_text, readable
from moegraft.adapters.stored import Header, TensorKind
from moegraft.errors import AdapterError
from moegraft.host_copy import MAX_THREADS, usable_cores

#: What one thread reads at a time.
_CHUNK_BYTES = 64 << 20
#: Places that one call reads to; Linux and others take no more.
_MAX_PARTS = 1024
#: Tensors of each kind, on average, from which on they are viewed kind by kind.
_MANY = 16


class TensorFile(NamedTuple):
    """A safetensors file as read.

    Attributes:
        tensors: name -> tensor, in the order of the header; views of one buffer, where those of
            experts may lie in the order of :func:`moegraft.adapters.arrange.arranged`.
        runs: 1-D views of that buffer, one per dtype or more, that hold all their values.
        memory: the buffer, uint8.
    """

    tensors: dict[str, torch.Tensor]
    runs: tuple[torch.Tensor, ...]
    memory: torch.Tensor


@contextmanager
def reading(path: Path, policy: FilePolicy, pin_memory: bool = False) -> Iterator[TensorFile]:
    """Read a safetensors file; its header is read and checked, its values come by the block's end.

    The file is opened once, and its bytes are copied: nothing that happens to it later (another
    file in its place, a shorter one) can change what was checked, or end the process as a memory
    map of a truncated file would. Threads read it, so that what is done in the block with names
    and shapes costs no time of its own.

    Args:
        path: the file.
        policy: where it may lie, and limits.
        pin_memory: read it into page-locked memory.

    Raises:
        AdapterError: no readable safetensors file, or one that the policy does not allow; also at
            the end of the block.
    """
    origin = path_text(path)
    with open_regular(path, policy) as (file, num_bytes):
        with readable(origin):
            header = read_header(file, num_bytes, origin, policy)
        data = _memory(header, origin, pin_memory)
        begins = header.begins
        if header.aligned and _by_threads(header.data_bytes):
            begins = arranged(header)
        order = header.order
        places = Places(header.begins[order], begins[order], header.sizes[order])
        with _Reader(file, header.data_begin, data, places) as reader:
            if not header.aligned:  # those tensors are copies of what was read
                reader.finish(origin)
            yield TensorFile(_views(data, header, begins), tuple(_runs(data, header)), data)
            reader.finish(origin)


def _memory(header: Header, origin: str, pin_memory: bool) -> torch.Tensor:
    """Return memory for a file's data, uint8."""
    try:
        return torch.empty(header.data_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    except RuntimeError as error:
        raise AdapterError(
            f"{origin} has {header.data_bytes:,} bytes of tensors, more than this machine has "
            "memory for."
        ) from error


def _by_threads(num_bytes: int) -> bool:
    """Whether data of that length are read in chunks."""
    return num_bytes > _CHUNK_BYTES and hasattr(os, "preadv")


class _Reader:
    """Reads a file's data, in chunks by several threads where it is large.

    Most of the time goes into the first touch of new pages. The end of the block waits for all
    threads, whatever ends it.

    Args:
        file, begin: the file, and the first byte of its data.
        data: uint8, where they go.
        places: where in ``data`` which of them go; those that :func:`_by_threads` reads at once
            have one place.
    """

    def __init__(self, file: BinaryIO, begin: int, data: torch.Tensor, places: Places) -> None:
        self._file = file
        self._begin = begin
        self._places = places
        self._view = data.numpy().data
        self._finished = False
        self._pool = ThreadPoolExecutor(
            min(MAX_THREADS, usable_cores()), thread_name_prefix="moegraft-read"
        )
        starts = range(0, len(self._view), _CHUNK_BYTES)
        self._alone = not _by_threads(len(self._view))
        try:
            self._parts = [] if self._alone else [self._pool.submit(self._read, s) for s in starts]
        except RuntimeError as error:
            self._pool.shutdown(cancel_futures=True)
            raise AdapterError(f"There is no thread to read an adapter with: {error}.") from error

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def finish(self, origin: str) -> None:
        """Wait until all is read; AdapterError when the file ended before or can't be read."""
        if self._finished:
            return
        self._finished = True
        with readable(origin):
            if self._alone:
                self._file.seek(self._begin)
                found: int = self._file.readinto(self._view)  # type: ignore[attr-defined]
            else:
                found = sum(part.result() for part in self._parts)
        if found != len(self._view):
            raise AdapterError(
                f"{origin} is not a readable safetensors file: it ended after {found:,} of "
                f"{len(self._view):,} bytes of tensors."
            )

    def _read(self, start: int) -> int:
        end = min(start + _CHUNK_BYTES, len(self._view))
        parts, done = self._places.parts(self._view, start, end), 0
        while parts:
            at = self._begin + start + done
            count = os.preadv(self._file.fileno(), parts[:_MAX_PARTS], at)
            if not count:
                break
            done += count
            parts = _behind(parts, count)
        return done


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers when the first ``count`` bytes are filled."""
    for i, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[i + 1 :]]
        count -= len(part)
    return []


def _views(data: torch.Tensor, header: Header, begins: Any) -> dict[str, torch.Tensor]:
    """Return all tensors, which begin at ``begins``; copies where they are not aligned."""
    if not header.aligned or len(header.kinds) * _MANY >= len(header.names):
        each = zip(header.kind_of_each, begins.tolist(), strict=True)
        views: Sequence[torch.Tensor] = [_view(data, kind, begin) for kind, begin in each]
    else:
        views = _views_by_kind(data, header, begins)
    return dict(zip(header.names, views, strict=True))


def _view(data: torch.Tensor, kind: TensorKind, begin: int) -> torch.Tensor:
    part = data[begin : begin + kind.num_bytes]
    return (part.clone() if begin % kind.dtype.itemsize else part).view(kind.dtype).view(kind.shape)


def _views_by_kind(data: torch.Tensor, header: Header, begins: Any) -> list[torch.Tensor]:
    """Return views of few kinds, all aligned: a large adapter has tens of thousands of tensors.

    Of those at equal distances, as single experts are, torch makes all in one call.
    """
    ends = np.cumsum(np.bincount(header.kind_of, minlength=len(header.kinds)))
    by_kind = np.split(np.argsort(header.kind_of, kind="stable"), ends[:-1])
    views = [data] * len(begins)
    for (dtype, shape, _), numbers in zip(header.kinds, by_kind, strict=True):
        size = dtype.itemsize
        whole = data[: len(data) // size * size].view(dtype)
        strides = torch.empty(shape, device="meta").stride()
        for some in _at_equal_steps(numbers, begins):
            places = (begins[some] // size).tolist()
            if len(places) > 1 and places[1] > places[0]:
                step = places[1] - places[0]
                stacked = whole.as_strided((len(places), *shape), (step, *strides), places[0])
                found: Sequence[torch.Tensor] = stacked.unbind(0)
            else:
                found = [whole.as_strided(shape, strides, place) for place in places]
            for at, view in zip(some.tolist(), found, strict=True):
                views[at] = view
    return views


def _at_equal_steps(numbers: Any, begins: Any) -> list[Any]:
    """Cut tensors of a kind into rows of those at equal distances, of one tensor at least.

    In a file gate and up are of one kind and take turns, so every second one is equally far away.
    In memory those of each projection are behind each other.
    """
    for turns in (1, 2):
        rows = [numbers[i::turns] for i in range(turns)]
        steps = [np.diff(begins[row]) for row in rows]
        if all(len(s) and s[0] > 0 and (s == s[0]).all() for s in steps):
            return rows
    numbers = numbers[np.argsort(begins[numbers], kind="stable")]
    apart = np.diff(begins[numbers])
    shortest = max(int(apart.min()), 1) if len(apart) else 1
    return list(np.split(numbers, np.flatnonzero(apart != shortest) + 1))


def _runs(data: torch.Tensor, header: Header) -> Iterator[torch.Tensor]:
    """View the data as it is, one run per dtype in turn; a run that is not aligned as a copy."""
    if len({kind.dtype for kind in header.kinds}) == 1:
        yield data.view(header.kinds[0].dtype)
        return
    stored = sorted(header.tensors.values(), key=lambda t: (t.begin, t.end))
    for dtype, group in groupby(stored, key=lambda t: t.dtype):
        tensors = list(group)
        run = data[tensors[0].begin : tensors[-1].end]
        yield (run.clone() if tensors[0].begin % dtype.itemsize else run).view(dtype)
