"""SGLang's LoRA wrapper of experts, with moegraft behind it: the hooks around its methods.

SGLang wraps a model's layers, then makes the memory pool. Per batch its LoRA backend has an object
with a slot for each token, -1 = none: int32, new in each eager step, a static buffer in CUDA
graphs, padded with -1. ``reset_routing_cache`` is called before each warm-up and capture: what is
derived from the slots there must become part of that graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.model_executor.runner import get_is_capture_mode

from moegraft.hosts.sglang.eligible import experts_formula
from moegraft.hosts.sglang.experts import Experts
from moegraft.hosts.sglang.pools import leave
from moegraft.types import TokenSlots


def after_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a layer, and decide whether it runs on moegraft."""
    original(self, *args, **kwargs)
    found = experts_formula(self)
    if isinstance(found, str):
        leave(self, found)
    else:
        self._moegraft = Experts(self, found)


def forward(
    original: Callable[..., torch.Tensor],
    self: Any,
    hidden_states: torch.Tensor,
    topk_output: Any,
    lora_info: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a layer whose batch may have adapters."""
    served = self._moegraft
    if served is None or not TopKOutputChecker.format_is_standard(topk_output):
        return original(self, hidden_states, topk_output, lora_info, **kwargs)
    dispatcher = self.base_layer.dispatcher
    sent = dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    slots = _slots(self.lora_backend, lora_info, sent.hidden_states.shape[0])
    out = served.run(self, sent.hidden_states, sent.topk_output, slots)
    combined: torch.Tensor = dispatcher.combine(combine_input=StandardCombineInput(out))
    return combined


def forget_slots(original: Callable[..., None], self: Any) -> None:
    """Derive from the slots again: this forward pass is captured, or warms up a capture."""
    original(self)
    self.lora_backend._moegraft_slots = None


def _slots(backend: Any, lora_info: Any, num_tokens: int) -> TokenSlots | None:
    """Return the slots of a batch, the same object for all its layers; None without an adapter."""
    if not lora_info.has_active_lora and not get_is_capture_mode():
        return None
    mapping: torch.Tensor = lora_info.token_lora_mapping
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
