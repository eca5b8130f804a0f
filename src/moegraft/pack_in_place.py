"""Packing inside of the memory that a file was read into: a large adapter is in memory once."""

from __future__ import annotations

import threading
from itertools import groupby, pairwise

import torch

from moegraft.factors import UNIT_BYTES
from moegraft.host_copy import copy_entries, in_threads, transpose_entries
from moegraft.pack_plan import PackPlan, Piece, place_piece

#: What of a B is transposed in one go; it stays in a core's cache.
_PART_BYTES = 1 << 20


def own_spans(plan: PackPlan, memory: torch.Tensor, dtype: torch.dtype) -> dict[str, int] | None:
    """Return where in ``memory`` each site's factors begin; None unless they fill it.

    That is so when all factors are views of it in ``dtype``, those of one site lie in one span of
    exactly the length that they have packed, and the spans of all sites are all of the memory.
    """
    storage = memory.untyped_storage().data_ptr()
    begins: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for site, pieces in groupby(plan.pieces, key=lambda piece: piece.site):
        matrices = [piece.matrix for piece in pieces]
        if any(m.dtype != dtype or m.untyped_storage().data_ptr() != storage for m in matrices):
            return None
        begin = min(int(matrix.storage_offset()) for matrix in matrices)
        end = max(int(matrix.storage_offset()) + _extent(matrix) for matrix in matrices)
        packed_begin, packed_end = plan.spans[site]
        if end - begin != packed_end - packed_begin or begin * dtype.itemsize % UNIT_BYTES:
            return None
        begins[site] = begin
        spans.append((begin, end))
    spans.sort()
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        return None
    total = sum(end - begin for begin, end in spans)
    return begins if total * dtype.itemsize == memory.numel() else None


def _extent(matrix: torch.Tensor) -> int:
    """Return the elements from a tensor's first to behind its last one in memory."""
    return 1 + sum((n - 1) * step for n, step in zip(matrix.shape, matrix.stride(), strict=True))


def reorder(plan: PackPlan, data: torch.Tensor) -> torch.Tensor:
    """Put factors that fill ``data`` in the order of the plan, one site at a time.

    Where all of a site's lie in their places already, as a file is read, only B is transposed.
    """
    own = threading.local()  # new memory for each site would cost more than to order it

    def staging(elements: int) -> torch.Tensor:
        found: torch.Tensor | None = getattr(own, "staging", None)
        if found is None or len(found) < elements:
            found = own.staging = torch.empty(elements, dtype=data.dtype)
        return found

    def put_in_order(site: tuple[str, list[Piece]]) -> None:
        name, pieces = site
        if all(map(_is_in_its_place, pieces)):
            for piece in pieces:
                if piece.is_b:
                    entry = piece.matrix.shape[1] * piece.matrix.shape[2]
                    part = staging(max(entry, _PART_BYTES // data.element_size()))
                    transpose_entries(piece.matrix, part)
            return
        begin, end = plan.spans[name]
        whole = staging(end - begin)[: end - begin]
        for piece in pieces:
            place_piece(piece._replace(offset=piece.offset - begin), whole)
        copy_entries(data[begin:end].view(1, 1, -1), whole.view(1, 1, -1))

    by_site = groupby(plan.pieces, key=lambda piece: piece.site)
    in_threads(put_in_order, [(name, list(pieces)) for name, pieces in by_site], data.nbytes)
    return data


def _is_in_its_place(piece: Piece) -> bool:
    """True when a factor lies where it belongs, but for the transposition of a B."""
    matrix = piece.matrix
    width = matrix.shape[1 if piece.is_b else 2]
    return (
        piece.order is None
        and matrix.is_contiguous()
        and width == piece.row_stride
        and int(matrix.storage_offset()) == piece.offset
    )
