"""Tensors of single experts as one ``[n, ..]`` tensor: as a view where they lie so, else copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch


def common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the smallest dtype that holds the values of one or more tensors exactly."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


class Strided(NamedTuple):
    """Equal tensors at equal distances in one memory.

    Attributes:
        view: ``[n, ..]``, in the order of the memory.
        places: tensor i of those that were asked for is ``view[places[i]]``.
    """

    view: torch.Tensor
    places: tuple[int, ...]


def strided(tensors: Sequence[torch.Tensor]) -> Strided | None:
    """View tensors as one, without a copy; None when they don't lie at equal distances.

    A file of one adapter has them so: every expert has the same tensors, one expert behind the
    other, as a rule in the order of their names (0, 1, 10, 11, .., 2, 20, ..).

    Args:
        tensors: two or more, all of one shape and dtype; views of one memory, or not.
    """
    first = tensors[0]
    size = first.element_size()
    starts = [tensor.data_ptr() for tensor in tensors]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    by_start = sorted(range(len(starts)), key=starts.__getitem__)
    begin = starts[by_start[0]]
    step = starts[by_start[1]] - begin
    if step < first.numel() * size or step % size:
        return None
    # What lies between the first and the last one of a block of memory is a part of it, too.
    memory = first.untyped_storage()
    end = starts[by_start[-1]] + first.numel() * size
    if begin < memory.data_ptr() or end > memory.data_ptr() + memory.nbytes():
        return None
    places = [0] * len(starts)
    for place, i in enumerate(by_start):
        if starts[i] != begin + place * step:
            return None
        places[i] = place
    offset = (begin - memory.data_ptr()) // size
    strides = (step // size, *first.stride())
    return Strided(first.as_strided((len(starts), *first.shape), strides, offset), tuple(places))
