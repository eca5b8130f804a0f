"""Device code of the run lora_shrink + lora_expand: the delta of one segment's rows.

The work is cut into *units*: a segment, one of its projections, one of SPLITS ranges of output
columns. A unit reads its ``A`` and its part of ``B`` once, whole and in order, and leaves
``scale * B (A x)`` for the GEMM. The delta stays in the L2. Units come in the order of the
GEMM's blocks, so that its first blocks wait the least.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import mark, peek, wait_for


@triton.jit
def _write_delta(
    x_ptr, delta_ptr, x_rows, out_rows, row_mask, a_ptr, a_stride, b_ptr, b_stride, rank, scale,
    size_k, first_n, end_n, x_stride, delta_stride, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the columns [first_n, end_n) of BLOCK_M rows' delta.

    S is fp32; a 16-bit B meets it as a high and a low part, so nothing of S is rounded away.
    """
    dtype = a_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    n = first_n + tl.arange(0, BLOCK_N)
    x_base = x_ptr + x_rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    out_ptrs = delta_ptr + out_rows.to(tl.int64)[:, None] * delta_stride + n[None, :]
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        r_mask = r < rank
        a_ptrs = a_ptr + r[:, None] * a_stride + k[None, :]
        x_ptrs = x_base
        s = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for k0 in tl.range(0, size_k, BLOCK_K, num_stages=STAGES):
            if EVEN_K:
                a = tl.load(a_ptrs, mask=r_mask[:, None], other=0.0)
                x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            else:
                k_mask = (k0 + k < size_k)[None, :]
                a = tl.load(a_ptrs, mask=r_mask[:, None] & k_mask, other=0.0)
                x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask, other=0.0)
            s = tl.dot(x, tl.trans(a).to(x.dtype), s, input_precision="ieee")
            x_ptrs += BLOCK_K
            a_ptrs += BLOCK_K
        s = s * scale
        high = s.to(dtype)
        low = (s - high.to(tl.float32)).to(dtype)
        b_ptrs = b_ptr + r[:, None] * b_stride + n[None, :]
        out = out_ptrs
        for n0 in tl.range(first_n, end_n, BLOCK_N, num_stages=STAGES):
            b_mask = r_mask[:, None]
            out_mask = row_mask[:, None]
            if not EVEN_N:
                in_range = (n0 + tl.arange(0, BLOCK_N) < end_n)[None, :]
                b_mask = b_mask & in_range
                out_mask = out_mask & in_range
            b = tl.load(b_ptrs, mask=b_mask, other=0.0)
            delta = tl.dot(high, b, input_precision="ieee")
            if dtype != tl.float32:
                delta = tl.dot(low, b, delta, input_precision="ieee")
            if r0 > 0:
                delta += tl.load(out, mask=out_mask, other=0.0).to(tl.float32)
            tl.store(out, delta, mask=out_mask, eviction_policy="evict_last")
            b_ptrs += BLOCK_N
            out += BLOCK_N


@triton.jit
def run_unit(
    unit,
    x_ptr,  # [T, K] (per token) or h [P, K]
    delta_ptr,  # [P, SIDES, N] out, only pairs with a delta
    states_ptr,  # [SIDES, P] int32
    arena_ptr,
    segments_ptr,
    row_pair_ptr,
    records_ptr,  # [S, projections, 8] int64, from the first projection of this side on
    records_i32_ptr,  # the same as int32
    map_ptr,  # [S, E] int32
    h_counter_ptr,  # [blocks]
    h_tiles,  # what a block's counter reaches when its rows of h are there
    num_pairs,
    size_k,
    size_n,
    x_stride,
    slot_stride,
    map_stride,
    num_slots,
    TOP_K: tl.constexpr,
    DOWN: tl.constexpr,  # x is h of this layer: wait for a block's rows
    SIDES: tl.constexpr,  # 2 for gate and up
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,  # size_n is a multiple of SPLITS * BLOCK_N
    BLOCK_ROWS: tl.constexpr,  # rows of a GEMM's block
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one unit and mark its pairs; nothing where the unit's pair opens no segment."""
    side = unit // SPLITS % SIDES
    segment = segments_ptr + unit // (SPLITS * SIDES) * 4
    # Past L1: a launch that was not waited for has written them.
    first_row = tl.load(segment, cache_modifier=".cg")
    end_row = tl.load(segment + 1, cache_modifier=".cg")
    slot = tl.load(segment + 2, cache_modifier=".cg").to(tl.int64)
    expert = tl.load(segment + 3, cache_modifier=".cg")
    if first_row >= 0:
        is_slot = slot < num_slots
        record = slot * slot_stride + side * 8
        entry = tl.load(map_ptr + slot * map_stride + expert, mask=is_slot, other=-1)
        rank = tl.load(records_i32_ptr + record * 2 + 12, mask=is_slot, other=0)
        scale = tl.load(records_i32_ptr + record * 2 + 14, mask=is_slot, other=0)
        a_offset = tl.load(records_ptr + record, mask=is_slot, other=0) * UNIT
        b_offset = tl.load(records_ptr + record + 1, mask=is_slot, other=0) * UNIT
        a_expert = tl.load(records_ptr + record + 2, mask=is_slot, other=0)
        b_expert = tl.load(records_ptr + record + 3, mask=is_slot, other=0)
        a_stride = tl.load(records_ptr + record + 4, mask=is_slot, other=0)
        b_stride = tl.load(records_ptr + record + 5, mask=is_slot, other=0)
        part: tl.constexpr = BLOCK_N * SPLITS
        width = (size_n + part - 1) // part * BLOCK_N
        first_n = unit % SPLITS * width
        end_n = tl.minimum(first_n + width, size_n)
        has_delta = (entry >= 0) & (rank > 0)
        if DOWN:
            counter = h_counter_ptr + first_row // BLOCK_ROWS
            wait_for(counter, peek(counter, PDL), h_tiles, PDL)
        for m0 in range(first_row, end_row, BLOCK_M):
            rows = m0 + tl.arange(0, BLOCK_M)
            row_mask = rows < end_row
            pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0, cache_modifier=".cg")
            if has_delta:
                _write_delta(
                    x_ptr, delta_ptr + side * size_n, pairs if DOWN else pairs // TOP_K, pairs,
                    row_mask,
                    arena_ptr + tl.multiple_of(a_offset + entry * a_expert, UNIT),
                    tl.multiple_of(a_stride, UNIT),
                    arena_ptr + tl.multiple_of(b_offset + entry * b_expert, UNIT),
                    tl.multiple_of(b_stride, UNIT),
                    rank, scale.to(tl.float32, bitcast=True), size_k, first_n, end_n, x_stride,
                    SIDES * size_n, EVEN_K, EVEN_N, BLOCK_M, BLOCK_R, BLOCK_K, BLOCK_N, STAGES,
                )  # fmt: skip
            mark(states_ptr + side * num_pairs + pairs, has_delta, row_mask)
