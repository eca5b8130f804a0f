"""Base products of FP8 weights and activations as they are: the weights are widened to their type.

Scales are those of blocks of 128 x 128, whose products join the accumulator one by one, or of rows
or of whole matrices, which multiply the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import wait_for
from moegraft.backends.triton.weights.load import load_tile


@triton.jit
def fp8_wide_product(
    x_ptr, x_stride, x_rows, row_mask, weight_ptr, weight_stride_e, weight_stride_n,
    weight_stride_k, scales_ptr, scale_stride_e, scale_stride_n, scale_stride_k, expert,
    first_column, columns, column_mask, size_k, counter_ptr, seen, amount, SCALES: tl.constexpr,
    GATE_START: tl.constexpr, UP_START: tl.constexpr, COLUMN_STEP: tl.constexpr,
    GATE_SCALES: tl.constexpr, UP_SCALES: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See :func:`moegraft.backends.triton.weights.product.base_product`.

    SCALES: "block", "row" or "matrix".
    """
    blocks: tl.constexpr = SCALES == "block"
    if blocks:
        tl.static_assert(128 % BLOCK_N == 0 and 128 % BLOCK_K == 0, "a tile lies in one block")
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_rows[:, None] * x_stride + k[None, :]
    base = weight_ptr + expert * weight_stride_e
    n = columns.to(tl.int64) * COLUMN_STEP
    up_ptrs = base + (UP_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    gate_ptrs = base + (GATE_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    scales = scales_ptr + expert * scale_stride_e
    if blocks:
        scales += first_column // 128 * scale_stride_n
    up_scales = scales + UP_SCALES * scale_stride_n
    gate_scales = scales + GATE_SCALES * scale_stride_n
    if WAIT:
        wait_for(counter_ptr, seen, amount, PDL)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
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
        if blocks:
            up_scale = tl.load(up_scales + k0 // 128 * scale_stride_k)
            part = tl.dot(x, tl.trans(_widened(w_up, x.dtype)), input_precision="ieee")
            up += part * up_scale
        else:
            up = tl.dot(x, tl.trans(_widened(w_up, x.dtype)), up, input_precision="ieee")
        if GATED:
            if blocks:
                gate_scale = tl.load(gate_scales + k0 // 128 * scale_stride_k)
                part = tl.dot(x, tl.trans(_widened(w_gate, x.dtype)), input_precision="ieee")
                gate += part * gate_scale
            else:
                gate = tl.dot(x, tl.trans(_widened(w_gate, x.dtype)), gate, input_precision="ieee")
            gate_ptrs += BLOCK_K * weight_stride_k
        x_ptrs += BLOCK_K
        up_ptrs += BLOCK_K * weight_stride_k
    if SCALES == "row":
        up *= tl.load(up_scales + n * scale_stride_n, mask=column_mask, other=0.0)[None, :]
        if GATED:
            gate *= tl.load(gate_scales + n * scale_stride_n, mask=column_mask, other=0.0)[None, :]
    elif SCALES == "matrix":
        up *= tl.load(up_scales)
        if GATED:
            gate *= tl.load(gate_scales)
    return gate, up


@triton.jit
def _widened(w, dtype):
    """Return e4m3 in another type; by way of fp32, since from 16 bits to others is slow."""
    return w.to(tl.float32).to(dtype)
