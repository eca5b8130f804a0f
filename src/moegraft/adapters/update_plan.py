"""Where the tensors of an update go, found once for all updates with tensors of the same shapes.

Reading an adapter (names, layouts, checks, places) takes far longer than copying it on a GPU. So
it is read once from tensors without values; what comes out are views of them, and these say which
part of which tensor goes where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.checksum import SiteSums
from moegraft.adapters.config import AdapterConfig
from moegraft.adapters.header import STORED_DTYPES
from moegraft.adapters.keys import parse_key
from moegraft.adapters.layouts import ReadOptions
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.report import BindReport
from moegraft.errors import AdapterError
from moegraft.factors import UNIT_BYTES, TableLayout
from moegraft.host_copy import copy_entries, in_threads
from moegraft.pack_plan import PackPlan, Piece
from moegraft.packing import plan_adapter

if TYPE_CHECKING:
    from moegraft.adapters.update_copies import UpdateCopies

Bind = Callable[[AdapterSource, ReadOptions | None], BoundAdapter]
#: Bytes of the memory that tensors without values are views of; tells it from any other.
_WHOLE_BYTES = 1 << 60
_DIGITS = re.compile(r"([0-9]+)")
_DTYPES = frozenset(STORED_DTYPES.values())
_KINDS = (torch.Tensor, torch.nn.Parameter)


class TensorKinds(NamedTuple):
    """What tensors are, but for their values and addresses."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(tensors: Any) -> TensorKinds | None:
        """Return that of plain contiguous tensors in one place; None for any others."""
        if not isinstance(tensors, Mapping) or not tensors:
            return None
        values = list(tensors.values())
        if not all(type(t) in _KINDS and t.layout is torch.strided for t in values):
            return None
        dtypes = tuple([t.dtype for t in values])
        if not _DTYPES.issuperset(dtypes) or len({t.device for t in values}) != 1:
            return None
        if not all([t.is_contiguous() for t in values]):
            return None
        return TensorKinds(tuple(tensors), tuple([t.shape for t in values]), dtypes)


class Move(NamedTuple):
    """A part of one tensor that goes to one place.

    Attributes:
        tensor: which one; source: elements from its first.
        shape: ``(entries, R, width)``; strides: of the tensor, in elements.
        target: elements from the first of the packed data; there the entries lie one behind the
            other, rows ``row_stride`` apart, with zeros behind their ``width``.
    """

    tensor: int
    source: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    target: int
    row_stride: int


@dataclass(frozen=True)
class UpdatePlan:
    """How tensors of some kinds become a packed adapter.

    Attributes:
        kinds: of the tensors.
        config, options: what they are read with.
        pack: the places of the packed adapter; its pieces have no values.
        moves: which parts of the tensors go there; together they fill it.
        report: how the tensors are bound; without a word on equal copies, which only values tell.
        dtype: of the packed data.
    """

    kinds: TensorKinds
    config: Mapping[str, Any]
    options: ReadOptions | None
    pack: PackPlan
    moves: tuple[Move, ...]
    report: BindReport
    dtype: torch.dtype

    @cached_property
    def copies(self) -> UpdateCopies | None:
        """The moves as a few launches on a GPU; None where these can't make them."""
        from moegraft.adapters.update_copies import UpdateCopies

        return UpdateCopies.of(self)

    @cached_property
    def is_partial(self) -> bool:
        """True when some of the tensors' values go nowhere, as on a rank of several."""
        moved = sum(math.prod(move.shape) for move in self.moves)
        return moved < sum(math.prod(shape) for shape in self.kinds.shapes)

    @cached_property
    def sums(self) -> SiteSums:
        """What the checksum needs of what a GPU has packed."""
        return SiteSums(self.pack.spans, self.dtype.itemsize)

    def fill(self, tensors: Sequence[torch.Tensor], data: torch.Tensor) -> None:
        """Copy tensors of these kinds into ``data`` ``[elements]``, all on the CPU, and cast."""

        def place(move: Move) -> None:
            entries, rank, width = move.shape
            end = move.target + entries * rank * move.row_stride
            rows = data[move.target : end].view(entries, rank, move.row_stride)
            if width < move.row_stride:
                rows[:, :, width:].zero_()
            tensor = tensors[move.tensor].detach()
            offset = tensor.storage_offset() + move.source
            copy_entries(rows[:, :, :width], tensor.as_strided(move.shape, move.strides, offset))

        in_threads(place, self.moves, data.nbytes)

    def is_like(self, report: BindReport) -> bool:
        """True when an adapter that was bound so has the same places, shared alike by experts.

        Only then an update by this plan takes what that adapter takes: factors that are equal for
        all experts, which are stored once, are not looked for again.
        """
        return report.sites is self.report.sites or _places(report) == self._places

    @cached_property
    def _places(self) -> dict[tuple[str, str], tuple[int, bool, bool]]:
        return _places(self.report)


