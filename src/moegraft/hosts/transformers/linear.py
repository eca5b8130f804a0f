"""Adapters on dense linears: a forward hook adds the delta to the rows that have one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moegraft.hosts.transformers.state import StepState
from moegraft.linear import LinearLora


def hook_linear(module: nn.Module, lora: LinearLora, state: StepState) -> list[RemovableHandle]:
    """Add ``lora``'s delta to every forward of a linear; rows without one keep their bits."""

    def add_delta(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        slots = state.slots_of(args[0])
        if slots is None or not slots.live or not lora.has_delta(slots):
            return output
        rows = output.reshape(-1, output.shape[-1])
        lora.add_to(rows, args[0].reshape(-1, args[0].shape[-1]), slots)
        return rows.view(output.shape)

    return [module.register_forward_hook(add_delta)]
