"""Device code that both kernels of ``linear_lora`` share."""

from __future__ import annotations

import triton
import triton.language as tl

#: Projections of one launch; more are split.
MAX_PROJECTIONS = 4


@triton.jit
def pick(index, value0, value1, value2, value3, NUM_PROJECTIONS: tl.constexpr):
    """Return one of the projections' values."""
    value = value0
    if NUM_PROJECTIONS > 1:
        value = tl.where(index >= 1, value1, value)
    if NUM_PROJECTIONS > 2:
        value = tl.where(index >= 2, value2, value)
    if NUM_PROJECTIONS > 3:
        value = tl.where(index >= 3, value3, value)
    return value


@triton.jit
def _word(record, i: tl.constexpr, is_used):
    return tl.load(record + i, mask=is_used, other=0, eviction_policy="evict_last")


@triton.jit
def load_record(record, is_used, matrix: tl.constexpr, arena_ptr, UNIT: tl.constexpr):
    """Return (pointer to A (0) or B (1), elements between its rank rows, live rank, scale).

    The rank is 0 unless ``is_used``. The loads are masked so that all are on their way at once:
    the compiler moves plain ones behind the branch that asks for the rank. Records are small and
    every step reads them again, so they are asked to stay in the L2.
    """
    offset = _word(record, matrix, is_used) * UNIT
    stride = _word(record, 4 + matrix, is_used).to(tl.int32)
    # The low halves of words 6 and 7.
    rank = _word(record, 6, is_used).to(tl.int32)
    scale = _word(record, 7, is_used).to(tl.int32).to(tl.float32, bitcast=True)
    ptr = arena_ptr + tl.multiple_of(offset, UNIT)
    return ptr, tl.multiple_of(stride, UNIT), rank, scale


@triton.jit
def load_b(b_ptr, b_stride, first_rank, rank, columns, size_n, BLOCK_R: tl.constexpr):
    """Return B ``[BLOCK_R, BLOCK_N]``; 0 past the live rank and past the last column."""
    r = first_rank + tl.arange(0, BLOCK_R)
    mask = (r < rank)[:, None] & (columns < size_n)[None, :]
    return tl.load(b_ptr + r[:, None] * b_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def add_product(x, a, acc):
    """Return ``acc + x @ a.T`` in fp32; of two dtypes both are read as fp32."""
    if x.dtype != a.dtype:  # a router in fp32 over a bank in bf16
        x = x.to(tl.float32)
        a = a.to(tl.float32)
    return tl.dot(x, tl.trans(a), acc, input_precision="ieee")


@triton.jit
def expand(s, b):
    """Return ``s @ b`` in fp32. A 16-bit B meets S as a high and a low part: S is not rounded."""
    high = s.to(b.dtype)
    delta = tl.dot(high, b, input_precision="ieee")
    if b.dtype != tl.float32:
        low = (s - high.to(tl.float32)).to(b.dtype)
        delta = tl.dot(low, b, delta, input_precision="ieee")
    return delta
