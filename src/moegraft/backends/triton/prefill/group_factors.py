"""Device code of the portable GEMMs: what the groups of a block add to an accumulator.

As more steps of the product: ``S B`` of four groups, where rows of other segments meet B with
zeros, which adds nothing. So that this holds for any B, its values that are not finite are left out
of the product, and make the segment's rows of the tile NaN. :mod:`.block_groups` has the words of a
group.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Groups of a step, and ranks of a group.
STEP_GROUPS = tl.constexpr(4)
GROUP_RANKS = tl.constexpr(16)


@triton.jit
def load_step(
    s_ptrs, arena_ptr, groups_ptr, groups_i32_ptr, row_segment, count, columns, column_mask,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Return S ``[M, 64]``, B ``[64, N]`` and each column's segment ``[64]``, of four groups.

    Nothing, if ``count`` is 0: then there are no groups to read.
    """
    j = tl.arange(0, STEP_GROUPS * GROUP_RANKS)
    r = j % GROUP_RANKS
    words = groups_ptr + j // GROUP_RANKS * 4
    offset = tl.multiple_of(tl.load(words), UNIT)
    stride = tl.multiple_of(tl.load(words + 1), UNIT)
    live = tl.load(words + 2)
    words_i32 = groups_i32_ptr + j // GROUP_RANKS * 8 + 6
    segment = tl.max_constancy(tl.load(words_i32), 16)
    r0 = tl.max_constancy(tl.multiple_of(tl.load(words_i32 + 1), 16), 16)
    mine = (row_segment[:, None] == segment[None, :]) & (count > 0)
    s = tl.load(s_ptrs + (r0 + r)[None, :], mask=mine, other=0.0)
    b_ptrs = arena_ptr + (offset + r * stride)[:, None] + columns[None, :]
    b_mask = ((r < live) & (count > 0))[:, None] & column_mask[None, :]
    return s, tl.load(b_ptrs, mask=b_mask, other=0.0), segment


@triton.jit
def add_step(acc, s, b, segment, row_segment):
    """Return ``acc`` with ``S B`` of :func:`load_step` added."""
    b = b.to(s.dtype)
    is_finite = (b - b) == 0
    acc = tl.dot(s, tl.where(is_finite, b, 0.0), acc, input_precision="ieee")
    broken = tl.max(tl.where(is_finite, 0, 1), 1)
    if tl.max(broken, 0) > 0:
        mine = row_segment[:, None] == segment[None, :]
        rows = tl.max(tl.where(mine, broken[None, :], 0), 1) > 0
        acc = tl.where(rows[:, None], float("nan"), acc)
    return acc


@triton.jit
def add_rest(
    acc, s_ptrs, arena_ptr, groups_ptr, groups_i32_ptr, row_segment, count, columns, column_mask,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` with ``S B`` of all groups behind the first four added."""
    for group in range(STEP_GROUPS, count, STEP_GROUPS):
        s, b, segment = load_step(
            s_ptrs, arena_ptr, groups_ptr + group * 4, groups_i32_ptr + group * 8, row_segment,
            count, columns, column_mask, UNIT,
        )  # fmt: skip
        acc = add_step(acc, s, b, segment, row_segment)
    return acc
