"""Device code of prefill: what the segments of a block add to the accumulator of a GEMM.

As more steps of the product: ``S B``, where rows of other segments meet B with zeros, which adds
nothing. So that this holds for any B, its values that are not finite are left out of the product,
and make the segment's rows of the tile NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.segment_factors import load_factor


@triton.jit
def load_fast(
    s_ptrs, arena_ptr, places_ptr, row_segment, columns, column_mask, max_rank,
    UNIT: tl.constexpr, FAST: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return S ``[M, FAST * BLOCK_R]`` and B ``[FAST * BLOCK_R, N]`` of the first segments.

    S is 0 past a segment's live rank, so its mask is the same for runs of ranks: wide loads.
    """
    j = tl.arange(0, FAST * BLOCK_R)
    segment = j // BLOCK_R
    r = j % BLOCK_R
    words = places_ptr + segment * 4
    offset = tl.multiple_of(tl.load(words), UNIT)
    stride = tl.multiple_of(tl.load(words + 1), UNIT)
    rank = tl.load(words + 2)
    is_rank = r < rank
    mask = (row_segment[:, None] == segment[None, :]) & ((rank > 0) & (r < max_rank))[None, :]
    s = tl.load(s_ptrs + r[None, :], mask=mask, other=0.0)
    b_ptrs = arena_ptr + (offset + r * stride)[:, None] + columns[None, :]
    b = tl.load(b_ptrs, mask=is_rank[:, None] & column_mask[None, :], other=0.0)
    return s, b


@triton.jit
def add_fast(acc, s, b, row_segment, FAST: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return ``acc`` with ``S B`` of :func:`load_fast` added."""
    b = b.to(s.dtype)
    is_finite = (b - b) == 0
    acc = tl.dot(s, tl.where(is_finite, b, 0.0), acc, input_precision="ieee")
    broken = tl.max(tl.where(is_finite, 0, 1), 1)
    if tl.max(broken, 0) > 0:
        segment = tl.arange(0, FAST * BLOCK_R) // BLOCK_R
        mine = row_segment[:, None] == segment[None, :]
        rows = tl.max(tl.where(mine, broken[None, :], 0), 1) > 0
        acc = tl.where(rows[:, None], float("nan"), acc)
    return acc


@triton.jit
def add_slow(
    acc, s_ptrs, arena_ptr, records_ptr, records_i32_ptr, map_ptr, slot, side, expert, slot_stride,
    map_stride, num_slots, rows, columns, column_mask, UNIT: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` with ``S B`` of one slot's ``rows`` added, of any rank."""
    b_offset, stride, rank, _ = load_factor(
        records_ptr, records_i32_ptr, map_ptr, slot, side, expert, slot_stride, map_stride,
        num_slots, 1, UNIT,
    )  # fmt: skip
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        r_mask = r < rank
        s = tl.load(s_ptrs + r[None, :], mask=rows[:, None] & r_mask[None, :], other=0.0)
        b_ptrs = arena_ptr + b_offset + r[:, None] * stride + columns[None, :]
        b = tl.load(b_ptrs, mask=r_mask[:, None] & column_mask[None, :], other=0.0)
        b = b.to(s.dtype)
        is_finite = (b - b) == 0
        acc = tl.dot(s, tl.where(is_finite, b, 0.0), acc, input_precision="ieee")
        if tl.max(tl.max(tl.where(is_finite, 0, 1), 1), 0) > 0:
            acc = tl.where(rows[:, None], float("nan"), acc)
    return acc
