"""Stage ``lora_shrink``: rank vectors ``S = A x`` of every segment, in a launch of its own.

One program per pair, side and rank chunk; those whose pair heads a segment do the work. Small
programs with few registers and little shared memory, so that many run beside the GEMM's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import launch_next, launch_wait


@triton.jit
def lora_shrink_kernel(
    x_ptr,  # [T, K] (per token) or [rows, K]
    rank_ptr,  # [rows, SIDES, RANK_STRIDE] fp32 out
    arena_ptr,
    desc64_ptr,
    desc32_ptr,
    row_pair_ptr,
    pair_head_ptr,
    size_k,
    x_stride,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,  # first projection: 0 gate, 1 up, 2 down
    SIDES: tl.constexpr,  # 2 for gate and up
    RANK_CHUNKS: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file. Ranks past the live one are written as 0."""
    launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    side = pid % SIDES
    chunk = (pid // SIDES) % RANK_CHUNKS
    head = tl.load(pair_head_ptr + pid // (SIDES * RANK_CHUNKS))
    if head < 0:
        return
    projection = FIRST + side
    end = tl.load(desc32_ptr + head * 16)
    rank = tl.load(desc32_ptr + head * 16 + 1 + projection)
    a_stride = tl.load(desc32_ptr + head * 16 + 7 + projection)
    shared = tl.load(desc32_ptr + head * 16 + 15)
    a_offset = tl.load(desc64_ptr + head * 8 + projection)
    first_rank = chunk * BLOCK_R
    if first_rank >= rank:
        return
    if SIDES == 2:
        if (shared != 0) & (side == 0):
            return
    m = tl.arange(0, BLOCK_M)
    row_mask = (m >= head % BLOCK_M) & (m < end)
    rows = head // BLOCK_M * BLOCK_M + m
    if FIRST == 2:
        x_rows = rows.to(tl.int64)
    else:
        x_rows = (tl.load(row_pair_ptr + rows, mask=row_mask, other=0) // TOP_K).to(tl.int64)
    r = first_rank + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    a_ptr = arena_ptr + tl.multiple_of(a_offset, UNIT)
    a_ptrs = a_ptr + r[:, None] * tl.multiple_of(a_stride, UNIT) + k[None, :]
    x_ptrs = x_ptr + x_rows[:, None] * x_stride + k[None, :]
    r_mask = (r < rank)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for k0 in range(0, size_k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            a = tl.load(a_ptrs, mask=r_mask, other=0.0)
        else:
            k_mask = (k0 + k < size_k)[None, :]
            x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask, other=0.0)
            a = tl.load(a_ptrs, mask=r_mask & k_mask, other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    out_ptrs = rank_ptr + rows[:, None] * (SIDES * RANK_STRIDE) + r[None, :]
    mask = row_mask[:, None] & (r < RANK_STRIDE)[None, :]
    tl.store(out_ptrs + side * RANK_STRIDE, acc, mask=mask)
    if SIDES == 2:
        if shared != 0:
            tl.store(out_ptrs, acc, mask=mask)
