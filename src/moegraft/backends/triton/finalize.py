"""Stage ``finalize`` on the GPU: a token's weighted rows, summed in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import launch_next, launch_wait


@triton.jit
def finalize_kernel(
    y_ptr,  # [P, H] weighted rows, or [rows, H] with BY_ROW
    pair_row_ptr,  # [P] int32, -1 = not local
    out_ptr,  # [T, H]
    slots_ptr,  # [T] int32; this and the next three only with DELTA
    topk_weights_ptr,  # [P] float
    delta_ptr,  # [P, H], not weighted
    states_ptr,  # [P] int32
    hidden,
    out_stride,
    scale,
    DELTA: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
    BY_ROW: tl.constexpr = False,  # y has the rows of blocks, not of pairs
):
    """``out[t] = scale * sum_k (y + w * delta)[t*K + k]`` over the local pairs that have one, fp32.

    Summed one choice after the other: a sum over a tile's axis takes the order of the tile's
    layout, and that differs with and without DELTA. Pairs without a delta add nothing to their y,
    and a token without a slot asks for no state, since that would be one more round to the L2.
    """
    tl.static_assert(TOP_K <= 64, "one bit per choice")
    launch_next(PDL)
    first = tl.program_id(0).to(tl.int64) * TOP_K
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    local = first * 0
    for k in tl.static_range(TOP_K):
        row = tl.load(pair_row_ptr + first + k, cache_modifier=".cg")
        local |= (row >= 0).to(tl.int64) << k
    if DELTA:
        has_slot = tl.load(slots_ptr + tl.program_id(0)) >= 0
    launch_wait(PDL)
    has_delta = first * 0
    if DELTA:
        for k in tl.static_range(TOP_K):
            state = tl.load(states_ptr + first + k, mask=has_slot, other=0)
            has_delta |= (state >= 256).to(tl.int64) << k
        has_delta &= local
    out = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(TOP_K):
        at = (first + k) * hidden + columns
        if BY_ROW:
            place = tl.load(pair_row_ptr + first + k, cache_modifier=".cg").to(tl.int64)
            at = place * hidden + columns
        is_local = (local >> k) % 2 != 0
        y = tl.load(y_ptr + at, mask=mask & is_local, other=0.0).to(tl.float32)
        if DELTA:
            has = (has_delta >> k) % 2 != 0
            delta = tl.load(delta_ptr + at, mask=mask & has, other=0.0).to(tl.float32)
            weight = tl.load(topk_weights_ptr + first + k).to(tl.float32)
            y = tl.where(has, y + delta * weight, y)
        out += y
    out = out * scale
    out_ptrs = out_ptr + tl.program_id(0).to(tl.int64) * out_stride + columns
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
