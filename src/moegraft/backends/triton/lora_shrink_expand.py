"""The run lora_shrink + lora_expand as a launch of its own, before the GEMM that adds its delta.

Few programs, so that the GEMM, which starts beside them with dependent launch, has most of the
machine. :mod:`moegraft.backends.triton.segment_delta` is what they do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.segment_delta import run_unit
from moegraft.backends.triton.sync import launch_end, launch_next, launch_wait


@triton.jit(do_not_specialize=["num_units", "num_pairs", "num_slots", "map_stride", "h_tiles"])
def lora_shrink_expand_kernel(
    x_ptr,
    delta_ptr,
    states_ptr,
    arena_ptr,
    segments_ptr,
    row_pair_ptr,
    records_ptr,
    records_i32_ptr,
    map_ptr,
    h_counter_ptr,
    h_tiles,
    num_units,
    num_pairs,
    size_k,
    size_n,
    x_stride,
    slot_stride,
    map_stride,
    num_slots,
    TOP_K: tl.constexpr,
    DOWN: tl.constexpr,
    SIDES: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run the units; arguments are those of :func:`run_unit`."""
    if not DOWN:
        launch_wait(PDL)
    launch_next(PDL)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        run_unit(
            unit, x_ptr, delta_ptr, states_ptr, arena_ptr, segments_ptr, row_pair_ptr, records_ptr,
            records_i32_ptr, map_ptr, h_counter_ptr, h_tiles, num_pairs, size_k, size_n, x_stride,
            slot_stride, map_stride, num_slots, TOP_K, DOWN, SIDES, SPLITS, UNIT, EVEN_K, EVEN_N,
            BLOCK_ROWS, BLOCK_M, BLOCK_R, BLOCK_K, BLOCK_N, STAGES, PDL,
        )  # fmt: skip
    launch_end(PDL)
