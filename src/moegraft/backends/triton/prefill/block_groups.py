"""Which factors a block of rows meets, for the prefill kernels: once per layer, in one launch.

A block's *segments* are its rows of one slot each. Up to 16 rank rows of a segment's factors are a
*group*; gate and up have theirs in common, down has its own. So what kernels loop over is as long
as the ranks that are live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.prefill.config import (
    GROUP_BYTES,
    GROUP_RANKS,
    STEP_GROUPS,
    most_groups,
)
from moegraft.backends.triton.prefill.route import Rows
from moegraft.backends.triton.segment_factors import load_factor
from moegraft.backends.triton.sync import launch_next, launch_wait
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES

#: Words of a group. B: offset in the arena, elements between rank rows, live rows, and as int32
#: segment and first rank row. A: the same, and as int32 the scale and 0.
WORDS = GROUP_BYTES // 8


@triton.jit
def _store_groups(
    groups_ptr, starts, numbers, segments, slots, records_ptr, records_i32_ptr, map_ptr, expert,
    slot_stride, map_stride, num_slots, side, WORD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the groups of one projection's A (WORD 0) or B (WORD 1)."""
    offset, stride, rank, scale = load_factor(
        records_ptr, records_i32_ptr, map_ptr, slots.to(tl.int64), side, expert, slot_stride,
        map_stride, num_slots, WORD, UNIT,
    )  # fmt: skip
    for i in range(0, tl.max(numbers, 0)):
        words = groups_ptr + (starts + i) * 4
        mask = i < numbers
        tl.store(words, offset + i * 16 * stride, mask=mask)
        tl.store(words + 1, stride, mask=mask)
        tl.store(words + 2, tl.minimum(tl.maximum(rank - i * 16, 0), 16).to(tl.int64), mask=mask)
        if WORD == 0:
            last = scale.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        else:
            last = segments.to(tl.int64) | ((segments * 0 + i * 16).to(tl.int64) << 32)
        tl.store(words + 3, last, mask=mask)


@triton.jit(do_not_specialize=["map_stride", "num_slots", "num_blocks", "max_groups"])
def block_groups_kernel(
    row_pair_ptr,  # [rows]
    block_info_ptr,  # [blocks]
    slots_ptr,  # [T] int32
    records_ptr,  # [S, projections, 8] int64
    records_i32_ptr,
    map_ptr,
    row_segment_ptr,  # [rows] int32 out: which of its block's segments a row is in, -1 none
    counts_ptr,  # [4, blocks] int32 out: groups of gate and up, of down; twice 0
    a_groups_ptr,  # [projections, blocks, max_groups, 4] int64 out
    b_groups_ptr,  # the same
    slot_stride,
    map_stride,
    num_slots,
    num_blocks,
    max_groups,
    TOP_K: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, BLOCK_M at least
    SLOTS: tl.constexpr,  # a power of two: slots that a block can have
    PDL: tl.constexpr,
):
    """See the top of the file."""
    launch_next(PDL)
    launch_wait(PDL)
    block = tl.program_id(0)
    info = tl.load(block_info_ptr + block)
    live_rows = info % 256
    if live_rows == 0:
        return
    expert = info // 256
    m = tl.arange(0, ROWS)
    row_mask = m < live_rows
    rows = block.to(tl.int64) * BLOCK_M + m
    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0)
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=row_mask, other=-1)
    slots = tl.where(slots < num_slots, slots, -1)
    segments = tl.arange(0, SLOTS)
    found = tl.zeros([SLOTS], tl.int32) - 1
    place = tl.zeros([ROWS], tl.int32) - 1
    count = 0
    slot = tl.min(tl.where(slots >= 0, slots, 2147483647), 0)
    while slot < 2147483647:
        place = tl.where(slots == slot, count, place)
        found = tl.where(segments == count, slot, found)
        count += 1
        slot = tl.min(tl.where(slots > slot, slots, 2147483647), 0)
    tl.store(row_segment_ptr + rows, place, mask=m < BLOCK_M)
    padding = tl.arange(0, 4)
    for part in tl.static_range(2):
        rank = tl.zeros([SLOTS], tl.int32)
        for side in tl.static_range(part * (PROJECTIONS - 1), PROJECTIONS - 1 + part):
            _, _, side_rank, _ = load_factor(
                records_ptr, records_i32_ptr, map_ptr, found.to(tl.int64), side, expert,
                slot_stride, map_stride, num_slots, 1, UNIT,
            )  # fmt: skip
            rank = tl.maximum(rank, side_rank)
        numbers = (rank + 15) // 16
        starts = tl.cumsum(numbers, 0) - numbers
        total = tl.sum(numbers, 0)
        tl.store(counts_ptr + part * num_blocks + block, total)
        tl.store(counts_ptr + (2 + part) * num_blocks + block, 0)
        for side in tl.static_range(part * (PROJECTIONS - 1), PROJECTIONS - 1 + part):
            at = (side * num_blocks + block).to(tl.int64) * max_groups * 4
            for word in tl.static_range(2):
                groups_ptr = (a_groups_ptr if word == 0 else b_groups_ptr) + at
                _store_groups(
                    groups_ptr, starts, numbers, segments, found, records_ptr, records_i32_ptr,
                    map_ptr, expert, slot_stride, map_stride, num_slots, side, word, UNIT,
                )  # fmt: skip
                rest = total + padding
                is_padding = rest < (total + 3) // 4 * 4
                nothing = tl.zeros([4], tl.int64)
                for w in tl.static_range(3):
                    tl.store(groups_ptr + rest * 4 + w, nothing, mask=is_padding)
                tl.store(groups_ptr + rest * 4 + 3, nothing + 0x7FFFFFFF, mask=is_padding)


