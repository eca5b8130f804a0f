"""CPU stage ``permute``."""

from __future__ import annotations

import torch

from moegraft.stages import Permutation
from moegraft.types import TokenSlots


def permute(
    topk_ids: torch.Tensor, slots: TokenSlots | None, num_experts: int, expert_offset: int
) -> Permutation:
    """See :meth:`moegraft.stages.Stages.permute`."""
    num_tokens, top_k = topk_ids.shape
    local = topk_ids.reshape(-1).to(torch.int64) - expert_offset
    is_local = (local >= 0) & (local < num_experts)
    # Pairs of other ranks sort behind every local expert, and are cut off.
    key = torch.where(is_local, local, num_experts)
    key, row_to_pair = torch.sort(key, stable=True)
    counts = torch.bincount(key, minlength=num_experts + 1).tolist()
    offsets = [0]
    for count in counts[:num_experts]:
        offsets.append(offsets[-1] + count)
    num_rows = offsets[-1]
    row_to_pair = row_to_pair[:num_rows]
    row_to_token = row_to_pair // top_k
    row_to_slot = None if slots is None or not slots.live else slots.slots[row_to_token].long()
    return Permutation(
        row_to_pair,
        row_to_token,
        key[:num_rows],
        tuple(offsets),
        row_to_slot,
        num_tokens,
        top_k,
    )
