"""CPU stage ``permute``."""

from __future__ import annotations

from functools import lru_cache

import torch

from moegraft.stages import Permutation
from moegraft.types import TokenSlots


def permute(
    topk_ids: torch.Tensor, slots: TokenSlots | None, num_experts: int, expert_offset: int
) -> Permutation:
    """See :meth:`moegraft.stages.Stages.permute`."""
    num_tokens, top_k = topk_ids.shape
    experts = topk_ids.reshape(-1).to(torch.int64)
    if expert_offset:
        experts = experts - expert_offset
    num_pairs = num_rows = experts.shape[0]
    key, row_to_pair = torch.sort(experts, stable=True)
    all_local = num_pairs > 0 and int(key[0]) >= 0 and int(key[-1]) < num_experts
    if not all_local:
        # Pairs of other ranks sort behind every local expert, and are cut off.
        key = experts.where((experts >= 0) & (experts < num_experts), num_experts)
        key, row_to_pair = torch.sort(key, stable=True)
    expert_ends = torch.searchsorted(key, _arange(num_experts), right=True, out_int32=True)
    pair_to_row = torch.empty_like(row_to_pair).scatter_(0, row_to_pair, _arange(num_pairs))
    if not all_local:
        num_rows = int(expert_ends[-1])
        key, row_to_pair = key[:num_rows], row_to_pair[:num_rows]
        pair_to_row = pair_to_row.where(pair_to_row < num_rows, -1)
    row_to_token = row_to_pair // top_k
    has_lora = slots is not None and bool(slots.live)
    return Permutation(
        row_to_pair=row_to_pair,
        row_to_token=row_to_token,
        row_to_expert=key,
        pair_to_row=pair_to_row,
        pair_to_expert=experts,
        expert_ends=expert_ends,
        row_to_slot=slots.slots_i64[row_to_token] if slots is not None and has_lora else None,
        num_tokens=num_tokens,
        top_k=top_k,
    )


@lru_cache(maxsize=64)
def _arange(length: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(length)
