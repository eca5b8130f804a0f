"""Device code of the Hopper GEMM: operands of ``S B``, put together from groups of rank rows.

A *group* is up to 16 rank rows of one segment of a block of rows; four groups make a step of the
product, S ``[128, 64]`` times B ``[64, 128]``. A row has S where the group is of its own segment,
and 0 elsewhere. See :mod:`.block_groups` for the words of a group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy


@gluon.jit
def _places(row_segment, group_i32_ptr):
    """Return for each value of S ``[128, 64]`` if it is its row's own, and its rank row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    words = group_i32_ptr + j // 16 * 8 + 6
    segment = gl.max_constancy(gl.load(words), 16)
    r0 = gl.max_constancy(gl.multiple_of(gl.load(words + 1), 16), 16)
    return row_segment[:, None] == segment[None, :], r0 + j % 16


@gluon.jit
def copy_s(s_ptr, s_stride, row_segment, group_i32_ptr, a_tile):
    """Start to copy S of four groups to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mine, r = _places(row_segment, group_i32_ptr)
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    async_copy.async_copy_global_to_shared(
        a_tile, s_ptr + (m * s_stride)[:, None] + r[None, :], mask=mine
    )


@gluon.jit
def store_b(arena_ptr, group_ptr, columns_left, b_tile, INF: gl.constexpr):
    """Write B of four groups to shared memory; return which values are not finite, ``[16, 128]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    broken = gl.zeros([16, 128], gl.int32, layout)
    for group in gl.static_range(4):
        words = group_ptr + group * 4
        offset = gl.multiple_of(gl.load(words), 8)
        stride = gl.multiple_of(gl.load(words + 1).to(gl.int32), 8)
        live = gl.load(words + 2).to(gl.int32)
        mask = (r < live)[:, None] & (n < columns_left)[None, :]
        b = gl.load(arena_ptr + offset + (r * stride)[:, None] + n[None, :], mask=mask, other=0.0)
        broken |= ((b.to(gl.int16, bitcast=True) & INF) == INF).to(gl.int32)
        b_tile.slice(group * 16, 16).store(b)
    return broken


@gluon.jit
def mend(row_segment, group_i32_ptr, a_tile, b_tile, flags, INF: gl.constexpr):
    """Take values that are not finite out of B in shared memory, and give their rows S = NaN.

    A product with 0 would carry them to the other rows of the tile. In small parts: this is rare,
    and must not take registers from what is not.

    Args:
        flags: 64 int32 of shared memory, which rows of B had such values.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    s_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    for group in gl.static_range(4):
        part = b_tile.slice(group * 16, 16)
        b = part.load(layout)
        broken = ((b.to(gl.int16, bitcast=True) & INF) == INF).to(gl.int32)
        flags.slice(group * 16, 16).store(gl.max(broken, 1))
        part.store(gl.where(broken > 0, 0.0, b.to(gl.float32)).to(b_tile.dtype))
    gl.thread_barrier()
    columns = flags.load(gl.SliceLayout(0, s_layout)) > 0
    mine, _ = _places(row_segment, group_i32_ptr)
    s = a_tile.load(s_layout)
    s = gl.where(mine & columns[None, :], float("nan"), s.to(gl.float32)).to(a_tile.dtype)
    gl.thread_barrier()
    a_tile.store(s)
