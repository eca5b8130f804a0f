"""What the data of :mod:`moegraft.types` checks when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moegraft.errors import MoegraftError
from moegraft.quant.checks import check_scales
from moegraft.quant.formats import UNQUANTIZED

if TYPE_CHECKING:
    from moegraft.types import ExpertWeights

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def check_choice(what: str, found: object, known: Sequence[str]) -> None:
    """Raise :class:`MoegraftError` for a name that is none of the known ones."""
    if found not in known:
        raise MoegraftError(f"There is no {what} {found!r}; choose one of {', '.join(known)}.")


def check_expert_tensors(weights: ExpertWeights) -> None:
    """Raise :class:`MoegraftError` unless shapes, dtypes and devices of a layer's weights agree."""
    wide = 2 if weights.layout.gated else 1
    packed = 2 if weights.down.dtype == torch.uint8 else 1
    if weights.gate_up.dim() != 3 or weights.down.dim() != 3:
        raise MoegraftError(
            f"Expert weights must be 3-D; got gate_up {tuple(weights.gate_up.shape)} and down "
            f"{tuple(weights.down.shape)}."
        )
    if not weights.down.numel():
        raise MoegraftError(
            f"down has shape {tuple(weights.down.shape)}: at least one expert and no size of 0."
        )
    expected_gate_up = (weights.num_experts, wide * weights.intermediate, weights.hidden // packed)
    if tuple(weights.gate_up_oi.shape) != expected_gate_up:
        raise MoegraftError(
            f"gate_up has shape {tuple(weights.gate_up_oi.shape)} as [E, out, in], but down "
            f"{tuple(weights.down_oi.shape)} and layout {weights.layout} ask for "
            f"{expected_gate_up}."
        )
    biases = (
        (weights.gate_up_bias, wide * weights.intermediate),
        (weights.down_bias, weights.hidden),
    )
    for bias, width in biases:
        if bias is not None and tuple(bias.shape) != (weights.num_experts, width):
            raise MoegraftError(
                f"A bias has shape {tuple(bias.shape)}; expected {(weights.num_experts, width)}."
            )
        if bias is not None and (bias.device, bias.is_floating_point()) != (weights.device, True):
            raise MoegraftError(
                f"A bias is {bias.dtype} on {bias.device}; expected a float dtype on "
                f"{weights.device}."
            )
    if weights.gate_up.dtype != weights.down.dtype or weights.gate_up.device != weights.down.device:
        raise MoegraftError(
            f"gate_up is {weights.gate_up.dtype} on {weights.gate_up.device}, down is "
            f"{weights.down.dtype} on {weights.down.device}; they must agree."
        )
    if weights.scales is not None or weights.weight_format != UNQUANTIZED:
        check_scales(weights)


def slot_numbers(slots: list[int] | torch.Tensor) -> torch.Tensor:
    """Return adapter slots as contiguous int32 ``[T]``; below 0 is -1, too large ones stay large.

    Raises:
        MoegraftError: not one whole number per token.
    """
    try:
        given = torch.as_tensor(slots)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MoegraftError(f"The adapter slots {slots!r} are no list of numbers.") from error
    if given.dim() != 1 or (given.numel() and given.dtype not in _INTEGERS):
        raise MoegraftError(
            f"The adapter slots are {given.dtype} {tuple(given.shape)}; expected one whole number "
            "per token, -1 = base."
        )
    return given.clamp(-1, 2**31 - 1).to(torch.int32).contiguous()
