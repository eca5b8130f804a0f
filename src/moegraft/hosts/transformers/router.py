"""Adapters on routers: delta logits per row, for whatever the router does with its logits.

A router class owns a plain ``weight`` ``[E, H]`` and calls ``F.linear`` on it somewhere inside its
forward. A torch function mode, active only during that forward, adds the delta to the result of
that very call, before softmax, top-k or bias correction see it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from moegraft.errors import HOW_TO_SKIP, UnsupportedError
from moegraft.hosts.transformers.state import StepState
from moegraft.linear import LinearLora
from moegraft.types import TokenSlots


class _AddDelta(TorchFunctionMode):
    """Adds the delta to the one ``F.linear`` whose weight has the router's shape."""

    def __init__(self, shape: torch.Size, lora: LinearLora, slots: TokenSlots) -> None:
        super().__init__()
        self._shape = shape
        self._lora = lora
        self._slots = slots
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.linear and args[1].shape == self._shape:
            self.calls += 1
            rows = output.reshape(-1, output.shape[-1])
            self._lora.add_to(rows, args[0].reshape(-1, args[0].shape[-1]), self._slots)
            output = rows.view(output.shape)
        return output


def hook_router(
    path: str, module: nn.Module, lora: LinearLora, state: StepState
) -> list[RemovableHandle]:
    """Add ``lora``'s delta to a router's logits in every forward.

    Raises (in the forward): UnsupportedError when the router does not compute its logits by
    exactly one ``F.linear``, so the delta would be lost or doubled.
    """
    running = threading.local()

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.mode = None  # one that an interrupt left behind was ended with its rows
        slots = state.current
        if slots is not None and slots.live and lora.has_delta(slots):
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            mode = _AddDelta(weight.shape, lora, slots)
            state.enter_mode(mode)
            running.mode = mode

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mode: _AddDelta | None = getattr(running, "mode", None)
        if mode is None:
            return
        running.mode = None
        state.leave_mode()
        if mode.calls != 1 and output is not None:
            raise UnsupportedError(
                f"{path} ({type(module).__name__}) multiplies by its weight {mode.calls} times per "
                "forward, so router LoRA can't be applied; load the adapter without its tensors: "
                f"{HOW_TO_SKIP}"
            )

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]
