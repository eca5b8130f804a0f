"""The run lora_shrink + lora_expand: the delta of every segment, in a launch of its own.

A program takes one segment and projection at a time, reads its ``A`` and ``B`` once, whole and in
order, and leaves ``scale * B (A x)`` in fp32 for the GEMM, which adds it behind its K loop. The
delta stays in the L2. Few programs, so that the GEMM, which starts beside them, has most of the
machine; segments in the order of the GEMM's blocks, so that its first blocks wait the least.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import (
    launch_end,
    launch_next,
    launch_wait,
    signal,
    wait_for,
)


@triton.jit
def _segment_delta(
    x_ptr, delta_ptr, row_flags_ptr, row_pair_ptr, a_ptr, a_stride, b_ptr, b_stride, rank, scale,
    first_row, end_row, size_k, size_n, x_stride, delta_stride, TOP_K: tl.constexpr,
    X_BY_TOKEN: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the delta of the rows [first_row, end_row) and set their flags.

    S is fp32; a 16-bit B meets it as a high and a low part, so nothing of S is rounded away.
    """
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    for m0 in range(first_row, end_row, BLOCK_M):
        rows = m0 + tl.arange(0, BLOCK_M)
        row_mask = rows < end_row
        if X_BY_TOKEN:
            x_rows = tl.load(row_pair_ptr + rows, mask=row_mask, other=0) // TOP_K
        else:
            x_rows = rows
        x_base = x_ptr + x_rows.to(tl.int64)[:, None] * x_stride + k[None, :]
        out = delta_ptr + rows.to(tl.int64)[:, None] * delta_stride + n[None, :]
        for r0 in range(0, rank, BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            r_mask = r < rank
            a_ptrs = a_ptr + r[:, None] * a_stride + k[None, :]
            x_ptrs = x_base
            s = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for k0 in range(0, size_k, BLOCK_K):
                if EVEN_K:
                    x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
                    a = tl.load(a_ptrs, mask=r_mask[:, None], other=0.0)
                else:
                    k_mask = (k0 + k < size_k)[None, :]
                    x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask, other=0.0)
                    a = tl.load(a_ptrs, mask=r_mask[:, None] & k_mask, other=0.0)
                s = tl.dot(x, tl.trans(a), s, input_precision="ieee")
                x_ptrs += BLOCK_K
                a_ptrs += BLOCK_K
            s = s * scale
            high = s.to(a_ptr.dtype.element_ty)
            low = (s - high.to(tl.float32)).to(a_ptr.dtype.element_ty)
            b_ptrs = b_ptr + r[:, None] * b_stride + n[None, :]
            for n0 in range(0, size_n, BLOCK_N):
                b_mask = r_mask[:, None]
                out_mask = row_mask[:, None]
                if not EVEN_N:
                    b_mask = b_mask & (n0 + n < size_n)[None, :]
                    out_mask = out_mask & (n0 + n < size_n)[None, :]
                b = tl.load(b_ptrs, mask=b_mask, other=0.0)
                delta = tl.dot(high, b, input_precision="ieee")
                if a_ptr.dtype.element_ty != tl.float32:
                    delta = tl.dot(low, b, delta, input_precision="ieee")
                if r0 > 0:
                    delta += tl.load(out + n0, mask=out_mask, other=0.0)
                tl.store(out + n0, delta, mask=out_mask)
                b_ptrs += BLOCK_N
        tl.store(row_flags_ptr + rows, 1, mask=row_mask)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "map_stride", "num_units", "h_tiles"])
def lora_shrink_expand_kernel(
    x_ptr,  # [T, K] (per token) or [rows, K]
    delta_ptr,  # [rows, SIDES, N] fp32 out, only rows with a delta
    row_flags_ptr,  # [SIDES, rows] int32, set to 1 where a row gets a delta
    arena_ptr,
    segments_ptr,
    row_pair_ptr,
    records_ptr,  # [S, projections, 8] int64, from the first projection of this side on
    records_i32_ptr,  # the same as int32
    map_ptr,  # [S, E] int32
    delta_counter_ptr,  # [blocks], counts rows and sides
    h_counter_ptr,  # [blocks]
    h_tiles,  # what a block's counter reaches when its rows of x are there
    num_units,  # P * SIDES
    size_k,
    size_n,
    x_stride,
    slot_stride,
    map_stride,
    num_rows,
    num_slots,
    TOP_K: tl.constexpr,
    DOWN: tl.constexpr,  # x is h of this layer: wait for a block's rows, not for the launch
    SIDES: tl.constexpr,  # 2 for gate and up
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows of a GEMM's block
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    if not DOWN:
        launch_wait(PDL)
    launch_next(PDL)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        side = unit % SIDES
        segment = segments_ptr + unit // SIDES * 4
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
            block = first_row // BLOCK_ROWS
            if DOWN:
                wait_for(h_counter_ptr + block, h_tiles, PDL)
            if (entry >= 0) & (rank > 0):
                _segment_delta(
                    x_ptr, delta_ptr + side * size_n, row_flags_ptr + side * num_rows,
                    row_pair_ptr,
                    arena_ptr + tl.multiple_of(a_offset + entry * a_expert, UNIT),
                    tl.multiple_of(a_stride, UNIT),
                    arena_ptr + tl.multiple_of(b_offset + entry * b_expert, UNIT),
                    tl.multiple_of(b_stride, UNIT),
                    rank, scale.to(tl.float32, bitcast=True), first_row, end_row, size_k, size_n,
                    x_stride, SIDES * size_n, TOP_K, not DOWN, EVEN_K, EVEN_N, BLOCK_M, BLOCK_R,
                    BLOCK_K, BLOCK_N,
                )  # fmt: skip
            signal(delta_counter_ptr + block, end_row - first_row, PDL)
    launch_end(PDL)
