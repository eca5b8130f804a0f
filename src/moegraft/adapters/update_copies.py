"""The moves of an update as one launch per dtype of its tensors, with a check of all values.

Parts that are not aligned to 16 bytes, such as those of rank 4, have a launch of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from moegraft.adapters.update_plan import Move, UpdatePlan
from moegraft.backends.triton.copy_factors import JOB_WORDS, run_copy_factors, tiles_of
from moegraft.factors import UNIT_BYTES


class _Launch(NamedTuple):
    """Jobs over tensors of one dtype, of which all or none are aligned, see ``run_copy_factors``.

    Attributes:
        tensors: which of the plan's tensors these are.
        jobs, tile_jobs: the tables, on the host.
        aligned: all jobs are, if their tensors begin at multiples of 16 bytes.
    """

    tensors: tuple[int, ...]
    jobs: torch.Tensor
    tile_jobs: torch.Tensor
    aligned: bool


class UpdateCopies:
    """What is the same in all updates by one plan: tables of jobs, kept on each device."""

    def __init__(self, launches: Sequence[_Launch]) -> None:
        self._launches = launches
        self._tables: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @staticmethod
    def of(plan: UpdatePlan) -> UpdateCopies | None:
        """Make the tables; None when a part has no adjacent rows, columns or entries."""
        groups: dict[tuple[torch.dtype, bool], list[tuple[int, ...]]] = {}
        for move in plan.moves:
            dtype = plan.kinds.dtypes[move.tensor]
            jobs = list(_jobs(move))
            if not jobs:
                return None
            for job in jobs:
                key = dtype, _is_aligned(job, UNIT_BYTES // dtype.itemsize)
                groups.setdefault(key, []).append((move.tensor, *job))
        return UpdateCopies([_launch(jobs, aligned) for (_, aligned), jobs in groups.items()])

    def run(self, tensors: Sequence[torch.Tensor], data: torch.Tensor) -> bool:
        """Fill ``data`` ``[elements]`` on the current stream; True when all of it is finite.

        The host waits for it. ``data`` begins at a multiple of 16 bytes.
        """
        with torch.cuda.device_of(data):
            return self._run(tensors, data)

    def _run(self, tensors: Sequence[torch.Tensor], data: torch.Tensor) -> bool:
        device = data.device
        if device not in self._tables:
            self._tables[device] = [
                (launch.jobs.to(device), launch.tile_jobs.to(device)) for launch in self._launches
            ]
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        for launch, (jobs, tile_jobs) in zip(self._launches, self._tables[device], strict=True):
            base = tensors[launch.tensors[0]].detach()
            size, address = base.element_size(), base.data_ptr()
            addresses = np.array([tensors[i].data_ptr() for i in launch.tensors], dtype=np.int64)
            places = torch.from_numpy((addresses - address) // size)
            aligned = launch.aligned and not (addresses % UNIT_BYTES).any()
            places = places.to(device, non_blocking=True)
            run_copy_factors(base, places, jobs, tile_jobs, data, bad, aligned)
        return not bool(bad.item())


def _jobs(move: Move) -> Iterator[tuple[int, ...]]:
    """Cut a move into matrices: source, steps, target, its step, counts, columns with padding."""
    (entries, rank, width), (by_entry, by_row, by_column) = move.shape, move.strides
    row, entry = move.row_stride, rank * move.row_stride
    if by_column == 1 or width == 1:
        if entries == 1 or by_entry == rank * by_row:
            yield move.source, by_row, 1, move.target, row, entries * rank, width, row
            return
        for i in range(entries):
            source, target = move.source + i * by_entry, move.target + i * entry
            yield source, by_row, 1, target, row, rank, width, row
    elif by_row == 1 or rank == 1:
        for i in range(entries):
            source, target = move.source + i * by_entry, move.target + i * entry
            yield source, 1, by_column, target, row, rank, width, row
    elif by_entry == 1 or entries == 1:
        for k in range(rank):
            source, target = move.source + k * by_row, move.target + k * row
            yield source, 1, by_column, target, entry, entries, width, row


def _is_aligned(job: tuple[int, ...], unit: int) -> bool:
    """True when a job's rows, or columns, begin and end at multiples of ``unit`` elements."""
    source, step_f, step_w, _, _, count_f, count_w, _ = job
    step, length = (step_f, count_w) if step_w == 1 else (step_w, count_f)
    return not (source % unit or step % unit or length % unit)


def _launch(jobs: list[tuple[int, ...]], aligned: bool) -> _Launch:
    """Make the tables of some jobs: ``(tensor of the plan, *job)``."""
    table = np.zeros((len(jobs), JOB_WORDS), dtype=np.int64)
    table[:, : JOB_WORDS - 1] = jobs
    tensors, table[:, 0] = np.unique(table[:, 0], return_inverse=True)
    tiles = np.array([tiles_of(int(job[6]), int(job[8])) for job in table], dtype=np.int64)
    table[:, JOB_WORDS - 1] = np.cumsum(tiles) - tiles
    tile_jobs = np.repeat(np.arange(len(jobs), dtype=np.int32), tiles)
    return _Launch(
        tuple(tensors.tolist()), torch.from_numpy(table), torch.from_numpy(tile_jobs), aligned
    )
