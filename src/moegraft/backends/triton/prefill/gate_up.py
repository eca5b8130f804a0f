"""The run gate_up + lora_expand + activation for many rows, weights by tensor map.

One program per block of rows of one expert and tile of columns. After the K loop it adds ``S B``
of its segments, as one more step of the product. Blocks with few rows take a tile of half the
height.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.activation import gated, pointwise
from moegraft.backends.triton.prefill.group_factors import add_rest, add_step, load_step


@triton.jit
def _tile(
    x_ptr, weight_desc, bias_ptr, h_ptr, s_ptr, row_pair_ptr, row_segment_ptr, counts_ptr,
    groups_ptr, groups_i32_ptr, arena_ptr, block, tile, expert, live_rows, hidden, intermediate,
    x_stride, bias_stride, side_stride, max_groups, group_stride, TOP_K: tl.constexpr,
    GATE_START: tl.constexpr, UP_START: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, LORA: tl.constexpr, EVEN_K: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    row_mask = m < live_rows
    rows = block.to(tl.int64) * BLOCK_ROWS + m
    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0)
    tokens = (pairs // TOP_K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tokens[:, None] * x_stride + k[None, :]
    sides: tl.constexpr = 2 if GATED else 1
    first = expert * (sides * intermediate) + tile * BLOCK_N
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < intermediate
    if LORA:
        # Of the first groups: asked for ahead of the K loop, so that they are there behind it.
        count = tl.load(counts_ptr + block)
        row_segment = tl.load(row_segment_ptr + rows, mask=row_mask, other=-1)
        gate_s_ptrs = s_ptr + rows[:, None] * (sides * side_stride)
        up_s_ptrs = gate_s_ptrs + (sides - 1) * side_stride
        at = block.to(tl.int64) * (max_groups * 4)
        up_at = at + (sides - 1) * group_stride
        up_s, up_b, segment = load_step(
            up_s_ptrs, arena_ptr, groups_ptr + up_at, groups_i32_ptr + up_at * 2, row_segment,
            count, columns, column_mask, UNIT,
        )  # fmt: skip
        if GATED:
            gate_s, gate_b, _ = load_step(
                gate_s_ptrs, arena_ptr, groups_ptr + at, groups_i32_ptr + at * 2, row_segment,
                count, columns, column_mask, UNIT,
            )  # fmt: skip
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        mask = row_mask[:, None]
        if not EVEN_K:
            mask = mask & (k0 + k < hidden)[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0)
        w_up = weight_desc.load([first + UP_START, k0])
        up = tl.dot(x, w_up.T, up, input_precision="ieee")
        if GATED:
            w_gate = weight_desc.load([first + GATE_START, k0])
            gate = tl.dot(x, w_gate.T, gate, input_precision="ieee")
        x_ptrs += BLOCK_K
    if LORA:
        if count > 0:
            up = add_step(up, up_s, up_b, segment, row_segment)
            if GATED:
                gate = add_step(gate, gate_s, gate_b, segment, row_segment)
        up = add_rest(
            up, up_s_ptrs, arena_ptr, groups_ptr + up_at, groups_i32_ptr + up_at * 2, row_segment,
            count, columns, column_mask, UNIT,
        )  # fmt: skip
        if GATED:
            gate = add_rest(
                gate, gate_s_ptrs, arena_ptr, groups_ptr + at, groups_i32_ptr + at * 2,
                row_segment, count, columns, column_mask, UNIT,
            )  # fmt: skip
    if HAS_BIAS:
        bias = bias_ptr + expert * bias_stride
        up += tl.load(bias + UP_START + columns, mask=column_mask, other=0.0).to(tl.float32)[
            None, :
        ]
        if GATED:
            more = tl.load(bias + GATE_START + columns, mask=column_mask, other=0.0)
            gate += more.to(tl.float32)[None, :]
    if GATED:
        h = gated(gate, up, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
    else:
        h = pointwise(up, KIND, ALPHA)
    h_ptrs = h_ptr + rows[:, None] * intermediate + columns[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_tiles", "max_groups", "group_stride"])
def prefill_gate_up_kernel(
    x_ptr,  # [T, H]
    weight_desc,  # [E * 2I, H], tiles of [BLOCK_N, BLOCK_K]
    bias_ptr,  # [E, 2I] or unused
    h_ptr,  # [rows, I] out
    s_ptr,  # [rows, sides * side_stride], or unused
    row_pair_ptr,
    block_info_ptr,
    row_segment_ptr,  # this and the next three: see block_groups
    counts_ptr,
    groups_ptr,
    groups_i32_ptr,
    arena_ptr,
    hidden,
    intermediate,
    x_stride,
    bias_stride,
    num_tiles,
    side_stride,
    max_groups,
    group_stride,
    TOP_K: tl.constexpr,
    GATE_START: tl.constexpr,
    UP_START: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
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
            x_ptr, weight_desc, bias_ptr, h_ptr, s_ptr, row_pair_ptr, row_segment_ptr, counts_ptr,
            groups_ptr, groups_i32_ptr, arena_ptr, block, tile, expert, live_rows, hidden,
            intermediate, x_stride, bias_stride, side_stride, max_groups, group_stride, TOP_K,
            GATE_START, UP_START, GATED, HAS_BIAS, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT, LORA,
            EVEN_K, UNIT, BLOCK_M, TAIL_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _tile(
            x_ptr, weight_desc, bias_ptr, h_ptr, s_ptr, row_pair_ptr, row_segment_ptr, counts_ptr,
            groups_ptr, groups_i32_ptr, arena_ptr, block, tile, expert, live_rows, hidden,
            intermediate, x_stride, bias_stride, side_stride, max_groups, group_stride, TOP_K,
            GATE_START, UP_START, GATED, HAS_BIAS, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT, LORA,
            EVEN_K, UNIT, BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
