"""Experts and weights from a router's logits, in one launch; one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.routing import EPSILON, RoutingRule

#: Stands for a choice of -inf or NaN: an expert that takes part is above one that doesn't.
LOWEST = tl.constexpr(-3.0e38)
_NO_ID = tl.constexpr(2**30)
_EPSILON = tl.constexpr(EPSILON)


@triton.jit
def best_of(key, ids):
    """The largest of a 2-D tile and the lowest id that has it."""
    best = tl.max(tl.max(key, axis=1), axis=0)
    return best, tl.min(tl.min(tl.where(key == best, ids, _NO_ID), axis=1), axis=0)


@triton.jit
def bf16_bits(value):
    """The bits of fp32 rounded to bf16, to nearest and ties to even, as int32; NaN stays NaN."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(value == value, rounded, 0x7FC0)


@triton.jit
def choose_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E], or anything without HAS_BIAS
    ids_ptr,  # [T, K] int32 out, unless PACKED
    weights_ptr,  # [T, K] fp32 out, unless PACKED
    packed_ptr,  # [T, K] int32 out, if PACKED
    stride_logits,
    scale,
    group_size,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """See :class:`moegraft.routing.RoutingRule`. The tile is [groups, experts of a group]."""
    token = tl.program_id(0)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_M)[None, :]
    there = (group < NUM_GROUPS) & (member < group_size)
    ids = tl.where(there, group * group_size + member, _NO_ID)
    at = tl.where(there, ids, 0)
    row = logits_ptr + token.to(tl.int64) * stride_logits
    values = tl.load(row + at, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        top = tl.max(tl.max(values, axis=1), axis=0)
        powers = tl.where(there, tl.exp(values - top), 0.0)
        scores = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + at, mask=there, other=0.0).to(tl.float32)
    choice = tl.where(choice > LOWEST, choice, LOWEST)  # NaN too
    choice = tl.where(there, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        best = tl.max(choice, axis=1)[:, None]
        if TOP2:
            # The second best: the best again where two are equal, else the best of the others.
            twice = tl.sum((choice == best).to(tl.int32), axis=1)[:, None] > 1
            second = tl.max(tl.where(choice == best, float("-inf"), choice), axis=1)[:, None]
            second = tl.where(twice, best, second)
            best += tl.where(group_size > 1, second, 0.0)
        best = tl.maximum(best, LOWEST)  # a sum of two lowest is -inf
        left = tl.where(group < NUM_GROUPS, best, float("-inf"))
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            _unused, winner = best_of(left, group)
            kept = kept | (group == winner)
            left = tl.where(group == winner, float("-inf"), left)
        choice = tl.where(kept, choice, float("-inf"))
    k = tl.arange(0, BLOCK_K)
    chosen_ids = tl.full((BLOCK_K,), 0, tl.int32)
    chosen_scores = tl.full((BLOCK_K,), 0.0, tl.float32)
    for i in tl.static_range(TOP_K):
        _unused, expert = best_of(choice, ids)
        score = tl.sum(tl.sum(tl.where(ids == expert, scores, 0.0), axis=1), axis=0)
        chosen_ids = tl.where(k == i, expert, chosen_ids)
        chosen_scores = tl.where(k == i, score, chosen_scores)
        choice = tl.where(ids == expert, float("-inf"), choice)
    if RENORMALISE:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=0) + _EPSILON)
    chosen_scores = chosen_scores * scale
    where = token.to(tl.int64) * TOP_K + k
    if PACKED:
        packed = (chosen_ids << 16) | bf16_bits(chosen_scores)
        tl.store(packed_ptr + where, packed, mask=k < TOP_K)
    else:
        tl.store(ids_ptr + where, chosen_ids, mask=k < TOP_K)
        tl.store(weights_ptr + where, chosen_scores, mask=k < TOP_K)


def run_choose(
    logits: torch.Tensor,
    rule: RoutingRule,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
) -> None:
    """Route T tokens in one launch.

    Args:
        logits: ``[T, E]``, adjacent columns.
        rule: that fits E.
        bias: contiguous ``[E]``, or None.
        ids: contiguous int32 ``[T, K]`` to write: ids, or packed pairs without ``weights``.
        weights: contiguous fp32 ``[T, K]`` to write, or None.
    """
    num_tokens, num_experts = logits.shape
    if not num_tokens:
        return
    size = num_experts // rule.num_groups
    tile = triton.next_power_of_2(rule.num_groups) * triton.next_power_of_2(size)
    listed(choose_kernel)[(num_tokens,)](
        logits,
        logits if bias is None else bias,
        ids,
        ids if weights is None else weights,
        ids,
        logits.stride(0),
        rule.scale,
        size,
        TOP_K=rule.top_k,
        SIGMOID=rule.scoring == "sigmoid",
        RENORMALISE=rule.renormalise,
        NUM_GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        TOP2=rule.group_score == "top2",
        HAS_BIAS=bias is not None,
        PACKED=weights is None,
        BLOCK_G=triton.next_power_of_2(rule.num_groups),
        BLOCK_M=triton.next_power_of_2(size),
        BLOCK_K=triton.next_power_of_2(rule.top_k),
        num_warps=1 if tile <= 512 else 4,
    )
