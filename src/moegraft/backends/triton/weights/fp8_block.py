"""Base products of FP8 weights and FP8 activations, with scales per 128 x 128 and 128 columns.

A step of the K loop is one group of 128 columns: its product is exact but for fp32 sums, and joins
the accumulator times one scale of the weights' cell and one of each row. The weights are the left
operand: so the matrix unit takes them as they are, however few rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import wait_for
from moegraft.backends.triton.weights.load import load_tile


@triton.jit
def fp8_block_product(
    base_ptr, base_stride, base_scales_ptr, x_rows, row_mask, weight_ptr, weight_stride_e,
    weight_stride_n, weight_stride_k, scales_ptr, scale_stride_e, scale_stride_n, scale_stride_k,
    expert, first_column, columns, column_mask, size_k, counter_ptr, seen, amount,
    GATE_START: tl.constexpr, UP_START: tl.constexpr, GATE_SCALES: tl.constexpr,
    UP_SCALES: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WAIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See :func:`moegraft.backends.triton.weights.product.base_product`."""
    tl.static_assert(BLOCK_K == 128, "a step is one group of columns")
    tl.static_assert(128 % BLOCK_N == 0, "a tile lies in one row of the grid of scales")
    k = tl.arange(0, BLOCK_K)
    groups = tl.cdiv(size_k, BLOCK_K)
    x_ptrs = base_ptr + x_rows[:, None] * base_stride + k[None, :]
    x_scales = base_scales_ptr + x_rows * groups
    base = weight_ptr + expert * weight_stride_e
    n = columns.to(tl.int64)
    up_ptrs = base + (UP_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    gate_ptrs = base + (GATE_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    scales = scales_ptr + expert * scale_stride_e + first_column // 128 * scale_stride_n
    up_scales = scales + UP_SCALES * scale_stride_n
    gate_scales = scales + GATE_SCALES * scale_stride_n
    if WAIT:
        wait_for(counter_ptr, seen, amount, PDL)
    # Scales are asked for one step ahead: they are loaded past the stages of the pipeline.
    x_scale = tl.load(x_scales, mask=row_mask, other=0.0)
    up_scale = tl.load(up_scales)
    gate_scale = up_scale
    if GATED:
        gate_scale = tl.load(gate_scales)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in range(0, size_k, BLOCK_K):
        w_mask = column_mask[:, None]
        x_mask = row_mask[:, None]
        if not EVEN_K:
            w_mask = w_mask & (k0 + k < size_k)[None, :]
            x_mask = x_mask & (k0 + k < size_k)[None, :]
        w_up = load_tile(up_ptrs, w_mask, EVEN_K and EVEN_N)
        if GATED:
            w_gate = load_tile(gate_ptrs, w_mask, EVEN_K and EVEN_N)
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        more = k0 + BLOCK_K < size_k
        x_scales += 1
        next_x_scale = tl.load(x_scales, mask=row_mask & more, other=0.0)
        up_scales += scale_stride_k
        next_up_scale = tl.load(up_scales, mask=more, other=0.0)
        if GATED:
            gate_scales += scale_stride_k
            next_gate_scale = tl.load(gate_scales, mask=more, other=0.0)
        up += tl.dot(w_up, tl.trans(x)) * (x_scale * up_scale)[None, :]
        if GATED:
            gate += tl.dot(w_gate, tl.trans(x)) * (x_scale * gate_scale)[None, :]
            gate_ptrs += BLOCK_K * weight_stride_k
            gate_scale = next_gate_scale
        x_ptrs += BLOCK_K
        up_ptrs += BLOCK_K * weight_stride_k
        x_scale = next_x_scale
        up_scale = next_up_scale
    return tl.trans(gate), tl.trans(up)
