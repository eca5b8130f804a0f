"""Base products over 4-bit weights, widened to the activations' type where they are multiplied.

The weights are the left operand, which the matrix unit takes from registers: there they are
widened, and never written to shared memory. They come in an order of their own, see
:mod:`.fp4_bits`, that a copy of x has too.

A value times the scale of its block is exact in bfloat16, whose mantissa has 8 bits: they have 2
and 4. The scale of the whole matrix, fp32, multiplies the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import wait_for
from moegraft.backends.triton.weights.fp4_bits import widened
from moegraft.backends.triton.weights.load import load_tile


@triton.jit
def fp4_product(
    base_ptr, base_stride, x_rows, row_mask, weight_ptr, weight_stride_e, weight_stride_n,
    scales_ptr, scale_stride_e, scale_stride_n, scale_stride_k, globals_ptr, global_stride, expert,
    columns, column_mask, size_k, counter_ptr, seen, amount, NV: tl.constexpr,
    WORD_UNIT: tl.constexpr, GATE_START: tl.constexpr, UP_START: tl.constexpr,
    COLUMN_STEP: tl.constexpr, GATE_SCALES: tl.constexpr, UP_SCALES: tl.constexpr,
    GATE_GLOBAL: tl.constexpr, UP_GLOBAL: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See :func:`moegraft.backends.triton.weights.product.base_product`; NV: NVFP4, else MXFP4.

    ``weight_ptr``: int32, words of 8 values; its strides are in WORD_UNIT words.
    """
    width: tl.constexpr = 16 if NV else 32
    step: tl.constexpr = BLOCK_K // width
    words: tl.constexpr = BLOCK_K // 8
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, words)
    group = tl.arange(0, step)
    groups = tl.cdiv(size_k, width)
    x_ptrs = base_ptr + x_rows[:, None] * base_stride + k[None, :]
    n = columns.to(tl.int64) * COLUMN_STEP
    base = weight_ptr + expert * (weight_stride_e * WORD_UNIT) + word[None, :]
    up_ptrs = base + (UP_START + n)[:, None] * (weight_stride_n * WORD_UNIT)
    gate_ptrs = base + (GATE_START + n)[:, None] * (weight_stride_n * WORD_UNIT)
    scales = scales_ptr + expert * scale_stride_e + group[None, :] * scale_stride_k
    up_scales = scales + (UP_SCALES + n)[:, None] * scale_stride_n
    gate_scales = scales + (GATE_SCALES + n)[:, None] * scale_stride_n
    if not NV:
        s_up, s_gate = _scales(up_scales, gate_scales, column_mask, group, groups, GATED, False)
    if WAIT:
        wait_for(counter_ptr, seen, amount, PDL)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    dtype = base_ptr.dtype.element_ty
    for k0 in range(0, size_k, BLOCK_K):
        w_mask = column_mask[:, None]
        x_mask = row_mask[:, None]
        if not EVEN_K:
            w_mask = w_mask & (k0 // 8 + word < size_k // 8)[None, :]
            x_mask = x_mask & (k0 + k < base_stride)[None, :]
        w_up = load_tile(up_ptrs, w_mask, EVEN_K and EVEN_N)
        if GATED:
            w_gate = load_tile(gate_ptrs, w_mask, EVEN_K and EVEN_N)
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if NV:
            s_up, s_gate = _scales(
                up_scales, gate_scales, column_mask, k0 // width + group, groups, GATED,
                EVEN_K and EVEN_N,
            )  # fmt: skip
        up_scales += step * scale_stride_k
        gate_scales += step * scale_stride_k
        if not NV:  # too few bytes a row for the pipeline: asked for one step ahead
            later = k0 // width + step + group
            next_up, next_gate = _scales(
                up_scales, gate_scales, column_mask, later, groups, GATED, False
            )
        w = widened(w_up, s_up, dtype, NV, BLOCK_N, words)
        up = tl.dot(w, tl.trans(x), up, input_precision="ieee")
        up_ptrs += words
        if GATED:
            w = widened(w_gate, s_gate, dtype, NV, BLOCK_N, words)
            gate = tl.dot(w, tl.trans(x), gate, input_precision="ieee")
            gate_ptrs += words
        if not NV:
            s_up = next_up
            s_gate = next_gate
        x_ptrs += BLOCK_K
    factor = 1.0
    if dtype == tl.bfloat16:
        factor = 128.0 if NV else 9223372036854775808.0  # what widened leaves out
    up_factor = factor
    gate_factor = factor
    if NV:
        up_factor *= tl.load(globals_ptr + expert * global_stride + UP_GLOBAL)
        if GATED:
            gate_factor *= tl.load(globals_ptr + expert * global_stride + GATE_GLOBAL)
    return tl.trans(gate) * gate_factor, tl.trans(up) * up_factor


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
