"""The tensors of a safetensors file, read once into memory of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.header import Header, read_header
from moegraft.adapters.safe_open import open_regular, path_text
from moegraft.errors import AdapterError

#: What one thread reads at a time, and how many there are at most.
_CHUNK_BYTES, _MAX_THREADS = 64 << 20, 4


class TensorFile(NamedTuple):
    """A safetensors file as read.

    Attributes:
        tensors: name -> tensor, in the order of the header; views of one buffer.
        runs: 1-D views of that buffer, one per dtype or more, that hold all their values.
        memory: the buffer, uint8.
    """

    tensors: dict[str, torch.Tensor]
    runs: tuple[torch.Tensor, ...]
    memory: torch.Tensor


def read_tensors(path: Path, policy: FilePolicy, pin_memory: bool = False) -> TensorFile:
    """Read a safetensors file.

    The file is opened once, and its bytes are copied: nothing that happens to it later (another
    file in its place, a shorter one) can change what was checked, or end the process as a memory
    map of a truncated file would.

    Raises:
        AdapterError: no readable safetensors file, or one that the policy does not allow.
    """
    origin = path_text(path)
    with open_regular(path, policy) as (file, num_bytes):
        header = read_header(file, num_bytes, origin, policy)
        data = _read(file, header, origin, pin_memory)
    return TensorFile(_views(data, header), tuple(_runs(data, header)), data)


def _read(file: BinaryIO, header: Header, origin: str, pin_memory: bool) -> torch.Tensor:
    """Return the file's data as uint8, all of it or an error."""
    try:
        data = torch.empty(header.data_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    except RuntimeError as error:
        raise AdapterError(
            f"{origin} has {header.data_bytes:,} bytes of tensors, more than this machine has "
            "memory for."
        ) from error
    found = _fill(file, header.data_begin, data.numpy().data)
    if found != header.data_bytes:
        raise AdapterError(
            f"{origin} is not a readable safetensors file: it ended after {found:,} of "
            f"{header.data_bytes:,} bytes of tensors."
        )
    return data


def _fill(file: BinaryIO, begin: int, memory: memoryview) -> int:
    """Read into ``memory`` from byte ``begin`` on, a large file by several threads.

    Returns the bytes that were read. Most of the time goes into the first touch of new pages.
    """
    if len(memory) <= _CHUNK_BYTES or not hasattr(os, "preadv"):
        file.seek(begin)
        return file.readinto(memory)  # type: ignore[attr-defined]

    def read(start: int) -> int:
        part, done = memory[start : start + _CHUNK_BYTES], 0
        while done < len(part):
            count = os.preadv(file.fileno(), [part[done:]], begin + start + done)
            if not count:
                break
            done += count
        return done

    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="moegraft-read") as pool:
        return sum(pool.map(read, range(0, len(memory), _CHUNK_BYTES)))


def _views(data: torch.Tensor, header: Header) -> dict[str, torch.Tensor]:
    """Return all tensors: views, or copies where the bytes are not aligned to the dtype.

    One call per tensor; a large adapter has tens of thousands.
    """
    whole: dict[torch.dtype, torch.Tensor] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    tensors = {}
    for name, (dtype, shape, begin, end) in header.tensors.items():
        size = dtype.itemsize
        if begin % size:
            tensors[name] = data[begin:end].clone().view(dtype).view(shape)
            continue
        if dtype not in whole:
            whole[dtype] = data[: len(data) // size * size].view(dtype)
        if shape not in strides:
            strides[shape] = torch.empty(shape, device="meta").stride()
        tensors[name] = whole[dtype].as_strided(shape, strides[shape], begin // size)
    return tensors


def _runs(data: torch.Tensor, header: Header) -> Iterable[torch.Tensor]:
    """View the data as it is, one run per dtype in turn; a run that is not aligned as a copy."""
    stored = sorted(header.tensors.values(), key=lambda t: (t.begin, t.end))
    for dtype, group in groupby(stored, key=lambda t: t.dtype):
        tensors = list(group)
        run = data[tensors[0].begin : tensors[-1].end]
        yield (run.clone() if tensors[0].begin % dtype.itemsize else run).view(dtype)
