"""Stage ``finalize`` on the GPU: a token's weighted rows, summed in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import launch_next, launch_wait


@triton.jit
def finalize_kernel(
    y_ptr,  # [P, H] weighted rows
    pair_row_ptr,  # [P] int32, -1 = not local
    out_ptr,  # [T, H]
    topk_weights_ptr,  # [P] float; this and the next two only with DELTA
    delta_ptr,  # [P, H], not weighted
    states_ptr,  # [P] int32
    hidden,
    out_stride,
    scale,
    DELTA: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of two >= TOP_K
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[t] = scale * sum_k (y + w * delta)[t*K + k]`` over the local pairs that have one, fp32.

    The order is fixed. Pairs without a delta add nothing to their y, not even 0.
    """
    launch_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    choice = tl.arange(0, CHOICES)
    pairs = token * TOP_K + choice
    row = tl.load(pair_row_ptr + pairs, mask=choice < TOP_K, other=-1, cache_modifier=".cg")
    launch_wait(PDL)
    y = tl.load(
        y_ptr + pairs[:, None] * hidden + columns[None, :],
        mask=(row >= 0)[:, None] & mask[None, :],
        other=0.0,
    )
    y = y.to(tl.float32)
    if DELTA:
        state = tl.load(states_ptr + pairs, mask=row >= 0, other=0)
        weight = tl.load(topk_weights_ptr + pairs, mask=row >= 0, other=0.0).to(tl.float32)
        has_delta = (state >= 256)[:, None]
        delta = tl.load(
            delta_ptr + pairs[:, None] * hidden + columns[None, :],
            mask=has_delta & mask[None, :],
            other=0.0,
        )
        y = tl.where(has_delta, y + delta.to(tl.float32) * weight[:, None], y)
    out = tl.sum(y, 0) * scale
    tl.store(out_ptr + token * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
