"""Device code of ``lora_expand`` inside the GEMM kernels.

Descriptors (``desc64``, ``desc32``) are those of :mod:`moegraft.backends.triton.route`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_segment(
    acc, rank_ptr, rank_stride, first_row, first, end, arena_ptr, desc64_ptr, desc32_ptr,
    P: tl.constexpr, columns, column_mask, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` with ``scale * S @ B`` added to the rows [first, end) of a block, only those.

    P is 0 for gate, 1 for up, 2 for down; row r of the rank vectors is at ``rank_ptr + r *
    rank_stride``, fp32. A 16-bit B meets S as a high and a low part, so nothing of S is rounded
    away. Rows are selected, not multiplied by a mask: nothing crosses to another row, not even NaN.
    """
    head = first_row + first
    rank = tl.load(desc32_ptr + head * 16 + 1 + P)
    scale = tl.load(desc32_ptr + head * 16 + 4 + P).to(tl.float32, bitcast=True)
    b_stride = tl.multiple_of(tl.load(desc32_ptr + head * 16 + 10 + P), UNIT)
    b_ptr = arena_ptr + tl.multiple_of(tl.load(desc64_ptr + head * 8 + 3 + P), UNIT)
    m = tl.arange(0, BLOCK_M)
    in_segment = (m >= first) & (m < end)
    r0 = 0
    while r0 < rank:
        r = r0 + tl.arange(0, BLOCK_R)
        r_mask = r < rank
        s = tl.load(
            rank_ptr + (first_row + m)[:, None] * rank_stride + r[None, :],
            mask=in_segment[:, None] & r_mask[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        b = tl.load(
            b_ptr + r[:, None] * b_stride + columns[None, :],
            mask=r_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        high = s.to(b.dtype)
        delta = tl.dot(high, b, input_precision="ieee")
        if b.dtype != tl.float32:
            low = (s - high.to(tl.float32)).to(b.dtype)
            delta = tl.dot(low, b, delta, input_precision="ieee")
        acc = tl.where(in_segment[:, None], acc + delta * scale, acc)
        r0 += BLOCK_R
    return acc
