"""The run gate_up + lora_expand + activation for many rows, weights by tensor map.

One program per block of rows of one expert and tile of columns. After the K loop it adds ``S B``
of its segments, as one more step of the product. Blocks with few rows take a tile of half the
height.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.activation import gated, pointwise
from moegraft.backends.triton.prefill.slot_factors import add_fast, add_slow, load_fast


@triton.jit
def _tile(
    x_ptr, weight_desc, bias_ptr, h_ptr, s_ptr, row_pair_ptr, row_segment_ptr, block_slots_ptr,
    block_count_ptr, places_ptr, arena_ptr, records_ptr, records_i32_ptr, map_ptr, block, tile,
    expert, live_rows, hidden, intermediate, x_stride, bias_stride, max_rank, slot_stride,
    map_stride, num_slots, TOP_K: tl.constexpr, GATE_START: tl.constexpr, UP_START: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, LORA: tl.constexpr,
    EVEN_K: tl.constexpr, UNIT: tl.constexpr, PROJECTIONS: tl.constexpr, FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    row_mask = m < live_rows
    pairs = tl.load(row_pair_ptr + block.to(tl.int64) * BLOCK_ROWS + m, mask=row_mask, other=0)
    tokens = (pairs // TOP_K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tokens[:, None] * x_stride + k[None, :]
    sides: tl.constexpr = 2 if GATED else 1
    first = expert * (sides * intermediate) + tile * BLOCK_N
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < intermediate
    if LORA:
        # Asked for ahead of the K loop, so that they are there behind it.
        count = tl.load(block_count_ptr + block)
        row_segment = tl.load(
            row_segment_ptr + block.to(tl.int64) * BLOCK_ROWS + m, mask=row_mask, other=-1
        )
        s_ptrs = s_ptr + pairs.to(tl.int64)[:, None] * (sides * max_rank)
        if FAST > 0:
            places = places_ptr + block * (PROJECTIONS * FAST * 4)
            up_s, up_b = load_fast(
                s_ptrs + (sides - 1) * max_rank, arena_ptr, places + (sides - 1) * FAST * 4,
                row_segment, columns, column_mask, max_rank, UNIT, FAST, BLOCK_R,
            )  # fmt: skip
            if GATED:
                gate_s, gate_b = load_fast(
                    s_ptrs,
                    arena_ptr,
                    places,
                    row_segment,
                    columns,
                    column_mask,
                    max_rank,
                    UNIT,
                    FAST,
                    BLOCK_R,
                )
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
        if FAST > 0:
            if count > 0:
                up = add_fast(up, up_s, up_b, row_segment, FAST, BLOCK_R)
                if GATED:
                    gate = add_fast(gate, gate_s, gate_b, row_segment, FAST, BLOCK_R)
        for segment in range(FAST, count):
            slot = tl.load(block_slots_ptr + block * BLOCK_ROWS + segment).to(tl.int64)
            rows = row_segment == segment
            up = add_slow(
                up, s_ptrs + (sides - 1) * max_rank, arena_ptr, records_ptr, records_i32_ptr,
                map_ptr, slot, sides - 1, expert, slot_stride, map_stride, num_slots, rows, columns,
                column_mask, UNIT, BLOCK_R,
            )  # fmt: skip
            if GATED:
                gate = add_slow(
                    gate, s_ptrs, arena_ptr, records_ptr, records_i32_ptr, map_ptr, slot, 0, expert,
                    slot_stride, map_stride, num_slots, rows, columns, column_mask, UNIT, BLOCK_R,
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
    h_ptrs = h_ptr + pairs.to(tl.int64)[:, None] * intermediate + columns[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_tiles", "map_stride", "num_slots"])
def prefill_gate_up_kernel(
    x_ptr,  # [T, H]
    weight_desc,  # [E * 2I, H], tiles of [BLOCK_N, BLOCK_K]
    bias_ptr,  # [E, 2I] or unused
    h_ptr,  # [P, I] out
    s_ptr,  # [P, 2 * max_rank], or unused
    row_pair_ptr,
    block_info_ptr,
    row_segment_ptr,  # this and the next three: see block_segments
    block_slots_ptr,
    block_count_ptr,
    places_ptr,
    arena_ptr,
    records_ptr,
    records_i32_ptr,
    map_ptr,
    hidden,
    intermediate,
    x_stride,
    bias_stride,
    num_tiles,
    max_rank,
    slot_stride,
    map_stride,
    num_slots,
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
    PROJECTIONS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
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
            x_ptr, weight_desc, bias_ptr, h_ptr, s_ptr, row_pair_ptr, row_segment_ptr,
            block_slots_ptr, block_count_ptr, places_ptr, arena_ptr, records_ptr, records_i32_ptr,
            map_ptr, block, tile, expert, live_rows, hidden, intermediate, x_stride, bias_stride,
            max_rank, slot_stride, map_stride, num_slots, TOP_K, GATE_START, UP_START, GATED,
            HAS_BIAS, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT, LORA, EVEN_K, UNIT, PROJECTIONS,
            FAST, BLOCK_M, TAIL_M, BLOCK_N, BLOCK_K, BLOCK_R,
        )  # fmt: skip
    else:
        _tile(
            x_ptr, weight_desc, bias_ptr, h_ptr, s_ptr, row_pair_ptr, row_segment_ptr,
            block_slots_ptr, block_count_ptr, places_ptr, arena_ptr, records_ptr, records_i32_ptr,
            map_ptr, block, tile, expert, live_rows, hidden, intermediate, x_stride, bias_stride,
            max_rank, slot_stride, map_stride, num_slots, TOP_K, GATE_START, UP_START, GATED,
            HAS_BIAS, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT, LORA, EVEN_K, UNIT, PROJECTIONS,
            FAST, BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
        )  # fmt: skip
