"""Adapters on dense linears: forward hooks add the delta to the rows that have one."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moegraft.hosts.transformers.state import StepState
from moegraft.linear import LinearLora, LinearLoraGroup


def hook_linear(module: nn.Module, lora: LinearLora, state: StepState) -> list[RemovableHandle]:
    """Add ``lora``'s delta to every forward of a linear; rows without one keep their bits."""
    group = LinearLoraGroup([lora])
    running = threading.local()

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.add = None
        slots = state.slots_of(args[0])
        if slots is not None and slots.live and lora.has_delta(slots):
            running.add = group.begin(args[0].reshape(-1, args[0].shape[-1]), slots)

    def add_delta(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        add, running.add = running.add, None
        if add is None:
            return output
        rows = output.reshape(-1, output.shape[-1])
        add([rows])
        return rows.view(output.shape)

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(add_delta)]
