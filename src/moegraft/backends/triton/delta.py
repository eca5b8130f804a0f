"""Device code that adds an adapters' delta to the accumulator of a GEMM."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_delta(acc, delta_ptrs, mask, row_flags_ptr, rows, row_mask, DELTA: tl.constexpr):
    """Return ``acc`` ``[BLOCK_M, BLOCK_N]`` with the delta added to the rows that have one.

    DELTA "rows": rows whose flag is set; "pairs": all rows. Rows are selected, not multiplied by a
    mask, so what lies in the delta of other rows (anything, NaN too) reaches nothing. Flags and
    delta are loaded side by side, past L1: another launch has just written them.
    """
    delta = tl.load(delta_ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if DELTA == "rows":
        flags = tl.load(row_flags_ptr + rows, mask=row_mask, other=0, cache_modifier=".cg")
        return tl.where((flags != 0)[:, None], acc + delta, acc)
    else:
        return acc + delta
