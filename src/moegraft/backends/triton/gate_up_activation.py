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
from moegraft.backends.triton.weights.product import base_product
from moegraft.backends.triton.weights.rows import store_rows


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
    # Of quantised weights, None else: what the base product reads, scales, and the same of h.
    base_ptr,
    base_scales_ptr,
    base_stride,
    scales_ptr,
    globals_ptr,
    scale_stride_e,
    scale_stride_n,
    scale_stride_k,
    global_stride,
    h_base_ptr,
    h_base_scales_ptr,
    h_base_stride,
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
    FORMAT: tl.constexpr,  # of the weights
    WORD_UNIT: tl.constexpr,  # words of one unit of the weights' strides, 4 bits only
    GATE_SCALES: tl.constexpr,
    UP_SCALES: tl.constexpr,
    GATE_GLOBAL: tl.constexpr,
    UP_GLOBAL: tl.constexpr,
    STORE_H: tl.constexpr,  # False: nobody but the next base product reads h
    STORE_ROWS: tl.constexpr,  # that reads a copy of its own
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

    first_column = (pid % num_tiles) * BLOCK_N
    gate, up = base_product(
        x_ptr, x_stride, base_ptr, base_stride, base_scales_ptr, tokens, row_mask, weight_ptr,
        weight_stride_e, weight_stride_n, weight_stride_k, scales_ptr, scale_stride_e,
        scale_stride_n, scale_stride_k, globals_ptr, global_stride, expert, first_column, columns,
        column_mask, hidden, None, 0, 0, FORMAT, WORD_UNIT, GATE_START, UP_START, COLUMN_STEP,
        GATE_SCALES, UP_SCALES, GATE_GLOBAL, UP_GLOBAL, GATED, EVEN_K, EVEN_N, SWAP, BLOCK_M,
        BLOCK_N, BLOCK_K, False, PDL,
    )  # fmt: skip
    if HAS_BIAS:
        bias = bias_ptr + expert * bias_stride
        n = columns.to(tl.int64) * COLUMN_STEP
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
    h = h.to(h_ptr.dtype.element_ty)
    if STORE_H:
        tl.store(h_ptrs, h, mask=mask, eviction_policy="evict_last")
    if STORE_ROWS:
        store_rows(
            h, h_base_ptr, h_base_stride, h_base_scales_ptr, pairs.to(tl.int64), row_mask,
            first_column, intermediate, BLOCK_N,
        )  # fmt: skip
    signal(h_counter_ptr + block, 1, PDL)
    launch_end(PDL)
