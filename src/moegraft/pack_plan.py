"""Where each factor of an adapter goes in packed data, and the copies that bring it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from moegraft.factors import PackedAdapter
from moegraft.host_copy import copy_entries, in_threads


class Piece(NamedTuple):
    """One factor and its place.

    Attributes:
        site: name of its site.
        offset: elements from the start of the data.
        matrix: ``[entries, R, in]`` of an A, ``[entries, out, R]`` of a B.
        is_b: True for a B, which is stored rank-major, ``[entries, R, out]``.
        row_stride: elements between two rank rows in the data.
        order: int64 ``[entries]``, the entry of ``matrix`` that comes to each place; None = as
            they are.
    """

    site: str
    offset: int
    matrix: torch.Tensor
    is_b: bool
    row_stride: int
    order: torch.Tensor | None


@dataclass(frozen=True)
class PackPlan:
    """Where an adapter's factors go.

    Attributes:
        pieces: the factors, site by site; together they cover the data.
        spans: site name -> (begin, end) of its pieces in the data.
        row: the table row that points into it.
        max_rank: the largest rank of any projection.
    """

    pieces: Sequence[Piece]
    spans: Mapping[str, tuple[int, int]]
    row: torch.Tensor
    max_rank: int

    @property
    def elements(self) -> int:
        """The length of the data."""
        return max((end for _, end in self.spans.values()), default=0)

    def fill(self, data: torch.Tensor) -> None:
        """Copy all factors into ``data`` ``[elements]``, cast to its dtype.

        On a GPU the copies are queued on the current stream; factors there must be in order with
        it.
        """
        if data.is_cpu and all(piece.matrix.is_cpu for piece in self.pieces):
            in_threads(partial(place_piece, data=data), self.pieces, data.nbytes)
            return
        for piece in self.pieces:
            place_piece(piece, data)

    def packed(self, data: torch.Tensor) -> PackedAdapter:
        """Return the adapter whose factors :meth:`fill` put into ``data``."""
        return PackedAdapter(data, self.row, self.max_rank, self.spans)


def place_piece(piece: Piece, data: torch.Tensor) -> None:
    """Copy one factor to its place."""
    matrix, order = piece.matrix, piece.order
    entries, rank, width = matrix.transpose(1, 2).shape if piece.is_b else matrix.shape
    end = piece.offset + entries * rank * piece.row_stride
    rows = data[piece.offset : end].view(entries, rank, piece.row_stride)
    if width < piece.row_stride:
        rows[:, :, width:].zero_()
    rows = rows[:, :, :width]
    source = matrix.transpose(1, 2) if piece.is_b else matrix
    if data.is_cpu and matrix.is_cpu:
        copy_entries(rows, source, order)
        return
    rows.copy_(source if order is None else source.index_select(0, order.to(matrix.device)))
