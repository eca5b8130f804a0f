"""Device code that adds the adapters' delta to the accumulator of a GEMM."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_delta(acc, delta_ptrs, mask, has_delta):
    """Return ``acc`` ``[BLOCK_M, BLOCK_N]`` with the delta added to the rows that have one.

    Rows are selected, not multiplied by a mask, so what lies in the delta of other rows (anything,
    NaN too) reaches nothing. Loaded past L1: another program has just written it.
    """
    delta = tl.load(delta_ptrs, mask=mask & has_delta[:, None], other=0.0, cache_modifier=".cg")
    return tl.where(has_delta[:, None], acc + delta.to(tl.float32), acc)
