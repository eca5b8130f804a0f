"""Base products over weights that are stored as they are multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import wait_for
from moegraft.backends.triton.weights.load import load_tile


@triton.jit
def plain_product(
    x_ptr, x_stride, x_rows, row_mask, weight_ptr, weight_stride_e, weight_stride_n,
    weight_stride_k, expert, columns, column_mask, size_k, counter_ptr, seen, amount,
    GATE_START: tl.constexpr, UP_START: tl.constexpr, COLUMN_STEP: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WAIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See :func:`moegraft.backends.triton.weights.product.base_product`."""
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_rows[:, None] * x_stride + k[None, :]
    base = weight_ptr + expert * weight_stride_e
    n = columns.to(tl.int64) * COLUMN_STEP
    up_ptrs = base + (UP_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    gate_ptrs = base + (GATE_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    if WAIT:
        wait_for(counter_ptr, seen, amount, PDL)
    if SWAP:
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, size_k, BLOCK_K):
        w_mask = column_mask[:, None]
        x_mask = row_mask[:, None]
        if not EVEN_K:
            w_mask = w_mask & (k0 + k < size_k)[None, :]
            x_mask = x_mask & (k0 + k < size_k)[None, :]
        # Weights first: x has to wait for the rows' numbers.
        w_up = load_tile(up_ptrs, w_mask, EVEN_K and EVEN_N)
        if GATED:
            w_gate = load_tile(gate_ptrs, w_mask, EVEN_K and EVEN_N)
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if SWAP:
            up = tl.dot(w_up, tl.trans(x), up, input_precision="ieee")
        else:
            up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
        if GATED:
            if SWAP:
                gate = tl.dot(w_gate, tl.trans(x), gate, input_precision="ieee")
            else:
                gate = tl.dot(x, tl.trans(w_gate), gate, input_precision="ieee")
            gate_ptrs += BLOCK_K * weight_stride_k
        x_ptrs += BLOCK_K
        up_ptrs += BLOCK_K * weight_stride_k
    if SWAP:
        up = tl.trans(up)
        gate = tl.trans(gate)
    return gate, up
