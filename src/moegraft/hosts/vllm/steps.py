"""Which adapter slot each token of a step has, as vLLM's LoRA metadata object tells it.

vLLM calls that object a punica wrapper: one per model, updated whenever the mapping of tokens to
adapters changes. Facts that the code here rests on:

- On a GPU ``token_mapping_meta.token_lora_mapping`` is a static int32 buffer of slots, -1 = none. A
  step without any adapter leaves it as it was and raises ``no_lora_flag_cpu``; so do steps whose
  rows are padded: behind the last token it holds what an earlier step left, at first what the
  allocator found. It is wiped here before each update.
- On the CPU ``_token_lora_indices`` is the same as int64, kept for every step.
- A CUDA graph is captured per case "no adapter" and "some adapters", and the flag is right at the
  capture. How many adapters are live is not fixed in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from moegraft.types import TokenSlots


class StepSlots:
    """Mixed into vLLM's punica wrappers: the slots of the current step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._moegraft_slots: dict[int, TokenSlots] = {}
        self._forget()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Take the next step's mapping."""
        self._forget()
        super().update_metadata(*args, **kwargs)  # type: ignore[misc]

    def moegraft_slots(self, num_tokens: int) -> TokenSlots | None:
        """Return the slots of the first ``num_tokens`` rows; None when no row has an adapter.

        Layers share what is derived from them. On a GPU only within one forward pass: what one
        derives during a capture becomes part of that graph.
        """
        meta = getattr(self, "token_mapping_meta", None)
        if meta is not None:
            if bool(meta.no_lora_flag_cpu[0]):
                return None
            known = _of_this_forward(self)
            if num_tokens not in known:
                known[num_tokens] = TokenSlots.captured(meta.token_lora_mapping[:num_tokens])
            return known[num_tokens]
        slots = self._moegraft_slots.get(num_tokens)
        if slots is None:
            indices = self._token_lora_indices[:num_tokens]  # type: ignore[attr-defined]
            slots = self._moegraft_slots[num_tokens] = TokenSlots.of(indices)
        return slots if slots.live else None

    def _forget(self) -> None:
        self._moegraft_slots.clear()
        self._token_lora_indices.fill_(-1)  # type: ignore[attr-defined]
        meta = getattr(self, "token_mapping_meta", None)
        if meta is not None:
            meta.token_lora_mapping.fill_(-1)


def _of_this_forward(wrapper: StepSlots) -> dict[int, TokenSlots]:
    """Return what this forward pass has made for a wrapper: number of tokens -> slots."""
    if not is_forward_context_available():
        return {}
    kept: dict[int, dict[int, TokenSlots]] = vars(get_forward_context()).setdefault(
        "moegraft_slots", {}
    )
    return kept.setdefault(id(wrapper), {})


def expert_slots(context: Any, num_tokens: int) -> TokenSlots | None:
    """Return the slots of an experts call; None when no row has an adapter.

    Args:
        context: vLLM's MoE LoRA context. With data-parallel experts it carries the slots of the
            rows that were sent here, which may have adapters when this rank's own batch has none.
        num_tokens: T.
    """
    sent: torch.Tensor | None = context.local_token_lora_mapping
    if sent is None:
        return context.punica_wrapper.moegraft_slots(num_tokens)
    sent = sent[:num_tokens].to(torch.int32)
    if sent.device.type != "cpu":
        return TokenSlots.captured(sent)
    slots = TokenSlots.of(sent)
    return slots if slots.live else None
