"""The run lora_shrink + lora_expand: the delta of every segment, in a launch of its own.

One program per segment and projection reads its ``A`` and ``B`` once, whole and in order, and
leaves ``scale * B (A x)`` in fp32 for the GEMM, which adds it behind its K loop. The delta stays in
the L2. Nothing here waits for anything but the launches before it, so with dependent launch the
GEMM streams its weights beside this kernel's factors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import launch_next, launch_wait


@triton.jit(do_not_specialize=["num_rows", "num_slots", "map_stride"])
def lora_shrink_expand_kernel(
    x_ptr,  # [T, K] (per token) or [rows, K]
    delta_ptr,  # [rows, SIDES, N] fp32 out, only rows with a delta
    row_flags_ptr,  # [SIDES, rows] int32, set to 1 where a row gets a delta
    arena_ptr,
    pair_segment_ptr,
    row_pair_ptr,
    records_ptr,  # [S, projections, 8] int64, from the first projection of this side on
    records_i32_ptr,  # the same as int32
    map_ptr,  # [S, E] int32
    size_k,
    size_n,
    x_stride,
    slot_stride,
    map_stride,
    num_rows,
    num_slots,
    TOP_K: tl.constexpr,
    X_BY_TOKEN: tl.constexpr,
    SIDES: tl.constexpr,  # 2 for gate and up
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file. S is fp32; a 16-bit B meets it as a high and a low part."""
    launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    side = pid % SIDES
    segment = pair_segment_ptr + pid // SIDES * 4
    first_row = tl.load(segment)
    end_row = tl.load(segment + 1)
    slot = tl.load(segment + 2).to(tl.int64)
    expert = tl.load(segment + 3)
    if (first_row < 0) | (slot >= num_slots):
        return
    record = slot * slot_stride + side * 8
    entry = tl.load(map_ptr + slot * map_stride + expert)
    rank = tl.load(records_i32_ptr + record * 2 + 12)
    scale = tl.load(records_i32_ptr + record * 2 + 14).to(tl.float32, bitcast=True)
    a_offset = tl.load(records_ptr + record) * UNIT
    b_offset = tl.load(records_ptr + record + 1) * UNIT
    a_expert_stride = tl.load(records_ptr + record + 2)
    b_expert_stride = tl.load(records_ptr + record + 3)
    a_stride = tl.multiple_of(tl.load(records_ptr + record + 4), UNIT)
    b_stride = tl.multiple_of(tl.load(records_ptr + record + 5), UNIT)
    if (entry < 0) | (rank == 0):
        return
    a_ptr = arena_ptr + tl.multiple_of(a_offset + entry * a_expert_stride, UNIT)
    b_ptr = arena_ptr + tl.multiple_of(b_offset + entry * b_expert_stride, UNIT)

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
        out = delta_ptr + rows.to(tl.int64)[:, None] * (SIDES * size_n) + side * size_n + n[None, :]
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
            high = s.to(arena_ptr.dtype.element_ty)
            low = (s - high.to(tl.float32)).to(arena_ptr.dtype.element_ty)
            b_ptrs = b_ptr + r[:, None] * b_stride + n[None, :]
            for n0 in range(0, size_n, BLOCK_N):
                b_mask = r_mask[:, None]
                out_mask = row_mask[:, None]
                if not EVEN_N:
                    b_mask = b_mask & (n0 + n < size_n)[None, :]
                    out_mask = out_mask & (n0 + n < size_n)[None, :]
                b = tl.load(b_ptrs, mask=b_mask, other=0.0)
                delta = tl.dot(high, b, input_precision="ieee")
                if arena_ptr.dtype.element_ty != tl.float32:
                    delta = tl.dot(low, b, delta, input_precision="ieee")
                if r0 > 0:
                    delta += tl.load(out + n0, mask=out_mask, other=0.0)
                tl.store(out + n0, delta, mask=out_mask)
                b_ptrs += BLOCK_N
        tl.store(row_flags_ptr + side * num_rows + rows, 1, mask=row_mask)
