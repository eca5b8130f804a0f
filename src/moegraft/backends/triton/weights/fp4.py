"""Base products over 4-bit weights, widened to the activations' type where they are multiplied.

A byte holds an even column in its low half and the odd one in its high half. Rather than weave
them, the low halves meet the even columns of x in one product and the high halves the odd ones in
another: x has a copy with its even columns ahead of its odd ones, see :mod:`.rows`.

A value times the scale of its block is exact in bfloat16, whose mantissa has 8 bits: they have 2
and 4. The scale of the whole matrix, fp32, multiplies the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import wait_for
from moegraft.backends.triton.weights.fp4_bits import high_low_exact, high_low_packed


@triton.jit
def fp4_product(
    base_ptr, base_stride, x_rows, row_mask, weight_ptr, weight_stride_e, weight_stride_n,
    weight_stride_k, scales_ptr, scale_stride_e, scale_stride_n, scale_stride_k, globals_ptr,
    global_stride, expert, columns, column_mask, size_k, counter_ptr, seen, amount,
    NV: tl.constexpr, GATE_START: tl.constexpr, UP_START: tl.constexpr, COLUMN_STEP: tl.constexpr,
    GATE_SCALES: tl.constexpr, UP_SCALES: tl.constexpr, GATE_GLOBAL: tl.constexpr,
    UP_GLOBAL: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WAIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See :func:`moegraft.backends.triton.weights.product.base_product`; NV: NVFP4, else MXFP4."""
    width: tl.constexpr = 16 if NV else 32
    half: tl.constexpr = BLOCK_K // 2
    k = tl.arange(0, half)
    step: tl.constexpr = BLOCK_K // width
    g = tl.arange(0, step)
    groups = tl.cdiv(size_k, width)
    x_ptrs = base_ptr + x_rows[:, None] * base_stride + k[None, :]
    n = columns.to(tl.int64) * COLUMN_STEP
    base = weight_ptr + expert * weight_stride_e + k[None, :] * weight_stride_k
    up_ptrs = base + (UP_START + n)[:, None] * weight_stride_n
    gate_ptrs = base + (GATE_START + n)[:, None] * weight_stride_n
    scales = scales_ptr + expert * scale_stride_e + g[None, :] * scale_stride_k
    up_scales = scales + (UP_SCALES + n)[:, None] * scale_stride_n
    gate_scales = scales + (GATE_SCALES + n)[:, None] * scale_stride_n
    if not NV:
        s_up, s_gate = _scales(up_scales, gate_scales, column_mask, g, groups, GATED, False)
    if WAIT:
        wait_for(counter_ptr, seen, amount, PDL)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, size_k, BLOCK_K):
        w_mask = column_mask[:, None]
        x_mask = row_mask[:, None]
        if not EVEN_K:
            in_range = (k0 // 2 + k < size_k // 2)[None, :]
            w_mask = w_mask & in_range
            x_mask = x_mask & in_range
        if EVEN_K and EVEN_N:
            w_up = tl.load(up_ptrs)
        else:
            w_up = tl.load(up_ptrs, mask=w_mask, other=0)
        if GATED:
            if EVEN_K and EVEN_N:
                w_gate = tl.load(gate_ptrs)
            else:
                w_gate = tl.load(gate_ptrs, mask=w_mask, other=0)
        even = tl.load(x_ptrs, mask=x_mask, other=0.0)
        odd = tl.load(x_ptrs + base_stride // 2, mask=x_mask, other=0.0)
        if NV:
            s_up, s_gate = _scales(
                up_scales, gate_scales, column_mask, k0 // width + g, groups, GATED,
                EVEN_K and EVEN_N,
            )  # fmt: skip
        up_scales += step * scale_stride_k
        gate_scales += step * scale_stride_k
        if not NV:  # too few bytes a row for the pipeline: asked for one step ahead
            next_up, next_gate = _scales(
                up_scales, gate_scales, column_mask, k0 // width + step + g, groups, GATED, False
            )
        up = _two_dots(even, odd, w_up, s_up, up, NV, BLOCK_N, half)
        up_ptrs += half * weight_stride_k
        if GATED:
            gate = _two_dots(even, odd, w_gate, s_gate, gate, NV, BLOCK_N, half)
            gate_ptrs += half * weight_stride_k
        if not NV:
            s_up = next_up
            s_gate = next_gate
        x_ptrs += half
    factor = 1.0
    if base_ptr.dtype.element_ty == tl.bfloat16:
        factor = 128.0 if NV else 9223372036854775808.0  # what fp4_bits leaves out
    up_factor = factor
    gate_factor = factor
    if NV:
        up_factor *= tl.load(globals_ptr + expert * global_stride + UP_GLOBAL)
        if GATED:
            gate_factor *= tl.load(globals_ptr + expert * global_stride + GATE_GLOBAL)
    return gate * gate_factor, up * up_factor


@triton.jit
def _scales(
    up_ptrs, gate_ptrs, column_mask, group, groups, GATED: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return the scales of one step of both sides, uint8 ``[BLOCK_N, groups of a step]``."""
    if EVEN:
        up = tl.load(up_ptrs)
        gate = tl.load(gate_ptrs) if GATED else up
    else:
        mask = column_mask[:, None] & (group < groups)[None, :]
        up = tl.load(up_ptrs, mask=mask, other=0)
        gate = tl.load(gate_ptrs, mask=mask, other=0) if GATED else up
    return up, gate


@triton.jit
def _two_dots(even, odd, w, s, acc, NV: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Add ``x W`` of one tile: bytes ``[BLOCK_N, HALF]`` and their scales."""
    if even.dtype == tl.bfloat16:
        low, high = high_low_packed(w, s, NV, BLOCK_N, HALF)
    else:
        low, high = high_low_exact(w, s, even.dtype, NV, BLOCK_N, HALF)
    acc = tl.dot(even, tl.trans(low), acc, input_precision="ieee")
    return tl.dot(odd, tl.trans(high), acc, input_precision="ieee")
