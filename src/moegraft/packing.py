"""Packing: an adapter's factors laid out as the arena holds them, in one run of copies.

The records that point into it are described in :mod:`moegraft.factors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moegraft.check import checked_site
from moegraft.factors import (
    A_EXPERT_STRIDE,
    A_OFFSET,
    A_ROW_STRIDE,
    B_EXPERT_STRIDE,
    B_OFFSET,
    B_ROW_STRIDE,
    RANK_I32,
    RECORD_WORDS,
    SCALE_F32,
    SHARED_A_I32,
    UNIT_BYTES,
    PackedAdapter,
    TableLayout,
    align,
    empty_row,
)
from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors


class Piece(NamedTuple):
    """One factor and its place.

    Attributes:
        offset: elements from the start of the data.
        matrix: ``[entries, R, in]`` of an A, ``[entries, out, R]`` of a B.
        is_b: True for a B, which is stored rank-major, ``[entries, R, out]``.
        row_stride: elements between two rank rows in the data.
        order: int64 ``[entries]``, the entry of ``matrix`` that comes to each place; None = as
            they are.
    """

    offset: int
    matrix: torch.Tensor
    is_b: bool
    row_stride: int
    order: torch.Tensor | None


@dataclass(frozen=True)
class PackPlan:
    """Where an adapter's factors go.

    Attributes:
        pieces: the factors; together they cover the data.
        elements: the length of the data.
        row: the table row that points into it.
        max_rank: the largest rank of any projection.
    """

    pieces: Sequence[Piece]
    elements: int
    row: torch.Tensor
    max_rank: int

    def fill(self, data: torch.Tensor) -> None:
        """Copy all factors into ``data`` ``[elements]``, cast to its dtype.

        On a GPU the copies are queued on the current stream; factors there must be in order with
        it.
        """
        for piece in self.pieces:
            _place(piece, data)


def packed_bytes(
    factors: Mapping[str, SiteFactors], layout: TableLayout, dtype: torch.dtype
) -> int:
    """Return ``num_bytes`` of :func:`pack_adapter` for the same arguments, without packing."""
    return plan_adapter(factors, layout, dtype).elements * dtype.itemsize


def pack_adapter(
    factors: Mapping[str, SiteFactors],
    layout: TableLayout,
    dtype: torch.dtype,
    pin_memory: bool = False,
) -> PackedAdapter:
    """Lay an adapter's factors out as the arena holds them.

    Args:
        factors: site name -> factors; AdapterError when one does not fit a site of ``layout``.
        layout: the model's table layout.
        dtype: dtype of the arena; factors are cast once, here.
        pin_memory: put ``data`` in page-locked memory, for asynchronous copies to a GPU.
    """
    plan = plan_adapter(factors, layout, dtype)
    data = torch.empty(plan.elements, dtype=dtype, pin_memory=pin_memory)
    plan.fill(data)
    return PackedAdapter(data, plan.row, plan.max_rank)


def plan_adapter(
    factors: Mapping[str, SiteFactors], layout: TableLayout, dtype: torch.dtype
) -> PackPlan:
    """Find every factor's place; AdapterError when one does not fit a site of ``layout``.

    Experts come in their order, whatever order their entries are in, so equal adapters give equal
    bytes.
    """
    row = empty_row(layout)
    num_records = sum(len(site.projections) for site in layout.sites)
    words = row.numpy()[: num_records * RECORD_WORDS].reshape(num_records, RECORD_WORDS)
    ints, floats = words.view("int32"), words.view("float32")
    pieces: list[Piece] = []
    elements = max_rank = 0

    def place(matrix: torch.Tensor, is_b: bool, order: torch.Tensor | None) -> tuple[int, int, int]:
        nonlocal elements
        entries, rank, width = matrix.transpose(1, 2).shape if is_b else matrix.shape
        row_stride = align(width, dtype)
        offset = elements
        own_order = order if order is not None and len(order) == entries else None
        pieces.append(Piece(offset, matrix, is_b, row_stride, own_order))
        elements += entries * rank * row_stride
        expert_stride = 0 if entries == 1 else rank * row_stride
        return offset * dtype.itemsize // UNIT_BYTES, expert_stride, row_stride

    for name, site_factors in factors.items():
        site = checked_site(layout.sites, name, site_factors)
        first = layout.first_record[name]
        expert_map, order = _in_expert_order(site, site_factors)
        previous: LoraFactor | None = None
        for i, projection in enumerate(site.projections, first):
            factor = site_factors.projections.get(projection.name)
            if factor is None or factor.rank == 0:
                previous = None
                continue
            max_rank = max(max_rank, factor.rank)
            shared = previous is not None and previous.lora_A is factor.lora_A
            of_a = (A_OFFSET, A_EXPERT_STRIDE, A_ROW_STRIDE)
            words[i, of_a] = words[i - 1, of_a] if shared else place(factor.lora_A, False, order)
            words[i, (B_OFFSET, B_EXPERT_STRIDE, B_ROW_STRIDE)] = place(factor.lora_B, True, order)
            ints[i, RANK_I32], ints[i, SHARED_A_I32] = factor.rank, int(shared)
            floats[i, SCALE_F32] = factor.scale
            previous = factor
        place_of_map = layout.expert_map(row, site)
        if place_of_map is not None:
            place_of_map.copy_(expert_map)
    return PackPlan(pieces, elements, row, max_rank)


def _in_expert_order(site: Site, factors: SiteFactors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the expert map as stored, and the order of entries that it needs; None = as is."""
    given = factors.expert_map
    if given is None:
        return torch.arange(site.num_experts, dtype=torch.int32), None
    live = given >= 0
    order = given[live].long()
    count = torch.arange(len(order))
    entries = max((factor.num_entries for factor in factors.projections.values()), default=0)
    if entries != len(order) or not torch.equal(order.sort().values, count):
        return given, None  # entries that several experts share, or none has
    stored = given.clone()
    stored[live] = count.int()
    return stored, None if torch.equal(order, count) else order


def _place(piece: Piece, data: torch.Tensor) -> None:
    """Copy one factor to its place."""
    matrix, order = piece.matrix, piece.order
    entries, rank, width = matrix.transpose(1, 2).shape if piece.is_b else matrix.shape
    end = piece.offset + entries * rank * piece.row_stride
    rows = data[piece.offset : end].view(entries, rank, piece.row_stride)
    if width < piece.row_stride:
        rows[:, :, width:].zero_()
    rows = rows[:, :, :width]
    if order is not None:
        order = order.to(matrix.device)
        if not piece.is_b and matrix.dtype == rows.dtype and rows.is_contiguous():
            torch.index_select(matrix, 0, order, out=rows)
            return
        matrix = matrix.index_select(0, order)
    rows.copy_(matrix.transpose(1, 2) if piece.is_b else matrix)
