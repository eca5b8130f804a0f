"""What follows the rows of a plain down product: sums per token, in a fixed order.

The weighted sum is the unfused stage ``finalize`` and the op behind the routed one; fused layers
sum weighted rows in :mod:`.finalize`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed


@triton.jit
def combine_kernel(
    rows_ptr,  # [rows, H]
    weights_ptr,  # [P] float
    pair_to_row_ptr,  # [P] int32/int64, negative = skip the pair
    delta_ptr,  # [P, H] any float dtype, or unused
    out_ptr,  # [T, H]
    hidden,
    out_stride,
    scale,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of two >= TOP_K
    HAS_DELTA: tl.constexpr,
    BY_PAIR: tl.constexpr,  # a pair's row lies at the pair's number, not at pair_to_row
    BLOCK_H: tl.constexpr,
):
    """``out[t] = scale * sum_k w * (rows + delta)`` over the pairs that are not skipped, fp32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    choice = tl.arange(0, CHOICES)
    pairs = token * TOP_K + choice
    row = tl.load(pair_to_row_ptr + pairs, mask=choice < TOP_K, other=-1)
    used = row >= 0
    both = used[:, None] & mask[None, :]
    weight = tl.load(weights_ptr + pairs, mask=used, other=0.0).to(tl.float32)
    if BY_PAIR:
        row = pairs
    row_ptrs = rows_ptr + row.to(tl.int64)[:, None] * hidden + columns[None, :]
    y = tl.load(row_ptrs, mask=both, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(
            delta_ptr + pairs[:, None] * hidden + columns[None, :], mask=both, other=0.0
        )
        y += delta.to(tl.float32)
    y = tl.where(both, y * weight[:, None], 0.0)
    out = tl.sum(y, 0) * scale
    tl.store(out_ptr + token * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_down_delta_kernel(
    out_ptr,  # [T, H] read and written
    delta_ptr,  # [P, H] weighted
    topk_ids_ptr,  # [P] int32/int64, or unused
    hidden,
    out_stride,
    first_expert,
    end_expert,
    scale,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """``out[t] += scale * sum_k delta[t, k]`` over the pairs of experts [first, end), fp32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    choice = tl.arange(0, CHOICES)
    pairs = token * TOP_K + choice
    used = choice < TOP_K
    if HAS_IDS:
        expert = tl.load(topk_ids_ptr + pairs, mask=used, other=-1)
        used = used & (expert >= first_expert) & (expert < end_expert)
    both = used[:, None] & mask[None, :]
    delta = tl.load(delta_ptr + pairs[:, None] * hidden + columns[None, :], mask=both, other=0.0)
    out_ptrs = out_ptr + token * out_stride + columns
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    out += tl.sum(delta.to(tl.float32), 0) * scale
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def run_combine(
    rows: torch.Tensor,
    weights: torch.Tensor,
    pair_to_row: torch.Tensor,
    delta: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    by_pair: bool = False,
) -> None:
    """Launch :func:`combine_kernel` on contiguous tensors; ``out`` may have any row stride.

    ``by_pair``: of ``pair_to_row`` only the sign counts, rows lie at their pairs' numbers.
    """
    (num_tokens, hidden), top_k = out.shape, weights.shape[1]
    block = min(256, triton.next_power_of_2(hidden))
    listed(combine_kernel)[(num_tokens, triton.cdiv(hidden, block))](
        rows, weights, pair_to_row, delta, out, hidden, out.stride(0), scale, TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k), HAS_DELTA=delta is not None,
        BY_PAIR=by_pair, BLOCK_H=block, num_warps=4,
    )  # fmt: skip


def run_add_down_delta(
    out: torch.Tensor,
    delta: torch.Tensor,
    topk_ids: torch.Tensor | None,
    first_expert: int,
    end_expert: int,
    scale: float,
) -> None:
    """Launch :func:`add_down_delta_kernel`; ``delta`` and the ids are contiguous."""
    (num_tokens, hidden), top_k = out.shape, delta.shape[1]
    block = min(256, triton.next_power_of_2(hidden))
    listed(add_down_delta_kernel)[(num_tokens, triton.cdiv(hidden, block))](
        out, delta, topk_ids, hidden, out.stride(0), first_expert, end_expert, scale, TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k), HAS_IDS=topk_ids is not None, BLOCK_H=block,
        num_warps=4,
    )  # fmt: skip
