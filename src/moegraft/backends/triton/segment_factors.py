"""Device code that reads a segment and where its slot's factors lie in the arena."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_segment(segments_ptr, pair):
    """Return (first row, row behind the last, slot, local expert) of an entry of ``segments``.

    The first row is -1 when the entry opens no segment; see :mod:`.route`.
    """
    words = segments_ptr + pair.to(tl.int64) * 4
    slot = tl.load(words + 2).to(tl.int64)
    return tl.load(words), tl.load(words + 1), slot, tl.load(words + 3)


@triton.jit
def load_factor(
    records_ptr,  # [S, projections, 8] int64, from the projection in question on
    records_i32_ptr,  # the same as int32
    map_ptr,  # [S, E] int32
    slot,
    side,  # which projection
    expert,
    slot_stride,
    map_stride,
    num_slots,
    WORD: tl.constexpr,  # 0 for A, 1 for B
    UNIT: tl.constexpr,
):
    """Return (offset from the arena, elements between rank rows, live rank, scale).

    The rank is 0 where the slot has no factors for this projection and expert.
    """
    is_slot = (slot >= 0) & (slot < num_slots)
    record = records_ptr + slot * slot_stride + side * 8
    record_i32 = records_i32_ptr + (slot * slot_stride + side * 8) * 2
    entry = tl.load(map_ptr + slot * map_stride + expert, mask=is_slot, other=-1).to(tl.int64)
    rank = tl.load(record_i32 + 12, mask=is_slot, other=0)
    scale = tl.load(record_i32 + 14, mask=is_slot, other=0).to(tl.float32, bitcast=True)
    offset = tl.load(record + WORD, mask=is_slot, other=0) * UNIT
    expert_stride = tl.load(record + WORD + 2, mask=is_slot, other=0)
    row_stride = tl.load(record + WORD + 4, mask=is_slot, other=0)
    offset = tl.multiple_of(offset + entry * expert_stride, UNIT)
    return offset, tl.multiple_of(row_stride, UNIT), tl.where(entry >= 0, rank, 0), scale
