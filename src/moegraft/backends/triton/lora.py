"""Device code of ``lora_expand`` inside the GEMM kernels.

Descriptors (``desc64``, ``desc32``) are those of :mod:`moegraft.backends.triton.route`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_segment(
    rank_ptr, rank_stride, first_row, first, end, exists, arena_ptr, desc64_ptr, desc32_ptr,
    P: tl.constexpr, r0, columns, column_mask, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Load S ``[BLOCK_M, BLOCK_R]``, B ``[BLOCK_R, BLOCK_N]``, scale and live rank of a segment.

    P is 0 for gate, 1 for up, 2 for down; row r of the rank vectors is at ``rank_ptr + r *
    rank_stride``, fp32. Rows outside [first, end) and ranks past the live one are 0 and not read;
    nothing is read unless the segment ``exists``.
    """
    word = desc32_ptr + (first_row + first) * 16 + P
    offset_ptr = desc64_ptr + (first_row + first) * 8 + 3 + P
    rank = tl.load(word + 1, mask=exists, other=0)
    scale = tl.load(word + 4, mask=exists, other=0).to(tl.float32, bitcast=True)
    b_stride = tl.multiple_of(tl.load(word + 10, mask=exists, other=0), UNIT)
    b_ptr = arena_ptr + tl.multiple_of(tl.load(offset_ptr, mask=exists, other=0), UNIT)
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
def add_deltas(
    acc, rank_ptr, rank_stride, first_row, num_rows, arena_ptr, desc64_ptr, desc32_ptr,
    P: tl.constexpr, columns, column_mask, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` with the deltas of one projection added for all segments of a block.

    What the next turn needs is loaded before this turn's products, so that its latency is hidden.
    """
    first = 0
    r0 = 0
    end = tl.load(desc32_ptr + first_row * 16)
    s, b, scale, rank = _load_segment(
        rank_ptr, rank_stride, first_row, first, end, True, arena_ptr, desc64_ptr, desc32_ptr, P,
        r0, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
    )  # fmt: skip
    while first < num_rows:
        stay = r0 + BLOCK_R < rank
        next_first = tl.where(stay, first, end)
        next_r0 = tl.where(stay, r0 + BLOCK_R, 0)
        exists = next_first < num_rows
        next_end = tl.load(desc32_ptr + (first_row + next_first) * 16, mask=exists, other=0)
        next_s, next_b, next_scale, next_rank = _load_segment(
            rank_ptr, rank_stride, first_row, next_first, next_end, exists, arena_ptr, desc64_ptr,
            desc32_ptr, P, next_r0, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
        )  # fmt: skip
        if rank > r0:
            acc = _add(acc, s, b, scale, first, end, BLOCK_M)
        first, end, r0 = next_first, next_end, next_r0
        s, b, scale, rank = next_s, next_b, next_scale, next_rank
    return acc


@triton.jit
def add_gate_up_deltas(
    gate, up, rank_ptr, rank_stride, first_row, num_rows, arena_ptr, desc64_ptr, desc32_ptr,
    columns, column_mask, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return gate and up with the deltas of all segments added; as :func:`add_deltas`, together.

    The rank vectors of gate lie at ``rank_ptr``, those of up ``rank_stride`` behind.
    """
    first = 0
    r0 = 0
    end = tl.load(desc32_ptr + first_row * 16)
    gate_s, gate_b, gate_scale, gate_rank = _load_segment(
        rank_ptr, 2 * rank_stride, first_row, first, end, True, arena_ptr, desc64_ptr, desc32_ptr,
        0, r0, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
    )  # fmt: skip
    up_s, up_b, up_scale, up_rank = _load_segment(
        rank_ptr + rank_stride, 2 * rank_stride, first_row, first, end, True, arena_ptr,
        desc64_ptr, desc32_ptr, 1, r0, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
    )  # fmt: skip
    while first < num_rows:
        stay = r0 + BLOCK_R < tl.maximum(gate_rank, up_rank)
        next_first = tl.where(stay, first, end)
        next_r0 = tl.where(stay, r0 + BLOCK_R, 0)
        exists = next_first < num_rows
        next_end = tl.load(desc32_ptr + (first_row + next_first) * 16, mask=exists, other=0)
        next_gate_s, next_gate_b, next_gate_scale, next_gate_rank = _load_segment(
            rank_ptr, 2 * rank_stride, first_row, next_first, next_end, exists, arena_ptr,
            desc64_ptr, desc32_ptr, 0, next_r0, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
        )  # fmt: skip
        next_up_s, next_up_b, next_up_scale, next_up_rank = _load_segment(
            rank_ptr + rank_stride, 2 * rank_stride, first_row, next_first, next_end, exists,
            arena_ptr, desc64_ptr, desc32_ptr, 1, next_r0, columns, column_mask, UNIT, BLOCK_M,
            BLOCK_R,
        )  # fmt: skip
        if gate_rank > r0:
            gate = _add(gate, gate_s, gate_b, gate_scale, first, end, BLOCK_M)
        if up_rank > r0:
            up = _add(up, up_s, up_b, up_scale, first, end, BLOCK_M)
        first, end, r0 = next_first, next_end, next_r0
        gate_s, gate_b, gate_scale, gate_rank = (
            next_gate_s, next_gate_b, next_gate_scale, next_gate_rank,
        )  # fmt: skip
        up_s, up_b, up_scale, up_rank = next_up_s, next_up_b, next_up_scale, next_up_rank
    return gate, up
