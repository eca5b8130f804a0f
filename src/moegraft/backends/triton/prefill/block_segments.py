"""Which slots a block of rows holds, for the prefill kernels: once per layer, in one launch.

Per block: its distinct slots in order, and where the ``B`` of the first few lie, so that a GEMM has
their addresses with its first loads and asks for the factors ahead of its K loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.config import block_r
from moegraft.backends.triton.prefill.route import Rows
from moegraft.backends.triton.segment_factors import load_factor
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES

#: Columns of S that a GEMM asks for ahead of its K loop: segments times rank rows.
K_EXTRA = 64
#: Words of an entry of ``places``: offset in the arena, elements between rank rows, live rank.
PLACE_WORDS = 4


@triton.jit(do_not_specialize=["map_stride", "num_slots"])
def block_segments_kernel(
    row_pair_ptr,  # [rows]
    block_info_ptr,  # [blocks]
    slots_ptr,  # [T] int32
    records_ptr,  # [S, projections, 8] int64
    records_i32_ptr,
    map_ptr,
    row_segment_ptr,  # [rows] int32 out: which of its block's segments a row is in, -1 none
    block_slots_ptr,  # [blocks, BLOCK_M] int32 out: slot of each segment
    block_count_ptr,  # [blocks] int32 out: segments
    places_ptr,  # [blocks, PROJECTIONS, FAST, 4] int64 out
    slot_stride,
    map_stride,
    num_slots,
    TOP_K: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    FAST: tl.constexpr,  # segments whose B's place is written
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """See the top of the file."""
    block = tl.program_id(0)
    info = tl.load(block_info_ptr + block)
    live_rows = info % 256
    if live_rows == 0:
        return
    expert = info // 256
    m = tl.arange(0, BLOCK_M)
    row_mask = m < live_rows
    rows = block.to(tl.int64) * BLOCK_M + m
    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0)
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=row_mask, other=-1)
    slots = tl.where(slots < num_slots, slots, -1)
    place = tl.zeros([BLOCK_M], tl.int32) - 1
    count = 0
    slot = tl.min(tl.where(slots >= 0, slots, 2147483647), 0)
    while slot < 2147483647:
        place = tl.where(slots == slot, count, place)
        tl.store(block_slots_ptr + block * BLOCK_M + count, slot)
        if count < FAST:
            for side in tl.static_range(PROJECTIONS):
                offset, stride, rank, _ = load_factor(
                    records_ptr, records_i32_ptr, map_ptr, slot.to(tl.int64), side, expert,
                    slot_stride, map_stride, num_slots, 1, UNIT,
                )  # fmt: skip
                words = places_ptr + ((block * PROJECTIONS + side) * FAST + count) * 4
                tl.store(words, offset)
                tl.store(words + 1, stride)
                tl.store(words + 2, rank.to(tl.int64))
        count += 1
        slot = tl.min(tl.where(slots > slot, slots, 2147483647), 0)
    for rest in range(count, FAST):
        for side in tl.static_range(PROJECTIONS):
            words = places_ptr + ((block * PROJECTIONS + side) * FAST + rest) * 4
            tl.store(words, tl.zeros([], tl.int64))
            tl.store(words + 1, tl.zeros([], tl.int64))
            tl.store(words + 2, tl.zeros([], tl.int64))
    tl.store(row_segment_ptr + rows, place, mask=row_mask)
    tl.store(block_count_ptr + block, count)


@dataclass(frozen=True)
class BlockSegments:
    """The slots of each block of rows; see the top of the file."""

    table: SiteTable
    row_segment: torch.Tensor
    block_slots: torch.Tensor
    block_count: torch.Tensor
    places: torch.Tensor
    fast: int

    @property
    def unit(self) -> int:
        """Elements of the arena per unit of offsets."""
        return UNIT_BYTES // self.table.arena.data.element_size()


def run_block_segments(
    table: SiteTable, slots: torch.Tensor, rows: Rows, top_k: int, block_m: int
) -> BlockSegments:
    """Find each block's segments."""
    rank_rows, projections = block_r(table.max_rank), table.records.shape[1]
    fast = K_EXTRA // rank_rows if table.max_rank <= rank_rows else 0
    device = slots.device

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    found = BlockSegments(
        table, ints(rows.num_blocks * block_m), ints(rows.num_blocks, block_m),
        ints(rows.num_blocks),
        torch.empty(
            rows.num_blocks, projections, max(fast, 1), PLACE_WORDS, dtype=torch.int64,
            device=device,
        ),
        fast,
    )  # fmt: skip
    assert table.expert_map is not None
    block_segments_kernel[(rows.num_blocks,)](
        rows.row_pair, rows.block_info, slots, table.records, table.records.view(torch.int32),
        table.expert_map, found.row_segment, found.block_slots, found.block_count, found.places,
        table.records.stride(0), table.expert_map.stride(0), table.num_slots,
        TOP_K=top_k, PROJECTIONS=projections, FAST=fast, UNIT=found.unit, BLOCK_M=block_m,
        num_warps=1,
    )  # fmt: skip
    return found
