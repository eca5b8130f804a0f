"""The scales of quantised expert weights, beside the values that ``ExpertWeights`` holds."""

from __future__ import annotations

from dataclasses import dataclass

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
