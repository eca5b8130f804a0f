"""A layer's experts in a weight format: made from 16-bit ones, and read back one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from moegraft.errors import MoegraftError
from moegraft.quant.checks import num_parts
from moegraft.quant.formats import UNQUANTIZED, WeightFormat, format_of
from moegraft.quant.matrices import QuantisedMatrix, dequantise, quantise
from moegraft.types import ExpertWeights, WeightScales

Side = Literal["gate_up", "down"]


def expert_matrix(
    weights: ExpertWeights, side: Side, expert: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return one expert's weights ``[out, in]``, dequantised where they are quantised.

    Args:
        weights: the layer's, of any format.
        side: ``gate_up``, in the host's order of rows, or ``down``.
        expert: local id.
        dtype: of the result; exact in fp32 for every format.
    """
    stored = weights.gate_up if side == "gate_up" else weights.down
    scales = weights.scales
    if scales is None:
        plain = stored[expert] if weights.layout.out_major else stored[expert].T
        return plain.to(dtype)
    parts = num_parts(weights.layout) if side == "gate_up" else 1
    grid = scales.gate_up if side == "gate_up" else scales.down
    whole = scales.gate_up_global if side == "gate_up" else scales.down_global
    matrix = QuantisedMatrix(
        stored[expert].unflatten(0, (parts, -1)),
        grid[expert].unflatten(0, (parts, -1)),
        None if whole is None else whole[expert].reshape(parts),
    )
    return dequantise(matrix, format_of(weights.weight_format)).flatten(0, 1).to(dtype)


def weight_format_of(weights: ExpertWeights) -> WeightFormat | None:
    """Return the weights' format; None for unquantised ones."""
    return None if weights.scales is None else format_of(weights.weight_format)


def quantise_experts(weights: ExpertWeights, name: str) -> ExpertWeights:
    """Return a layer's weights in another format: new tensors, biases shared.

    Args:
        weights: unquantised ones. Where they are ``[E, in, out]``, the result is ``[E, out, in]``.
        name: of :data:`moegraft.quant.FORMATS`.

    Raises:
        UnsupportedError: there is no such format.
        MoegraftError: quantised weights, or values that the format can't hold.
    """
    found = format_of(name)
    if weights.scales is not None:
        raise MoegraftError(
            f"The weights are {weights.weight_format} already; quantise the 16-bit ones."
        )
    parts = num_parts(weights.layout)
    gate_up = [quantise(w.unflatten(0, (parts, -1)), found) for w in weights.gate_up_oi]
    down = [quantise(w, found) for w in weights.down_oi]
    has_global = found.scale.has_global
    return replace(
        weights,
        gate_up=torch.stack([part.values.flatten(0, 1) for part in gate_up]),
        down=torch.stack([part.values for part in down]),
        layout=replace(weights.layout, out_major=True),
        weight_format=name,
        scales=WeightScales(
            torch.stack([part.scales.flatten(0, 1) for part in gate_up]),
            torch.stack([part.scales for part in down]),
            _stack([part.global_scale for part in gate_up]) if has_global else None,
            _stack([part.global_scale for part in down]) if has_global else None,
            weights.dtype,
        ),
    )


def dequantise_experts(weights: ExpertWeights, dtype: torch.dtype | None = None) -> ExpertWeights:
    """Return the same weights unquantised, ``[E, out, in]`` in ``dtype`` (None = of the scales)."""
    if weights.scales is None:
        return weights
    dtype = weights.scales.dtype if dtype is None else dtype
    experts = range(weights.num_experts)
    return replace(
        weights,
        gate_up=torch.stack([expert_matrix(weights, "gate_up", e, dtype) for e in experts]),
        down=torch.stack([expert_matrix(weights, "down", e, dtype) for e in experts]),
        weight_format=UNQUANTIZED,
        scales=None,
    )


def _stack(scales: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.stack([scale for scale in scales if scale is not None])
