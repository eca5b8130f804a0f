"""Adapters on dense linears: the delta is added to the rows that have one.

A plain linear gets a forward hook. A linear that transformers has sharded gets the delta inside of
the forward around it, before its ranks' outputs are combined: a partial sum is then added to a
partial sum, and counts once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moegraft.errors import MoegraftError
from moegraft.hosts.transformers.row_vectors import RowVectors
from moegraft.hosts.transformers.sharding import is_sharded, style_of
from moegraft.hosts.transformers.state import StepState
from moegraft.linear import LinearLora


class _StyledForward:
    """A handle that puts a sharded linear's forward back."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self._module = module
        self._forward = forward

    def remove(self) -> None:
        """Restore the forward."""
        self._module.__dict__["forward"] = self._forward


def hook_linear(
    module: nn.Module, lora: LinearLora, state: StepState, vectors: RowVectors | None = None
) -> list[Any]:
    """Add ``lora``'s delta to every forward of a linear; rows without one keep their bits.

    ``vectors`` come first: those of an adapter belong to its factors, so where there are none here
    there are no vectors either.
    """
    style = style_of(lora.table.site.name, module)

    def with_delta(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        slots = state.slots_of(x)
        if slots is None or not slots.live or not lora.has_delta(slots):
            return output
        if is_sharded(x) or is_sharded(output):
            raise MoegraftError(
                f"{lora.table.site.name} ran on tensors that are spread over ranks, as it does for "
                "gradients: with adapters, use torch.no_grad()."
            )
        rows = output.reshape(-1, output.shape[-1])
        if vectors is not None:
            vectors.apply(rows, slots)
        lora.add_to(rows, x.reshape(-1, x.shape[-1]), slots)
        return rows.view(output.shape)

    def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return with_delta(args[0], output)

    if style is None:
        return [module.register_forward_hook(hook)]
    shadowed, plain = module.__dict__["forward"], style["original_forward"]

    def inner_forward(x: torch.Tensor) -> torch.Tensor:
        return with_delta(x, plain(x))

    module.__dict__["forward"] = inner_forward
    style["self"].install_forward(module, style["mesh"])
    return [_StyledForward(module, shadowed)]
