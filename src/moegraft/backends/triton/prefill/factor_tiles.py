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
def places(group_i32_ptr):
    """Return the segment and the rank row of each column of S ``[128, 64]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    words = group_i32_ptr + j // 16 * 8 + 6
    segment = gl.max_constancy(gl.load(words), 16)
    r0 = gl.max_constancy(gl.multiple_of(gl.load(words + 1), 16), 16)
    return segment, r0


@gluon.jit
def copy_s(s_ptr, s_stride, row_segment, segment, r0, a_tile):
    """Start to copy S of four groups to shared memory; 0 for rows of other segments."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    mine = row_segment[:, None] == segment[None, :]
    async_copy.async_copy_global_to_shared(
        a_tile, s_ptr + (m * s_stride)[:, None] + (r0 + j % 16)[None, :], mask=mine
    )


@gluon.jit
def _group_words(words):
    """Return a group's offset, elements between rank rows, and live rows."""
    offset = gl.multiple_of(gl.load(words), 8)
    stride = gl.multiple_of(gl.load(words + 1).to(gl.int32), 8)
    return offset, stride, gl.load(words + 2).to(gl.int32)


@gluon.jit
def b_words(group_ptr):
    """Return where B of four groups lies."""
    return (
        _group_words(group_ptr), _group_words(group_ptr + 4), _group_words(group_ptr + 8),
        _group_words(group_ptr + 12),
    )  # fmt: skip


@gluon.jit
def _load_group(arena_ptr, words, columns_left):
    """Return B of one group, ``[16, 128]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    mask = (r < words[2])[:, None] & (n < columns_left)[None, :]
    b_ptrs = arena_ptr + words[0] + (r * words[1])[:, None] + n[None, :]
    return gl.load(b_ptrs, mask=mask, other=0.0)


@gluon.jit
def load_b(arena_ptr, words, columns_left):
    """Return B of four groups, each ``[16, 128]``."""
    b0 = _load_group(arena_ptr, words[0], columns_left)
    b1 = _load_group(arena_ptr, words[1], columns_left)
    b2 = _load_group(arena_ptr, words[2], columns_left)
    b3 = _load_group(arena_ptr, words[3], columns_left)
    return b0, b1, b2, b3


@gluon.jit
def _broken(b, INF: gl.constexpr):
    """Return 1 where a value is not finite, else 0."""
    return ((b.to(gl.int16, bitcast=True) & INF) == INF).to(gl.int32)


@gluon.jit
def not_finite(b):
    """Return NaN where any of four groups has a value that is not finite, else 0, ``[16, 128]``."""
    zeros = b[0].to(gl.float32) * 0.0
    zeros += b[1].to(gl.float32) * 0.0
    zeros += b[2].to(gl.float32) * 0.0
    return zeros + b[3].to(gl.float32) * 0.0


@gluon.jit
def store_b(b, b_tile):
    """Write :func:`load_b`'s to shared memory."""
    b_tile.slice(0, 16).store(b[0])
    b_tile.slice(16, 16).store(b[1])
    b_tile.slice(32, 16).store(b[2])
    b_tile.slice(48, 16).store(b[3])


@gluon.jit
def mend(row_segment, segment, a_tile, b_tile, flags, INF: gl.constexpr):
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
        broken = _broken(b, INF)
        flags.slice(group * 16, 16).store(gl.max(broken, 1))
        part.store(gl.where(broken > 0, 0.0, b.to(gl.float32)).to(b_tile.dtype))
    gl.thread_barrier()
    columns = flags.load(gl.SliceLayout(0, s_layout)) > 0
    mine = row_segment[:, None] == segment[None, :]
    s = a_tile.load(s_layout)
    s = gl.where(mine & columns[None, :], float("nan"), s.to(gl.float32)).to(a_tile.dtype)
    gl.thread_barrier()
    a_tile.store(s)