@dataclass(frozen=True)
class BlockGroups:
    """The segments and groups of each block of rows; see the top of the file.

    Attributes:
        row_segment: int32 ``[blocks * BLOCK_M]``, -1 for a row without a slot.
        counts: int32 ``[2, blocks]``, groups of gate and up, and of down.
        ready: int32 ``[2, blocks]``, 0: for a shrink to say that S of a block is written.
        a_groups, b_groups: int64 ``[projections, blocks, max_groups, 4]``.
    """

    table: SiteTable
    row_segment: torch.Tensor
    counts: torch.Tensor
    ready: torch.Tensor
    a_groups: torch.Tensor
    b_groups: torch.Tensor

    @property
    def unit(self) -> int:
        """Elements of the arena per unit of offsets."""
        return UNIT_BYTES // self.table.arena.data.element_size()

    @property
    def max_groups(self) -> int:
        """Groups of a block that there is room for."""
        return self.b_groups.shape[2]

    @property
    def rank_rows(self) -> int:
        """The largest rank, in whole groups."""
        return triton.cdiv(self.table.max_rank, GROUP_RANKS) * GROUP_RANKS


def run_block_groups(
    table: SiteTable, slots: torch.Tensor, rows: Rows, top_k: int, block_m: int,
    options: dict[str, Any] | None = None,
) -> BlockGroups:  # fmt: skip
    """Find each block's segments and groups; with the launch's options."""
    projections, device = table.records.shape[1], slots.device
    max_groups = most_groups(table, block_m)
    shape = (projections, rows.num_blocks, max_groups, WORDS)
    counts = torch.empty(4, rows.num_blocks, dtype=torch.int32, device=device)
    found = BlockGroups(
        table,
        torch.empty(rows.num_blocks * block_m, dtype=torch.int32, device=device),
        counts[:2],
        counts[2:],
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )
    assert table.expert_map is not None
    listed(block_groups_kernel)[(rows.num_blocks,)](
        rows.row_pair, rows.block_info, slots, table.records, table.records.view(torch.int32),
        table.expert_map, found.row_segment, counts, found.a_groups, found.b_groups,
        table.records.stride(0), table.expert_map.stride(0), table.num_slots, rows.num_blocks,
        max_groups, TOP_K=top_k, PROJECTIONS=projections, UNIT=found.unit, BLOCK_M=block_m,
        ROWS=triton.next_power_of_2(block_m),
        SLOTS=triton.next_power_of_2(min(table.num_slots, block_m)), num_warps=1,
        **(options or {"PDL": False}),
    )  # fmt: skip
    return found


class GemmOperands(NamedTuple):
    """What a GEMM needs of the groups, in the order of its arguments.

    Attributes:
        tensors: segments of rows, counts, groups of B as int64 and as int32, and the arena.
        numbers: rank rows of a side of S, ``max_groups``, and elements between two projections'
            groups.
        unit: elements of the arena per unit of offsets.
    """

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, int, int]
    unit: int


def gemm_operands(groups: BlockGroups | None, rows: Rows, down: bool) -> GemmOperands:
    """Return a GEMM's operands; without groups what stands in their place."""
    if groups is None:
        return GemmOperands((rows.row_pair,) * 5, (GROUP_RANKS, STEP_GROUPS, STEP_GROUPS), 8)
    b_groups = groups.b_groups[groups.b_groups.shape[0] - 1 if down else 0 :]
    tensors = (
        groups.row_segment, groups.counts[int(down)], b_groups, b_groups.view(torch.int32),
        groups.table.arena.data,
    )  # fmt: skip
    numbers = (groups.rank_rows, groups.max_groups, groups.b_groups.stride(0))
    return GemmOperands(tensors, numbers, groups.unit)
