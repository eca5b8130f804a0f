"""The run down + lora_expand + routing weight for many rows; see :mod:`.gate_up`."""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.prefill.group_factors import add_rest, add_step, load_step


@triton.jit
def _tile(
    h_ptr, weight_desc, bias_ptr, topk_weights_ptr, y_ptr, s_ptr, row_pair_ptr, row_segment_ptr,
    counts_ptr, groups_ptr, groups_i32_ptr, arena_ptr, block, tile, expert, live_rows,
    intermediate, hidden, bias_stride, side_stride, max_groups, HAS_BIAS: tl.constexpr,
    LORA: tl.constexpr, EVEN_K: tl.constexpr, UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    row_mask = m < live_rows
    rows = block.to(tl.int64) * BLOCK_ROWS + m
    k = tl.arange(0, BLOCK_K)
    h_ptrs = h_ptr + rows[:, None] * intermediate + k[None, :]
    first = expert * hidden + tile * BLOCK_N
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < hidden
    if LORA:
        # Of the first groups: asked for ahead of the K loop, so that they are there behind it.
        count = tl.load(counts_ptr + block)
        row_segment = tl.load(row_segment_ptr + rows, mask=row_mask, other=-1)
        s_ptrs = s_ptr + rows[:, None] * side_stride
        at = block.to(tl.int64) * (max_groups * 4)
        s, b, segment = load_step(
            s_ptrs, arena_ptr, groups_ptr + at, groups_i32_ptr + at * 2, row_segment, count,
            columns, column_mask, UNIT,
        )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, intermediate, BLOCK_K):
        mask = row_mask[:, None]
        if not EVEN_K:
            mask = mask & (k0 + k < intermediate)[None, :]
        h = tl.load(h_ptrs, mask=mask, other=0.0)
        w = weight_desc.load([first, k0])
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
        h_ptrs += BLOCK_K
    if LORA:
        if count > 0:
            acc = add_step(acc, s, b, segment, row_segment)
        acc = add_rest(
            acc, s_ptrs, arena_ptr, groups_ptr + at, groups_i32_ptr + at * 2, row_segment, count,
            columns, column_mask, UNIT,
        )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * bias_stride + columns, mask=column_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0)
    weight = tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0).to(tl.float32)
    y = (acc * weight[:, None]).to(y_ptr.dtype.element_ty)
    y_ptrs = y_ptr + rows[:, None] * hidden + columns[None, :]
    tl.store(y_ptrs, y, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_tiles", "max_groups"])
def prefill_down_kernel(
    h_ptr,  # [rows, I]
    weight_desc,  # [E * H, I], tiles of [BLOCK_N, BLOCK_K]
    bias_ptr,  # [E, H] or unused
    topk_weights_ptr,  # [P]
    y_ptr,  # [rows, H] out, weighted
    s_ptr,  # [rows, side_stride], or unused
    row_pair_ptr,
    block_info_ptr,
    row_segment_ptr,  # this and the next three: see block_groups
    counts_ptr,
    groups_ptr,
    groups_i32_ptr,
    arena_ptr,
    intermediate,
    hidden,
    bias_stride,
    num_tiles,
    side_stride,
    max_groups,
    HAS_BIAS: tl.constexpr,
    LORA: tl.constexpr,
    EVEN_K: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """See the top of the file."""
    block = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    info = tl.load(block_info_ptr + block)
    live_rows = info % 256
    if live_rows == 0:
        return
    expert = info // 256
    if live_rows <= TAIL_M:
        _tile(
            h_ptr, weight_desc, bias_ptr, topk_weights_ptr, y_ptr, s_ptr, row_pair_ptr,
            row_segment_ptr, counts_ptr, groups_ptr, groups_i32_ptr, arena_ptr, block, tile,
            expert, live_rows, intermediate, hidden, bias_stride, side_stride, max_groups,
            HAS_BIAS, LORA, EVEN_K, UNIT, BLOCK_M, TAIL_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _tile(
            h_ptr, weight_desc, bias_ptr, topk_weights_ptr, y_ptr, s_ptr, row_pair_ptr,
            row_segment_ptr, counts_ptr, groups_ptr, groups_i32_ptr, arena_ptr, block, tile,
            expert, live_rows, intermediate, hidden, bias_stride, side_stride, max_groups,
            HAS_BIAS, LORA, EVEN_K, UNIT, BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
