"""Tensors of single experts as one ``[n, ..]`` tensor: as a view where they lie so, else copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


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
    memory = first.untyped_storage().data_ptr()
    starts = []
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != memory:
            return None
        starts.append(tensor.storage_offset())
    by_start = sorted(range(len(starts)), key=starts.__getitem__)
    begin = starts[by_start[0]]
    step = starts[by_start[1]] - begin
    if step < first.numel():
        return None
    places = [0] * len(starts)
    for place, i in enumerate(by_start):
        if starts[i] != begin + place * step:
            return None
        places[i] = place
    size = (len(starts), *first.shape)
    return Strided(first.as_strided(size, (step, *first.stride()), begin), tuple(places))
