"""The run down + lora_expand + routing weight, fused into one launch; finalize.

The same program as :mod:`moegraft.backends.triton.gate_up_activation`; the rows of h are the
blocks' own rows. Writes ``w * (W_down h + b + delta)`` to the row of the pair, so finalize only
sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.lora import add_deltas
from moegraft.backends.triton.sync import launch_next, launch_wait


@triton.jit
def down_expand_kernel(
    h_ptr,  # [rows, I]
    weight_ptr,  # down storage
    bias_ptr,  # [E, H] or unused
    topk_weights_ptr,  # [P] float
    y_ptr,  # [P, H] out, weighted
    rank_ptr,  # [rows, RANK_STRIDE] fp32
    arena_ptr,
    desc64_ptr,
    desc32_ptr,
    row_pair_ptr,
    block_info_ptr,
    hidden,
    intermediate,
    weight_stride_e,
    weight_stride_n,
    weight_stride_k,
    num_tiles,
    HAS_BIAS: tl.constexpr,
    LORA: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    if not LORA:
        launch_wait(PDL)
    launch_next(PDL)
    pid = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    block = pid // num_tiles
    # Past L1: read before launch_wait.
    info = tl.load(block_info_ptr + block, cache_modifier=".cg")
    num_rows = info % 256
    if num_rows == 0:
        return
    expert = (info // 256).to(tl.int64)
    first_row = block * BLOCK_M
    rows = first_row + m
    row_mask = m < num_rows
    columns = (pid % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < hidden
    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0, cache_modifier=".cg")
    pairs = pairs.to(tl.int64)
    weight = tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0).to(tl.float32)

    k = tl.arange(0, BLOCK_K)
    h_ptrs = h_ptr + rows.to(tl.int64)[:, None] * intermediate + k[None, :]
    weight_ptrs = (
        weight_ptr
        + expert * weight_stride_e
        + columns.to(tl.int64)[:, None] * weight_stride_n
        + k[None, :] * weight_stride_k
    )
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, intermediate, BLOCK_K):
        w_mask = column_mask[:, None]
        h_mask = row_mask[:, None]
        if not EVEN_K:
            w_mask = w_mask & (k0 + k < intermediate)[None, :]
            h_mask = h_mask & (k0 + k < intermediate)[None, :]
        h = tl.load(h_ptrs, mask=h_mask, other=0.0)
        if EVEN_K and EVEN_N:
            w = tl.load(weight_ptrs)
        else:
            w = tl.load(weight_ptrs, mask=w_mask, other=0.0)
        y = tl.dot(h, tl.trans(w), y, input_precision="ieee")
        h_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K * weight_stride_k
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * hidden + columns, mask=column_mask, other=0.0)
        y += bias.to(tl.float32)[None, :]

    if LORA:
        launch_wait(PDL)
        y = add_deltas(
            y, rank_ptr, RANK_STRIDE, first_row, num_rows, arena_ptr, desc64_ptr, desc32_ptr, 2,
            columns, column_mask, UNIT, BLOCK_M, BLOCK_R,
        )  # fmt: skip

    y_ptrs = y_ptr + pairs[:, None] * hidden + columns[None, :]
    out = (y * weight[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptrs, out, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def finalize_kernel(
    y_ptr,  # [P, H] weighted rows
    pair_row_ptr,  # [P] int32, -1 = not local
    out_ptr,  # [T, H]
    hidden,
    out_stride,
    scale,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of two >= TOP_K
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[t] = scale * sum_k y[t*K + k]`` over the local pairs, fp32, in a fixed order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    choice = tl.arange(0, CHOICES)
    pairs = token * TOP_K + choice
    row = tl.load(pair_row_ptr + pairs, mask=choice < TOP_K, other=-1, cache_modifier=".cg")
    launch_wait(PDL)
    launch_next(PDL)
    y = tl.load(
        y_ptr + pairs[:, None] * hidden + columns[None, :],
        mask=(row >= 0)[:, None] & mask[None, :],
        other=0.0,
    )
    out = tl.sum(y.to(tl.float32), 0) * scale
    tl.store(out_ptr + token * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
