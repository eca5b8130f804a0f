"""The run down + lora_expand + routing weight for many rows; see :mod:`.gate_up`."""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.prefill.slot_factors import add_fast, add_slow, load_fast


@triton.jit
def _tile(
    h_ptr, weight_desc, bias_ptr, topk_weights_ptr, y_ptr, s_ptr, row_pair_ptr, row_segment_ptr,
    block_slots_ptr, block_count_ptr, places_ptr, arena_ptr, records_ptr, records_i32_ptr, map_ptr,
    block, tile, expert, live_rows, intermediate, hidden, bias_stride, max_rank, slot_stride,
    map_stride, num_slots, HAS_BIAS: tl.constexpr, LORA: tl.constexpr,
    EVEN_K: tl.constexpr, UNIT: tl.constexpr, PROJECTIONS: tl.constexpr, FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    row_mask = m < live_rows
    pairs = tl.load(row_pair_ptr + block.to(tl.int64) * BLOCK_ROWS + m, mask=row_mask, other=0)
    rows_h = pairs.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    h_ptrs = h_ptr + rows_h[:, None] * intermediate + k[None, :]
    first = expert * hidden + tile * BLOCK_N
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < hidden
    if LORA:
        # Asked for ahead of the K loop, so that they are there behind it.
        count = tl.load(block_count_ptr + block)
        row_segment = tl.load(
            row_segment_ptr + block.to(tl.int64) * BLOCK_ROWS + m, mask=row_mask, other=-1
        )
        s_ptrs = s_ptr + rows_h[:, None] * max_rank
        if FAST > 0:
            places = places_ptr + (block * PROJECTIONS + PROJECTIONS - 1) * (FAST * 4)
            s, b = load_fast(
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
        if FAST > 0:
            if count > 0:
                acc = add_fast(acc, s, b, row_segment, FAST, BLOCK_R)
        for segment in range(FAST, count):
            slot = tl.load(block_slots_ptr + block * BLOCK_ROWS + segment).to(tl.int64)
            acc = add_slow(
                acc, s_ptrs, arena_ptr, records_ptr, records_i32_ptr, map_ptr, slot,
                PROJECTIONS - 1, expert, slot_stride, map_stride, num_slots,
                row_segment == segment, columns, column_mask, UNIT, BLOCK_R,
            )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * bias_stride + columns, mask=column_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    weight = tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0).to(tl.float32)
    y = (acc * weight[:, None]).to(y_ptr.dtype.element_ty)
    y_ptrs = y_ptr + rows_h[:, None] * hidden + columns[None, :]
    tl.store(y_ptrs, y, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_tiles", "map_stride", "num_slots"])
def prefill_down_kernel(
    h_ptr,  # [P, I]
    weight_desc,  # [E * H, I], tiles of [BLOCK_N, BLOCK_K]
    bias_ptr,  # [E, H] or unused
    topk_weights_ptr,  # [P]
    y_ptr,  # [P, H] out, weighted
    s_ptr,  # [P, max_rank], or unused
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
    intermediate,
    hidden,
    bias_stride,
    num_tiles,
    max_rank,
    slot_stride,
    map_stride,
    num_slots,
    HAS_BIAS: tl.constexpr,
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
            h_ptr, weight_desc, bias_ptr, topk_weights_ptr, y_ptr, s_ptr, row_pair_ptr,
            row_segment_ptr, block_slots_ptr, block_count_ptr, places_ptr, arena_ptr, records_ptr,
            records_i32_ptr, map_ptr, block, tile, expert, live_rows, intermediate, hidden,
            bias_stride, max_rank, slot_stride, map_stride, num_slots, HAS_BIAS, LORA,
            EVEN_K, UNIT, PROJECTIONS, FAST, BLOCK_M, TAIL_M, BLOCK_N, BLOCK_K, BLOCK_R,
        )  # fmt: skip
    else:
        _tile(
            h_ptr, weight_desc, bias_ptr, topk_weights_ptr, y_ptr, s_ptr, row_pair_ptr,
            row_segment_ptr, block_slots_ptr, block_count_ptr, places_ptr, arena_ptr, records_ptr,
            records_i32_ptr, map_ptr, block, tile, expert, live_rows, intermediate, hidden,
            bias_stride, max_rank, slot_stride, map_stride, num_slots, HAS_BIAS, LORA,
            EVEN_K, UNIT, PROJECTIONS, FAST, BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
        )  # fmt: skip
