"""Device code of ``lora_expand`` inside the GEMM kernels.

Descriptors (``desc64``, ``desc32``) are those of :mod:`moegraft.backends.triton.route`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_segment(
    rank_ptr, rank_stride, first_row, first, end, arena_ptr, desc64_ptr, desc32_ptr,
    P: tl.constexpr, r0, columns, column_mask, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Load S ``[BLOCK_M, BLOCK_R]``, B ``[BLOCK_R, BLOCK_N]``, scale and live rank of a segment.

    P is 0 for gate, 1 for up, 2 for down; row r of the rank vectors is at ``rank_ptr + r *
    rank_stride``, fp32. Rows outside [first, end) and ranks past the live one are 0 and not read.
    """
    head = first_row + first
    rank = tl.load(desc32_ptr + head * 16 + 1 + P)
    scale = tl.load(desc32_ptr + head * 16 + 4 + P).to(tl.float32, bitcast=True)
    b_stride = tl.multiple_of(tl.load(desc32_ptr + head * 16 + 10 + P), UNIT)
    b_ptr = arena_ptr + tl.multiple_of(tl.load(desc64_ptr + head * 8 + 3 + P), UNIT)
    m = tl.arange(0, BLOCK_M)
    in_segment = (m >= first) & (m < end)
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
    return s, b, scale, rank


@triton.jit
def _add(acc, s, b, scale, first, end, BLOCK_M: tl.constexpr):
    """Return ``acc`` with ``scale * s @ b`` added to the rows [first, end), only those.

    A 16-bit B meets S as a high and a low part, so nothing of S is rounded away. Rows are selected,
    not multiplied by a mask: nothing crosses to another row, not even NaN.
    """
    m = tl.arange(0, BLOCK_M)
    in_segment = (m >= first) & (m < end)
    high = s.to(b.dtype)
    delta = tl.dot(high, b, input_precision="ieee")
    if b.dtype != tl.float32:
        low = (s - high.to(tl.float32)).to(b.dtype)
        delta = tl.dot(low, b, delta, input_precision="ieee")
    return tl.where(in_segment[:, None], acc + delta * scale, acc)


@triton.jit
def add_segment(
    acc, rank_ptr, rank_stride, first_row, first, end, arena_ptr, desc64_ptr, desc32_ptr,
    P: tl.constexpr, columns, column_mask, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` with the delta of one projection of one segment added to its rows."""
    r0 = 0
    more = True
    while more:
        s, b, scale, rank = _load_segment(
            rank_ptr, rank_stride, first_row, first, end, arena_ptr, desc64_ptr, desc32_ptr, P, r0,
            columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
        )  # fmt: skip
        if rank > r0:
            acc = _add(acc, s, b, scale, first, end, BLOCK_M)
        r0 += BLOCK_R
        more = r0 < rank
    return acc


@triton.jit
def add_gate_up(
    gate, up, rank_ptr, rank_stride, first_row, first, end, arena_ptr, desc64_ptr, desc32_ptr,
    columns, column_mask, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return gate and up with one segment's deltas added; the loads of both are in flight together.

    The rank vectors of gate lie at ``rank_ptr``, those of up ``rank_stride`` behind.
    """
    r0 = 0
    more = True
    while more:
        gate_s, gate_b, gate_scale, gate_rank = _load_segment(
            rank_ptr, 2 * rank_stride, first_row, first, end, arena_ptr, desc64_ptr, desc32_ptr, 0,
            r0, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
        )  # fmt: skip
        up_s, up_b, up_scale, up_rank = _load_segment(
            rank_ptr + rank_stride, 2 * rank_stride, first_row, first, end, arena_ptr, desc64_ptr,
            desc32_ptr, 1, r0, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
        )  # fmt: skip
        rank = tl.maximum(gate_rank, up_rank)
        if gate_rank > r0:
            gate = _add(gate, gate_s, gate_b, gate_scale, first, end, BLOCK_M)
        if up_rank > r0:
            up = _add(up, up_s, up_b, up_scale, first, end, BLOCK_M)
        r0 += BLOCK_R
        more = r0 < rank
    return gate, up
