"""Tensors that lie in one flat buffer, found through an index of names, offsets and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from moegraft.adapters.header import MAX_DIMS
from moegraft.adapters.stored import LARGEST
from moegraft.errors import AdapterError, shown

_DTYPES = {
    name: dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for name in (str(dtype), str(dtype).removeprefix("torch."))
}
#: Tensor name -> (offset, shape) or (offset, shape, dtype).
FlatIndex = Mapping[str, Sequence[Any]]


def flat_tensors(
    buffer: torch.Tensor,
    index: FlatIndex,
    device: torch.device | str = "cpu",
    origin: str = "the flat buffer",
) -> dict[str, torch.Tensor]:
    """Return the tensors of a flat buffer as views of it.

    Args:
        buffer: 1-D and contiguous: float32, bfloat16, float16, or uint8 for bytes. On the CPU it
            is viewed as it is, and on ``device`` too.
        index: tensor name -> ``(offset, shape)`` or ``(offset, shape, dtype)``. The offset counts
            elements of the buffer, so bytes of a uint8 one. dtype is a torch dtype or its name,
            such as ``"bfloat16"``; a uint8 buffer needs it, in another it must be the buffer's.
        device: the device other than the CPU that the buffer may be on.
        origin: what to call the buffer in messages.

    Raises:
        AdapterError: a buffer of another kind or place; an entry of another form, outside the
            buffer, not aligned to its dtype, or that overlaps another one. Names the entry.

    Example: ``flat_tensors(torch.arange(6.0), {"x": (2, (2, 2))})["x"]`` is ``[[2, 3], [4, 5]]``.
    """
    _check_buffer(buffer, torch.device(device), origin)
    if not isinstance(index, Mapping) or not index:
        raise AdapterError(f"{origin}: the index must map tensor names to (offset, shape).")
    flat = buffer.detach()
    spans: list[tuple[int, int, str]] = []
    tensors = {}
    for name, entry in index.items():
        offset, shape, dtype = _entry(name, entry, buffer, origin)
        length = math.prod(shape) * dtype.itemsize // buffer.element_size()
        if offset + length > buffer.numel():
            raise AdapterError(
                f"{origin}: {name!r} takes elements {offset:,} to {offset + length:,} of a buffer "
                f"of {buffer.numel():,} ({buffer.dtype})."
            )
        if (flat.storage_offset() + offset) * buffer.element_size() % dtype.itemsize:
            raise AdapterError(
                f"{origin}: {name!r} begins at byte {offset:,}, which is not a multiple of "
                f"{dtype.itemsize}, as {dtype} needs; pad the entries."
            )
        if length:
            spans.append((offset, offset + length, name))
        tensors[name] = flat[offset : offset + length].view(dtype).view(shape)
    _check_overlaps(spans, origin)
    return tensors


def _check_buffer(buffer: Any, device: torch.device, origin: str) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise AdapterError(f"{origin} is a {type(buffer).__name__}; a 1-D tensor is needed.")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise AdapterError(
            f"{origin} has shape {tuple(buffer.shape)} and strides {buffer.stride()}; it must be "
            "1-D and contiguous."
        )
    if buffer.dtype != torch.uint8 and buffer.dtype not in _DTYPES.values():
        raise AdapterError(
            f"{origin} is {buffer.dtype}; it must be float32, bfloat16, float16, or uint8 (bytes)."
        )
    if buffer.device.type != "cpu" and buffer.device != device:
        places = (
            "the CPU" if device.type == "cpu" else f"the CPU or on {device}, the model's device"
        )
        raise AdapterError(f"{origin} is on {buffer.device}; it must be on {places}.")


def _entry(
    name: Any, entry: Any, buffer: torch.Tensor, origin: str
) -> tuple[int, tuple[int, ...], torch.dtype]:
    """Return an entry's offset, shape and dtype, checked by themselves."""
    if not isinstance(name, str):
        raise AdapterError(f"{origin}: the index holds {shown(name)}, which is no tensor name.")
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise AdapterError(
            f"{origin}: {shown(name)} is {shown(entry)}; (offset, shape) or (offset, shape, dtype) "
            "is needed."
        )
    offset, shape = entry[0], entry[1]
    sizes: list[Any] = list(shape) if isinstance(shape, (tuple, list)) else [None]
    for number in (offset, *sizes):
        if type(number) is not int or not 0 <= number < LARGEST:
            raise AdapterError(
                f"{origin}: {shown(name)} has offset {shown(offset)} and shape {shown(shape)}; "
                "whole numbers from 0 on are needed, below 2^62."
            )
    if len(sizes) > MAX_DIMS or math.prod(max(size, 1) for size in sizes) >= LARGEST:
        raise AdapterError(f"{origin}: {shown(name)} has the shape {shown(shape)}.")
    return offset, tuple(sizes), _dtype(name, entry[2:], buffer.dtype, origin)


def _dtype(name: str, given: Sequence[Any], held: torch.dtype, origin: str) -> torch.dtype:
    dtype = held
    if given and given[0] is not None:
        found = _DTYPES.get(str(given[0]))
        if found is None:
            raise AdapterError(
                f"{origin}: {name!r} is said to be {shown(given[0])}; factors must be float32, "
                "bfloat16 or float16."
            )
        dtype = found
    if dtype == torch.uint8:
        raise AdapterError(
            f"{origin}: {name!r} has no dtype, which an entry of a uint8 buffer needs: (offset in "
            "bytes, shape, dtype)."
        )
    if held not in (torch.uint8, dtype):
        raise AdapterError(
            f"{origin}: {name!r} is said to be {dtype}, the buffer is {held}; for several dtypes "
            "give it as bytes, buffer.view(torch.uint8), with offsets in bytes."
        )
    return dtype


def _check_overlaps(spans: list[tuple[int, int, str]], origin: str) -> None:
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise AdapterError(
                f"{origin}: {first!r} and {second!r} overlap: one ends at {end:,}, the other "
                f"begins at {start:,}."
            )
