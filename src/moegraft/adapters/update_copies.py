"""The moves of an update as a launch or two per dtype of its tensors, with a check of all values.

One copies rows as they are, one puts the columns of B, which lie side by side, into rows. Parts
that are not aligned to 16 bytes, such as those of rank 4, and ranks that differ have launches of
their own: what a launch promises the compiler must hold for all that it copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from moegraft.adapters.update_plan import Move, UpdatePlan
from moegraft.backends.triton.copy_factors import TILE_WORDS, CopyKind, run_copy_factors
from moegraft.factors import UNIT_BYTES


class _Matrices(NamedTuple):
    """Equal matrices of one tensor that go to places equally far apart; all in elements.

    Attributes:
        num_matrices: how many; source_gap, target_gap: from each to the next.
        source, target: where the first begins.
        columns: values of a column are adjacent in the source; else those of a row.
        step: from each column, or row, to the next; 0 where there is one.
        target_step: from each row of the target to the next.
        rows, width: of each; row_width: with padding.
    """

    num_matrices: int
    source_gap: int
    target_gap: int
    source: int
    target: int
    columns: bool
    step: int
    target_step: int
    rows: int
    width: int
    row_width: int

    def unit(self, whole: int) -> int:
        """Return how many values may be read at once, ``whole`` at most, a power of two."""
        gap = self.source_gap if self.num_matrices > 1 else 0
        along = self.rows if self.columns else self.width
        return math.gcd(whole, self.source, gap, self.step, along)


class _Launch(NamedTuple):
    """Tiles of one kind.

    Attributes:
        kind: of all of them.
        tensors: which of the plan's tensors they are of.
        tiles: the table, on the host.
    """

    kind: CopyKind
    tensors: tuple[int, ...]
    tiles: torch.Tensor


class UpdateCopies:
    """What is the same in all updates by one plan: tables of tiles, kept on each device."""

    def __init__(self, launches: Sequence[_Launch]) -> None:
        self._launches = launches
        self._tables: dict[torch.device, list[torch.Tensor]] = {}

    @staticmethod
    def of(plan: UpdatePlan) -> UpdateCopies | None:
        """Make the tables; None when a part has no adjacent rows, columns or entries."""
        groups: dict[CopyKind, list[tuple[int, _Matrices]]] = {}
        for move in plan.moves:
            dtype = plan.kinds.dtypes[move.tensor]
            parts = list(_matrices(move))
            if not parts:
                return None
            for part in parts:
                unit = part.unit(UNIT_BYTES // dtype.itemsize)
                kind = CopyKind.of(dtype, part.columns, unit, part.rows)
                groups.setdefault(kind, []).append((move.tensor, part))
        return UpdateCopies([_launch(kind, parts) for kind, parts in groups.items()])

    def run(self, tensors: Sequence[torch.Tensor], data: torch.Tensor) -> bool:
        """Fill ``data`` ``[elements]`` on the current stream; True when all of it is finite.

        The host waits for it. ``data`` begins at a multiple of 16 bytes.
        """
        with torch.cuda.device_of(data):
            return self._run(tensors, data)

    def _run(self, tensors: Sequence[torch.Tensor], data: torch.Tensor) -> bool:
        device = data.device
        if device not in self._tables:
            self._tables[device] = [launch.tiles.to(device) for launch in self._launches]
        on_host = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        addresses = torch.from_numpy(on_host).to(device, non_blocking=True)
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        for launch, tiles in zip(self._launches, self._tables[device], strict=True):
            bits = np.bitwise_or.reduce(on_host[list(launch.tensors)])
            alignment = math.gcd(int(bits), UNIT_BYTES)
            run_copy_factors(launch.kind, alignment, addresses, tiles, data, bad)
        return not bool(bad.item())


def _matrices(move: Move) -> Iterator[_Matrices]:
    """Cut a move into matrices, as few as there can be."""
    (entries, rank, width), (by_entry, by_row, by_column) = move.shape, move.strides
    row, entry = move.row_stride, rank * move.row_stride
    if by_column == 1 or width == 1:
        count, rows, step = entries, rank, by_row
        if rank == 1:
            count, rows, step = 1, entries, by_entry
        elif entries == 1 or by_entry == rank * by_row:
            count, rows = 1, entries * rank
        if rows > 1 and width == row == step:  # one long row
            rows, width, row = 1, rows * width, rows * row
        step = step if rows > 1 else 0
        yield _Matrices(
            count, by_entry, entry, move.source, move.target, False, step, row, rows, width, row
        )
    elif by_row == 1 or rank == 1:
        yield _Matrices(
            entries,
            by_entry,
            entry,
            move.source,
            move.target,
            True,
            by_column,
            row,
            rank,
            width,
            row,
        )
    elif by_entry == 1 or entries == 1:
        yield _Matrices(
            rank, by_row, row, move.source, move.target, True, by_column, entry, entries, width, row
        )


def _launch(kind: CopyKind, parts: Sequence[tuple[int, _Matrices]]) -> _Launch:
    """Make the table of some tensors' matrices, all of one kind."""
    columns = np.array([(tensor, *part) for tensor, part in parts], dtype=np.int64).T
    tensor, count, _, _, _, _, _, _, _, rows, _, row_width = columns
    tiles_f, tiles_w = -(-rows // kind.block_f), -(-row_width // kind.block_w)
    tiles = count * tiles_f * tiles_w
    number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    # From here on one value per tile.
    columns = np.repeat(columns, tiles, axis=1)
    tiles_f, tiles_w = np.repeat(tiles_f, tiles), np.repeat(tiles_w, tiles)
    tensor, _, source_gap, target_gap, source, target, _, step, target_step = columns[:9]
    rows, width, row_width = columns[9:]
    matrix, in_matrix = np.divmod(number, tiles_f * tiles_w)
    f, w = in_matrix // tiles_w * kind.block_f, in_matrix % tiles_w * kind.block_w
    along = f + w * step if kind.columns else f * step + w
    table = np.empty((len(number), TILE_WORDS), dtype=np.int64)
    table[:, 0] = tensor
    table[:, 1] = source + matrix * source_gap + along
    table[:, 2] = step
    table[:, 3] = target + matrix * target_gap + f * target_step + w
    table[:, 4] = target_step
    table[:, 5] = np.minimum(rows - f, kind.block_f)
    table[:, 6] = np.clip(width - w, 0, kind.block_w)
    table[:, 7] = np.minimum(row_width - w, kind.block_w)
    used = tuple(np.unique(tensor).tolist())
    return _Launch(kind, used, torch.from_numpy(table))
