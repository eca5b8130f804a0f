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
from moegraft.backends.triton.add_delta import add_delta
from moegraft.backends.triton.segment_delta import run_unit
from moegraft.backends.triton.sync import (
    launch_end,
    launch_next,
    launch_wait,
    signal,
    wait_marked,
)


@triton.jit(
    do_not_specialize=[
        "num_tiles", "num_pairs", "map_stride", "num_slots", "num_units", "delta_programs",
    ]
)  # fmt: skip
def gate_up_activation_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # gate_up storage
    bias_ptr,  # [E, 2I] or unused
    h_ptr,  # [P, I] out
    delta_ptr,  # [P, 2 (1 without a gate), I]
    states_ptr,  # [2 (1), P] int32
    row_pair_ptr,
    block_info_ptr,
    slots_ptr,  # [T] int32; only read for DELTA "some"
    h_counter_ptr,  # [blocks]
    hidden,
    intermediate,
    x_stride,
    weight_stride_e,
    weight_stride_n,
    weight_stride_k,
    bias_stride,
    num_tiles,
    num_pairs,
    # The delta's units, if this launch runs them: see segment_delta.
    arena_ptr,
    segments_ptr,
    records_ptr,
    records_i32_ptr,
    map_ptr,
    slot_stride,
    map_stride,
    num_slots,
    num_units,
    delta_programs,
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
    DELTA: tl.constexpr,  # "none", "some" (pairs whose state says so) or "all" pairs
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    SWAP: tl.constexpr,  # weights as the left operand
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNITS: tl.constexpr,  # the first delta_programs programs run the delta's units
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    DELTA_EVEN_K: tl.constexpr,
    DELTA_EVEN_N: tl.constexpr,
    DELTA_M: tl.constexpr,
    DELTA_R: tl.constexpr,
    DELTA_K: tl.constexpr,
    DELTA_N: tl.constexpr,
    DELTA_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    if UNITS or DELTA != "some":
        launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    sides: tl.constexpr = 2 if GATED else 1
    if UNITS:
        if pid < delta_programs:
            for unit in range(pid, num_units, delta_programs):
                run_unit(
                    unit, x_ptr, delta_ptr, states_ptr, arena_ptr, segments_ptr, row_pair_ptr,
                    records_ptr, records_i32_ptr, map_ptr, h_counter_ptr, 0, num_pairs, hidden,
                    intermediate, x_stride, slot_stride, map_stride, num_slots, TOP_K, False, sides,
                    SPLITS, UNIT, DELTA_EVEN_K, DELTA_EVEN_N, BLOCK_M, DELTA_M, DELTA_R, DELTA_K,
                    DELTA_N, DELTA_STAGES, PDL,
                )  # fmt: skip
            return
        pid -= delta_programs
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
    if DELTA == "some":  # asked for now: its latency passes while the K loop runs
        has_slot = tl.load(slots_ptr + tokens, mask=row_mask, other=-1) >= 0

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
        # Weights first: x has to wait for the rows' numbers.
        if EVEN_K and EVEN_N:
            w_up = tl.load(up_ptrs)
        else:
            w_up = tl.load(up_ptrs, mask=w_mask, other=0.0)
        if GATED:
            if EVEN_K and EVEN_N:
                w_gate = tl.load(gate_ptrs)
            else:
                w_gate = tl.load(gate_ptrs, mask=w_mask, other=0.0)
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
    if HAS_BIAS:
        bias = bias_ptr + expert * bias_stride
        up += tl.load(bias + UP_START + n, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            more = tl.load(bias + GATE_START + n, mask=column_mask, other=0.0)
            gate += more.to(tl.float32)[None, :]

    if DELTA != "none":
        delta = delta_ptr + pairs.to(tl.int64)[:, None] * (sides * intermediate) + columns[None, :]
        has_gate = row_mask
        has_up = row_mask
        if DELTA == "some":
            states = states_ptr + pairs
            if GATED:
                has_gate = wait_marked(states, SPLITS, has_slot, PDL)
                states += num_pairs
            has_up = wait_marked(states, SPLITS, has_slot, PDL)
        if GATED:
            gate = add_delta(gate, delta, column_mask[None, :], has_gate)
            delta += intermediate
        up = add_delta(up, delta, column_mask[None, :], has_up)

    if GATED:
        h = gated(gate, up, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
    else:
        h = pointwise(up, KIND, ALPHA)
    h_ptrs = h_ptr + pairs.to(tl.int64)[:, None] * intermediate + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_last")
    signal(h_counter_ptr + block, 1, PDL)
    launch_end(PDL)
