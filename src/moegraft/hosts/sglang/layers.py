"""SGLang's LoRA wrapper of experts, with moegraft behind it: the hooks around its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.runtime_context import LoRABatchLayout

from moegraft.hosts.sglang.eligible import experts_formula
from moegraft.hosts.sglang.experts import Experts
from moegraft.hosts.sglang.pools import leave
from moegraft.hosts.sglang.steps import batch_slots


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
    info = self.lora_backend.get_batch_info(LoRABatchLayout.TP_GLOBAL)
    slots = batch_slots(self.lora_backend, info, sent.hidden_states.shape[0])
    out = served.run(self, sent.hidden_states, sent.topk_output, slots)
    combined: torch.Tensor = dispatcher.combine(combine_input=StandardCombineInput(out))
    return combined
