"""Which adapter slot each token of a batch has, as SGLang's LoRA backend tells it.

The backend has an int32 slot for each token, -1 = none: new in each eager step, a static buffer in
CUDA graphs, padded with -1. ``reset_routing_cache`` is called before each warm-up and capture: what
is derived from the slots there must become part of that graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.runner import get_is_capture_mode

from moegraft.types import TokenSlots


def batch_slots(backend: Any, batch_info: Any, num_tokens: int) -> TokenSlots | None:
    """Return the slots of a batch, the same object for all its layers; None without an adapter.

    Args:
        backend: SGLang's LoRA backend.
        batch_info: what it prepared for the batch.
        num_tokens: T; rows past the batch's slots have none.
    """
    if not batch_info.has_active_lora and not get_is_capture_mode():
        return None
    mapping: torch.Tensor = batch_info.moe_lora_info.token_lora_mapping
    known = getattr(backend, "_moegraft_slots", None)
    if known is not None and known[0] is mapping and known[1].num_tokens == num_tokens:
        found: TokenSlots = known[1]
        return found
    padded = mapping[:num_tokens].to(torch.int32)
    if padded.shape[0] < num_tokens:
        padded = torch.nn.functional.pad(padded, (0, num_tokens - padded.shape[0]), value=-1)
    found = TokenSlots.of(padded) if padded.device.type == "cpu" else TokenSlots.captured(padded)
    backend._moegraft_slots = (mapping, found)
    return found


def forget_slots(original: Callable[..., None], self: Any) -> None:
    """Derive from the slots again: this forward pass is captured, or warms up a capture."""
    original(self)
    self.lora_backend._moegraft_slots = None