def _places(report: BindReport) -> dict[tuple[str, str], tuple[int, bool, bool]]:
    factors = {
        (site.site, name): (p.experts, p.shared_a, p.shared_b)
        for site in report.sites
        for name, p in site.projections.items()
    }
    vectors = {
        (site.site, kind): (1, False, False) for site in report.sites for kind in site.vectors
    }
    return {**factors, **vectors}


def make_plan(
    kinds: TensorKinds,
    config: Mapping[str, Any],
    options: ReadOptions | None,
    bind: Bind,
    layout: TableLayout,
    dtype: torch.dtype,
) -> UpdatePlan | None:
    """Read tensors without values; None when what comes out is not all parts of them.

    That is so where values are computed (DoRA, experts of different scales) or padded.

    Args:
        kinds: of the tensors; a whole adapter of these kinds was read before.
        config: the JSON of an adapter_config, which was read before.
        options: the caller's say.
        bind: how an adapter is read for the bank; raises when it can't be served in full.
        layout, dtype: the bank's.
    """
    blank = _without_values(kinds)
    keys = {name: parse_key(name) for name in kinds.names}
    source = AdapterSource(blank.tensors, keys, AdapterConfig.parse(config), "an update")
    try:
        bound = bind(source, options)
        pack = plan_adapter(bound.factors, layout, dtype)
    except (RuntimeError, AdapterError):  # torch's: there are no values
        return None
    if bound.magnitudes:
        return None
    moves: list[Move] = []
    for piece in pack.pieces:
        found = _moves_of(piece, kinds, blank)
        if found is None:
            return None
        moves += found
    return UpdatePlan(kinds, config, options, pack, tuple(moves), bound.report, dtype)


class _Blank(NamedTuple):
    """Tensors without values, side by side in one memory, in the natural order of names.

    Attributes:
        tensors: name -> tensor.
        numbers, begins, ends: int64 arrays in that order: the tensor's number among ``kinds``, its
            first byte and the one behind its last.
    """

    tensors: dict[str, torch.Tensor]
    numbers: Any
    begins: Any
    ends: Any


def _without_values(kinds: TensorKinds) -> _Blank:
    """Return tensors of these kinds that have no values."""
    whole = torch.empty(_WHOLE_BYTES, dtype=torch.uint8, device="meta")
    # In this order equal parts of single experts are equally far apart, expert by expert.
    numbers = sorted(range(len(kinds.names)), key=lambda i: _natural(kinds.names[i]))
    tensors, begins, ends, begin = {}, [], [], 0
    for i in numbers:
        name, shape, dtype = kinds.names[i], kinds.shapes[i], kinds.dtypes[i]
        num_bytes = math.prod(shape) * dtype.itemsize
        strides = torch.empty(shape, device="meta").stride()
        tensors[name] = whole.view(dtype).as_strided(shape, strides, begin // dtype.itemsize)
        begins.append(begin)
        ends.append(begin + num_bytes)
        begin += max(UNIT_BYTES, -(-num_bytes // UNIT_BYTES) * UNIT_BYTES)
    in_order = {name: tensors[name] for name in kinds.names}
    return _Blank(in_order, np.array(numbers), np.array(begins), np.array(ends))


def _natural(name: str) -> list[str | int]:
    """Sort expert 10 behind expert 9."""
    return [int(part) if part.isdecimal() else part for part in _DIGITS.split(name)]


def _moves_of(piece: Piece, kinds: TensorKinds, blank: _Blank) -> list[Move] | None:
    """Return where a piece comes from; None when it is no part of the tensors."""
    matrix = piece.matrix.transpose(1, 2) if piece.is_b else piece.matrix
    if matrix.untyped_storage().nbytes() != _WHOLE_BYTES:
        return None
    size, (entries, rank, width) = matrix.element_size(), matrix.shape
    order = np.arange(entries) if piece.order is None else piece.order.numpy()
    first: Any = (int(matrix.storage_offset()) + order * matrix.stride(0)) * size
    last = first + ((rank - 1) * matrix.stride(1) + (width - 1) * matrix.stride(2) + 1) * size
    at: Any = np.searchsorted(blank.begins, first, side="right") - 1
    which = blank.numbers[at]
    if (last > blank.ends[at]).any() or {kinds.dtypes[i] for i in which} != {matrix.dtype}:
        return None
    source = (first - blank.begins[at]) // size
    moves = []
    for begin, end in pairwise(_runs(first, which)):
        step = int(first[begin + 1] - first[begin]) // size if end - begin > 1 else 0
        moves.append(
            Move(
                int(which[begin]),
                int(source[begin]),
                (end - begin, rank, width),
                (step, matrix.stride(1), matrix.stride(2)),
                piece.offset + begin * rank * piece.row_stride,
                piece.row_stride,
            )
        )
    return moves


def _runs(first: Any, which: Any) -> list[int]:
    """Return where runs of entries begin that lie at equal distances in one tensor, and the end."""
    cuts, begin = [0], 0
    for i in range(1, len(first)):
        step = first[i] - first[i - 1]
        even = i - 1 == begin or step == first[begin + 1] - first[begin]
        if which[i] != which[begin] or step < 0 or not even:
            cuts.append(i)
            begin = i
    return [*cuts, len(first)]
