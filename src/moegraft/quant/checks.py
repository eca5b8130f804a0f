"""What quantised expert weights must have, checked when they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moegraft.errors import MoegraftError
from moegraft.quant.formats import UNQUANTIZED, WeightFormat, format_of

if TYPE_CHECKING:
    from moegraft.types import ExpertWeights, WeightLayout

_ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def num_parts(layout: WeightLayout) -> int:
    """Return how many matrices with scales of their own lie in ``gate_up``, one after the other."""
    return 2 if layout.gate_up_order in ("gate_first", "up_first") else 1


def check_scales(weights: ExpertWeights) -> None:
    """Raise :class:`MoegraftError` unless values and scales are those of the weight format."""
    scales, name = weights.scales, weights.weight_format
    if scales is None or name == UNQUANTIZED:
        have = "no scales" if scales is None else "scales"
        raise MoegraftError(f"Weights of format {name!r} have {have}: both or neither.")
    found = format_of(name)
    if weights.down.dtype != found.element.storage:
        raise MoegraftError(
            f"{name} values are {found.element.storage}, but down is {weights.down.dtype}."
        )
    if not weights.layout.out_major:
        raise MoegraftError(
            f"{name} weights must be [E, out, in]: their blocks lie along the inputs."
        )
    if found.block[0] > 1 and weights.layout.gate_up_order == "interleaved":
        raise MoegraftError(
            f"{name} has blocks of {found.block[0]} rows, which would mix gate and up where these "
            "are interleaved; put gate first."
        )
    if scales.dtype not in _ACTIVATION_DTYPES:
        raise MoegraftError(f"scales.dtype is {scales.dtype}; expected a float dtype of 16 bits.")
    experts, parts = weights.num_experts, num_parts(weights.layout)
    rows = weights.gate_up.shape[1] // parts
    _check("gate_up", scales.gate_up, found, experts, parts, (rows, weights.hidden), weights)
    sizes = (weights.hidden, weights.intermediate)
    _check("down", scales.down, found, experts, 1, sizes, weights)
    _check_global("gate_up_global", scales.gate_up_global, (experts, parts), found, weights)
    _check_global("down_global", scales.down_global, (experts,), found, weights)


def _check(
    what: str,
    scales: torch.Tensor,
    found: WeightFormat,
    experts: int,
    parts: int,
    sizes: tuple[int, int],
    weights: ExpertWeights,
) -> None:
    down, across = found.grid(*sizes)
    shape = (experts, parts * down, across)
    if (tuple(scales.shape), scales.dtype) != (shape, found.scale.storage):
        raise MoegraftError(
            f"The {found.name} scales of {what} are {scales.dtype} {tuple(scales.shape)}; expected "
            f"{found.scale.storage} {shape}."
        )
    if scales.device != weights.device:
        raise MoegraftError(f"The scales of {what} are on {scales.device}, not {weights.device}.")


def _check_global(
    what: str,
    scale: torch.Tensor | None,
    shape: tuple[int, ...],
    found: WeightFormat,
    weights: ExpertWeights,
) -> None:
    if not found.scale.has_global:
        if scale is not None:
            raise MoegraftError(f"{found.name} has no {what}, but one was given.")
        return
    wanted = (shape, torch.float32, weights.device)
    if scale is None or (tuple(scale.shape), scale.dtype, scale.device) != wanted:
        have = "None" if scale is None else f"{scale.dtype} {tuple(scale.shape)} on {scale.device}"
        raise MoegraftError(
            f"{what} of {found.name} weights is {have}; expected fp32 {shape} on {weights.device}."
        )
