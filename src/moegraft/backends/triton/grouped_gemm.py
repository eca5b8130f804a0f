"""A grouped GEMM over the blocks of rows: stage ``down`` with the routing weight; also raw.

The same program as :mod:`moegraft.backends.triton.gate_up_activation` with one accumulator. As
``down`` it reads h and writes ``w * (W_down h + b)`` of every pair, for finalize to sum; in the
unfused modes with the delta, which is there before it starts (fused ones add that in finalize).
As the unfused ``gate_up`` it reads x per token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.add_delta import add_delta
from moegraft.backends.triton.segment_delta import run_unit
from moegraft.backends.triton.sync import (
    launch_end,
    launch_next,
    launch_wait,
    peek,
    wait_marked,
)
from moegraft.backends.triton.weights.product import base_product


@triton.jit(
    do_not_specialize=[
        "num_tiles", "h_tiles", "num_pairs", "map_stride", "num_slots", "num_units",
        "delta_programs",
    ]
)  # fmt: skip
def grouped_gemm_kernel(
    x_ptr,  # [P, K], or [T, K] with X_BY_TOKEN
    weight_ptr,  # [E, N, K] by strides
    bias_ptr,  # [E, N] or unused
    topk_weights_ptr,  # [P] float, or unused
    out_ptr,  # [P, N] out
    delta_ptr,  # [P, N]
    states_ptr,  # [P] int32
    row_pair_ptr,
    block_info_ptr,
    slots_ptr,  # [T] int32; only read with HAS_DELTA
    h_counter_ptr,  # [blocks]
    h_tiles,  # what a block's counter reaches when its rows of x are there
    size_n,
    size_k,
    x_stride,
    weight_stride_e,
    weight_stride_n,
    weight_stride_k,
    bias_stride,
    num_tiles,
    num_pairs,
    # Of quantised weights, None else: what the base product reads, and scales.
    base_ptr,
    base_scales_ptr,
    base_stride,
    scales_ptr,
    globals_ptr,
    scale_stride_e,
    scale_stride_n,
    scale_stride_k,
    global_stride,
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
    AFTER_H: tl.constexpr,  # x is h of this layer: wait for a block's rows, not for the launch
    X_BY_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,  # multiply by the routing weight
    HAS_BIAS: tl.constexpr,
    HAS_DELTA: tl.constexpr,  # add the delta of the pairs whose state says that there is one
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    SWAP: tl.constexpr,  # weights as the left operand
    FORMAT: tl.constexpr,  # of the weights
    WORD_UNIT: tl.constexpr,  # words of one unit of the weights' strides, 4 bits only
    OUT_PARTS: tl.constexpr,  # a row of out has so many times size_n columns
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
    if not AFTER_H:
        launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    if UNITS:
        if pid < delta_programs:
            for unit in range(pid, num_units, delta_programs):
                run_unit(
                    unit, x_ptr, delta_ptr, states_ptr, arena_ptr, segments_ptr, row_pair_ptr,
                    records_ptr, records_i32_ptr, map_ptr, h_counter_ptr, h_tiles, num_pairs,
                    size_k, size_n, x_stride, slot_stride, map_stride, num_slots, TOP_K, True, 1,
                    SPLITS, UNIT, DELTA_EVEN_K, DELTA_EVEN_N, BLOCK_M, DELTA_M, DELTA_R, DELTA_K,
                    DELTA_N, DELTA_STAGES, PDL,
                )  # fmt: skip
            return
        pid -= delta_programs
    m = tl.arange(0, BLOCK_M)
    block = pid // num_tiles
    # Past L1: read before launch_wait.
    info = tl.load(block_info_ptr + block, cache_modifier=".cg")
    seen = 0
    if AFTER_H:
        seen = peek(h_counter_ptr + block, PDL)
    live_rows = info % 256
    if live_rows == 0:
        launch_end(PDL)
        return
    expert = (info // 256).to(tl.int64)
    rows = block * BLOCK_M + m
    row_mask = m < live_rows
    columns = (pid % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < size_n
    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0, cache_modifier=".cg")
    # What the end needs is asked for now: its latency passes while the K loop runs.
    if HAS_DELTA:
        has_slot = tl.load(slots_ptr + pairs // TOP_K, mask=row_mask, other=-1) >= 0
    if WEIGHTED:
        weight = tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0).to(tl.float32)
    x_rows = pairs // TOP_K if X_BY_TOKEN else pairs

    _, acc = base_product(
        x_ptr, x_stride, base_ptr, base_stride, base_scales_ptr, x_rows.to(tl.int64), row_mask,
        weight_ptr, weight_stride_e, weight_stride_n, weight_stride_k, scales_ptr, scale_stride_e,
        scale_stride_n, scale_stride_k, globals_ptr, global_stride, expert,
        (pid % num_tiles) * BLOCK_N, columns, column_mask, size_k, h_counter_ptr + block, seen,
        h_tiles, FORMAT, WORD_UNIT, 0, 0, 1, 0, 0, 0, 0, False, EVEN_K, EVEN_N, SWAP, BLOCK_M,
        BLOCK_N, BLOCK_K, AFTER_H, PDL,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * bias_stride + columns, mask=column_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]

    if HAS_DELTA:
        has_delta = wait_marked(states_ptr + pairs, SPLITS, has_slot, PDL)
        delta = delta_ptr + pairs.to(tl.int64)[:, None] * size_n + columns[None, :]
        acc = add_delta(acc, delta, column_mask[None, :], has_delta)
    if WEIGHTED:
        acc = acc * weight[:, None]
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * (size_n * OUT_PARTS) + columns[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(out_ptrs, out, mask=mask, eviction_policy="evict_last")
    launch_end(PDL)
