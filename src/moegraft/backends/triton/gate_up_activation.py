"""The run gate_up + activation, fused into one launch that also takes the adapters' delta.

One program per block of rows and tile of columns. It runs its whole K loop over the base weights,
waits for the delta's launch, adds the delta to the rows that have one, applies the activation and
writes h once. The K loop is the same with and without adapters, so a row without one has the same
bits in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.activation import gated, pointwise
from moegraft.backends.triton.delta import add_delta
from moegraft.backends.triton.sync import (
    launch_end,
    launch_next,
    launch_wait,
    signal,
    wait_for,
)


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def gate_up_activation_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # gate_up storage
    bias_ptr,  # [E, 2I] or unused
    h_ptr,  # [rows, I] out, or [P, I] with H_BY_PAIR
    delta_ptr,  # [rows, 2 (1 without a gate), I] fp32, or [P, 2, I] with DELTA "pairs"
    row_flags_ptr,  # [2 (1), rows] int32
    row_pair_ptr,
    block_info_ptr,
    slots_ptr,  # [T] int32; only read for DELTA "rows"
    delta_counter_ptr,  # [blocks]
    h_counter_ptr,  # [blocks]
    hidden,
    intermediate,
    x_stride,
    weight_stride_e,
    weight_stride_n,
    weight_stride_k,
    bias_stride,
    num_tiles,
    num_rows,
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
    DELTA: tl.constexpr,  # "none", "rows" (those with a flag) or "pairs" (all)
    H_BY_PAIR: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    SWAP: tl.constexpr,  # weights as the left operand
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    if DELTA == "none":
        launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    block = pid // num_tiles
    # Past L1: read before launch_wait.
    info = tl.load(block_info_ptr + block, cache_modifier=".cg")
    live_rows = info % 256
    if live_rows == 0:
        launch_end(PDL)
        return
    expert = (info // 256).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    rows = block * BLOCK_M + m
    row_mask = m < live_rows
    columns = (pid % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < intermediate
    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0, cache_modifier=".cg")
    tokens = (pairs // TOP_K).to(tl.int64)

    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tokens[:, None] * x_stride + k[None, :]
    base = weight_ptr + expert * weight_stride_e
    n = columns.to(tl.int64) * COLUMN_STEP
    up_ptrs = base + (UP_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    gate_ptrs = base + (GATE_START + n)[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    if SWAP:
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
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
        if SWAP:
            up = tl.dot(w_up, tl.trans(x), up, input_precision="ieee")
        else:
            up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
        if GATED:
            if EVEN_K and EVEN_N:
                w_gate = tl.load(gate_ptrs)
            else:
                w_gate = tl.load(gate_ptrs, mask=w_mask, other=0.0)
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
    if HAS_BIAS:
        bias = bias_ptr + expert * bias_stride
        up += tl.load(bias + UP_START + n, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            more = tl.load(bias + GATE_START + n, mask=column_mask, other=0.0)
            gate += more.to(tl.float32)[None, :]

    if DELTA != "none":
        if DELTA == "rows":
            slots = tl.load(slots_ptr + tokens, mask=row_mask, other=-1)
            expected = tl.sum((slots >= 0).to(tl.int32), 0) * (2 if GATED else 1)
            wait_for(delta_counter_ptr + block, expected, PDL)
        else:
            launch_wait(PDL)
        delta_rows = pairs if DELTA == "pairs" else rows
        sides: tl.constexpr = 2 if GATED else 1
        delta = delta_ptr + delta_rows.to(tl.int64)[:, None] * (sides * intermediate)
        delta += columns[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        if GATED:
            gate = add_delta(gate, delta, mask, row_flags_ptr, rows, row_mask, DELTA)
            delta += intermediate
            row_flags_ptr += num_rows
        up = add_delta(up, delta, mask, row_flags_ptr, rows, row_mask, DELTA)

    if GATED:
        h = gated(gate, up, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
    else:
        h = pointwise(up, KIND, ALPHA)
    h_rows = pairs if H_BY_PAIR else rows
    h_ptrs = h_ptr + h_rows.to(tl.int64)[:, None] * intermediate + columns[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
    signal(h_counter_ptr + block, 1, PDL)
    launch_end(PDL)
