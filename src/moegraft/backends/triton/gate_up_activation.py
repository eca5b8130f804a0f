"""The run gate_up + lora_expand + activation, fused into one launch.

One program per block of rows and tile of columns. It runs its whole K loop over the base weights,
waits for the shrink's launch, adds ``scale * B S`` for each segment of its rows, applies the
activation and writes h once. No delta buffer exists. The K loop is the same with and without
adapters, so a row without one has the same bits in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.activation import gated, pointwise
from moegraft.backends.triton.lora import add_deltas, add_gate_up_deltas
from moegraft.backends.triton.sync import launch_next, launch_wait


@triton.jit
def gate_up_activation_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # gate_up storage
    bias_ptr,  # [E, 2I] or unused
    h_ptr,  # [rows, I] out
    rank_ptr,  # [rows, 2 (1 without a gate), RANK_STRIDE] fp32
    arena_ptr,
    desc64_ptr,
    desc32_ptr,
    row_pair_ptr,
    block_info_ptr,
    hidden,
    intermediate,
    x_stride,
    weight_stride_e,
    weight_stride_n,
    weight_stride_k,
    bias_stride,
    num_tiles,
    TOP_K: tl.constexpr,
    GATE_START: tl.constexpr,
    UP_START: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    LORA: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    if not LORA:
        launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    block = pid // num_tiles
    # Past L1: read before launch_wait.
    info = tl.load(block_info_ptr + block, cache_modifier=".cg")
    num_rows = info % 256
    if num_rows == 0:
        return
    expert = (info // 256).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    first_row = block * BLOCK_M
    rows = first_row + m
    row_mask = m < num_rows
    columns = (pid % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < intermediate
    tokens = (
        tl.load(row_pair_ptr + rows, mask=row_mask, other=0, cache_modifier=".cg") // TOP_K
    ).to(tl.int64)

    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tokens[:, None] * x_stride + k[None, :]
    base = weight_ptr + expert * weight_stride_e
    n = columns.to(tl.int64) * COLUMN_STEP
    up_ptrs = base + (UP_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    gate_ptrs = base + (GATE_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        w_mask = column_mask[:, None]
        x_mask = row_mask[:, None]
        if not EVEN_K:
            w_mask = w_mask & (k0 + k < hidden)[None, :]
            x_mask = x_mask & (k0 + k < hidden)[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:
            w_up = tl.load(up_ptrs)
        else:
            w_up = tl.load(up_ptrs, mask=w_mask, other=0.0)
        up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
        if GATED:
            if EVEN_K and EVEN_N:
                w_gate = tl.load(gate_ptrs)
            else:
                w_gate = tl.load(gate_ptrs, mask=w_mask, other=0.0)
            gate = tl.dot(x, tl.trans(w_gate), gate, input_precision="ieee")
            gate_ptrs += BLOCK_K * weight_stride_k
        x_ptrs += BLOCK_K
        up_ptrs += BLOCK_K * weight_stride_k
    if HAS_BIAS:
        bias = bias_ptr + expert * bias_stride
        up += tl.load(bias + UP_START + n, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            more = tl.load(bias + GATE_START + n, mask=column_mask, other=0.0)
            gate += more.to(tl.float32)[None, :]

    if LORA:
        launch_wait(PDL)
        if GATED:
            gate, up = add_gate_up_deltas(
                gate, up, rank_ptr, RANK_STRIDE, first_row, num_rows, arena_ptr, desc64_ptr,
                desc32_ptr, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
            )  # fmt: skip
        else:
            up = add_deltas(
                up, rank_ptr, RANK_STRIDE, first_row, num_rows, arena_ptr, desc64_ptr, desc32_ptr,
                1, columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
            )  # fmt: skip

    if GATED:
        h = gated(gate, up, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
    else:
        h = pointwise(up, KIND, ALPHA)
    h_ptrs = h_ptr + rows.to(tl.int64)[:, None] * intermediate + columns[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
