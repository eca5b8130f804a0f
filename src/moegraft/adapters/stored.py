"""What a safetensors file says of its tensors, in columns: it may have tens of thousands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

#: torch counts elements and bytes in signed 64 bits.
LARGEST = 1 << 62


class StoredTensor(NamedTuple):
    """One tensor of a file: its dtype, shape and bytes ``begin <= at < end`` of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorKind(NamedTuple):
    """What many tensors have in common."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself, in columns: it may have tens of thousands of tensors.

    Attributes:
        names: of its tensors, none twice, in the order of the header; together they cover the data
            without holes or overlaps.
        kinds: that they are of, none twice as it is written; few as a rule.
        kind_of: int64 array, each tensor's number in ``kinds``.
        begins: int64 array, the first byte of each in the data.
        metadata: its free text.
        data_begin: byte of the file that the data begin at.
        data_bytes: length of the data, to the end of the file.
    """

    names: Sequence[str]
    kinds: Sequence[TensorKind]
    kind_of: Any
    begins: Any
    metadata: Mapping[str, str]
    data_begin: int
    data_bytes: int

    @cached_property
    def aligned(self) -> bool:
        """True when every tensor begins at a multiple of its dtype's size."""
        sizes = np.array([kind.dtype.itemsize for kind in self.kinds], dtype=np.int64)
        return not (self.begins % sizes[self.kind_of]).any()

    @cached_property
    def sizes(self) -> Any:
        """The bytes of each tensor, int64 array."""
        return sizes_of(self.kinds)[self.kind_of]

    @cached_property
    def order(self) -> Any:
        """Numbers of the tensors as they lie in the file; an empty one before what begins there."""
        return np.lexsort((self.sizes, self.begins))

    @cached_property
    def kind_of_each(self) -> Sequence[TensorKind]:
        """The kind of each tensor."""
        return list(map(self.kinds.__getitem__, self.kind_of.tolist()))

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Name -> where it is, in the order of the header."""
        each = zip(self.names, self.kind_of_each, self.begins.tolist(), strict=True)
        return {
            name: StoredTensor(kind.dtype, kind.shape, begin, begin + kind.num_bytes)
            for name, kind, begin in each
        }


def sizes_of(kinds: Sequence[TensorKind]) -> Any:
    """Return the bytes of a tensor of each kind, int64 array."""
    # No span is that long; where sizes are 0 others may be, and no int64 holds them.
    return np.array([min(kind.num_bytes, LARGEST) for kind in kinds], dtype=np.int64)
