"""The scales of quantised expert weights, beside the values that ``ExpertWeights`` holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class WeightScales:
    """What turns the stored values of one layer's experts back into weights.

    ``down`` and ``across`` are those of the format's grid for one matrix. Gate and up are matrices
    of their own with a grid each, one after the other as in ``gate_up``; where their rows are
    interleaved they share one.

    Attributes:
        gate_up: ``[E, parts * down, across]``, parts = 2, or 1 without a gate or interleaved.
        down: ``[E, down, across]``.
        gate_up_global: fp32 ``[E, parts]``; None where the format has none.
        down_global: fp32 ``[E]``, likewise.
        dtype: of the activations: bfloat16, float16 or float32.

    Example: NVFP4, E=4, H=32, I=16: ``gate_up`` e4m3 ``[4, 32, 2]``, ``down`` ``[4, 32, 1]``,
    ``gate_up_global`` ``[4, 2]``, ``down_global`` ``[4]``.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_global: torch.Tensor | None = None
    down_global: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The four tensors, None for those that the format lacks."""
        return self.gate_up, self.down, self.gate_up_global, self.down_global

    def to(self, device: torch.device | str) -> WeightScales:
        """Return them on a device; the tensors themselves where they are there."""
        whole = (self.gate_up_global, self.down_global)
        gate_up_global, down_global = (None if s is None else s.to(device) for s in whole)
        return replace(
            self,
            gate_up=self.gate_up.to(device),
            down=self.down.to(device),
            gate_up_global=gate_up_global,
            down_global=down_global,
        )

    def of_experts(self, ids: torch.Tensor) -> WeightScales:
        """Return those of some experts, in the order of int64 ``ids``; copies."""
        whole = (self.gate_up_global, self.down_global)
        gate_up_global, down_global = (None if s is None else s[ids] for s in whole)
        return replace(
            self,
            gate_up=entries(self.gate_up, ids),
            down=entries(self.down, ids),
            gate_up_global=gate_up_global,
            down_global=down_global,
        )


def entries(tensor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Index the first dimension of a tensor of any dtype; torch itself can't with all of them."""
    taken = tensor.view(torch.uint8)[ids] if tensor.element_size() == 1 else tensor[ids]
    return taken.view(tensor.dtype)
