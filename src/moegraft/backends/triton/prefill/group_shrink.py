"""Stage ``lora_shrink`` for many rows: ``S = scale * A x`` of neighbouring projections.

A few programs per part of a block of rows. One multiplies its rows by the A of a few groups at a
time, of gate and up at once; rows of other segments are not loaded, and their products not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.prefill.block_groups import BlockGroups
from moegraft.backends.triton.prefill.config import GROUP_RANKS, PrefillConfig
from moegraft.backends.triton.prefill.route import Rows

#: Above this rank, more groups at a time are faster.
MANY_RANK_ROWS = 32


@triton.jit(do_not_specialize=["max_groups", "group_stride"])
def group_shrink_kernel(
    x_ptr,  # [T, K] by token, or [rows, K]
    s_ptr,  # [rows, SIDES * rank rows] out, in x's dtype
    arena_ptr,
    row_pair_ptr,
    block_info_ptr,
    row_segment_ptr,  # this and the next three: see block_groups
    counts_ptr,
    a_groups_ptr,
    a_groups_i32_ptr,
    b_groups_i32_ptr,
    size_k,
    x_stride,
    side_stride,
    max_groups,
    group_stride,
    TOP_K: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    SIDES: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows of a block
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PASS: tl.constexpr,  # groups at a time
    SHARES: tl.constexpr,  # programs that share a part's groups
    GROUPS: tl.constexpr,  # a power of two, max_groups at least
):
    """See the top of the file."""
    parts: tl.constexpr = BLOCK_ROWS // BLOCK_M
    block = tl.program_id(0) // (parts * SHARES)
    part = tl.program_id(0) // SHARES % parts
    share = tl.program_id(0) % SHARES
    info = tl.load(block_info_ptr + block)
    live_rows = info % 256 - part * BLOCK_M
    if live_rows <= 0:
        return
    m = tl.arange(0, BLOCK_M)
    row_mask = m < live_rows
    rows = block.to(tl.int64) * BLOCK_ROWS + part * BLOCK_M + m
    row_segment = tl.load(row_segment_ptr + rows, mask=row_mask, other=-1)
    # Rows and groups are sorted by slot, so a part's groups are a run.
    first = tl.min(tl.where(row_segment >= 0, row_segment, 2147483647), 0)
    last = tl.max(row_segment, 0)
    if last < 0:
        return
    count = tl.load(counts_ptr + block)
    block_groups = block.to(tl.int64) * (max_groups * 4)
    every = tl.arange(0, GROUPS)
    owner = tl.load(
        b_groups_i32_ptr + block_groups * 2 + every * 8 + 6, mask=every < count, other=2147483647
    )
    begin = tl.sum((owner < first).to(tl.int32), 0)
    end = tl.sum((owner <= last).to(tl.int32), 0)
    x_rows = rows
    if BY_TOKEN:
        x_rows = (tl.load(row_pair_ptr + rows, mask=row_mask, other=0) // TOP_K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_base = x_ptr + x_rows[:, None] * x_stride + k[None, :]
    q = tl.arange(0, SIDES * PASS * 16)
    side = q // (PASS * 16)
    s_stride = SIDES * side_stride
    for g in range(begin + share * PASS, end, PASS * SHARES):
        group = g + q // 16 % PASS
        is_group = group < end
        at = block_groups + side * group_stride + group * 4
        offset = tl.multiple_of(tl.load(a_groups_ptr + at, mask=is_group, other=0), UNIT)
        stride = tl.multiple_of(tl.load(a_groups_ptr + at + 1, mask=is_group, other=0), UNIT)
        live = tl.load(a_groups_ptr + at + 2, mask=is_group, other=0)
        scale = tl.load(a_groups_i32_ptr + at * 2 + 6, mask=is_group, other=0)
        segment = tl.load(b_groups_i32_ptr + at * 2 + 6, mask=is_group, other=-2)
        r0 = tl.load(b_groups_i32_ptr + at * 2 + 7, mask=is_group, other=0)
        wanted = (row_segment >= tl.min(tl.where(is_group, segment, 2147483647), 0)) & (
            row_segment <= tl.max(segment, 0)
        )
        x_ptrs = x_base
        a_ptrs = arena_ptr + (offset + q % 16 * stride)[:, None] + k[None, :]
        a_live = (q % 16 < live)[:, None]
        s = tl.zeros([BLOCK_M, SIDES * PASS * 16], tl.float32)
        for k0 in range(0, size_k, BLOCK_K):
            x_mask = wanted[:, None]
            a_mask = a_live
            if not EVEN_K:
                x_mask = x_mask & (k0 + k < size_k)[None, :]
                a_mask = a_mask & (k0 + k < size_k)[None, :]
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
            s = tl.dot(x, tl.trans(a).to(x.dtype), s, input_precision="ieee")
            x_ptrs += BLOCK_K
            a_ptrs += BLOCK_K
        s = s * scale.to(tl.float32, bitcast=True)[None, :]
        # Also where the live rank of a group ends: those are 0.
        mask = row_segment[:, None] == segment[None, :]
        columns = side * side_stride + r0 + q % 16
        tl.store(
            s_ptr + rows[:, None] * s_stride + columns[None, :], s.to(s_ptr.dtype.element_ty),
            mask=mask,
        )  # fmt: skip


def run_group_shrink(
    x: torch.Tensor,
    groups: BlockGroups,
    down: bool,
    rows: Rows,
    top_k: int,
    config: PrefillConfig,
) -> torch.Tensor:
    """Return ``S`` ``[rows, sides * rank rows]`` in x's dtype, where a row has groups.

    Args:
        x: ``[T, H]``; for down, h ``[rows, I]``.
        groups: of the layer.
        down: for down, not for gate and up.
        rows: of the layer.
        top_k: choices per token.
        config: tiles.
    """
    projections = groups.a_groups.shape[0]
    sides, tile, at_once = 1 if down else projections - 1, config.shrink, config.shrink_groups
    if groups.rank_rows > MANY_RANK_ROWS:
        tile, at_once = config.wide_shrink, 2 * at_once
    first = projections - 1 if down else 0
    a_groups, b_groups = groups.a_groups[first:], groups.b_groups[first:]
    out = torch.empty(rows.num_rows, sides * groups.rank_rows, dtype=x.dtype, device=x.device)
    shares = config.shrink_shares
    parts = rows.num_blocks * (rows.block_m // tile.block_n)
    listed(group_shrink_kernel)[(parts * shares,)](
        x, out, groups.table.arena.data, rows.row_pair, rows.block_info, groups.row_segment,
        groups.counts[int(down)], a_groups, a_groups.view(torch.int32), b_groups.view(torch.int32),
        x.shape[1], x.stride(0), groups.rank_rows, groups.max_groups, groups.b_groups.stride(0),
        TOP_K=top_k, BY_TOKEN=not down, SIDES=sides, UNIT=groups.unit,
        EVEN_K=x.shape[1] % tile.block_k == 0, BLOCK_ROWS=rows.block_m, BLOCK_M=tile.block_n,
        BLOCK_K=tile.block_k, PASS=at_once // sides, SHARES=shares,
        GROUPS=triton.next_power_of_2(groups.max_groups), num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out


assert GROUP_RANKS == 16, "the kernels say 16"
