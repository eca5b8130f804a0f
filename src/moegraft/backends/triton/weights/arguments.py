"""What a launch of a GEMM kernel passes about its weights' format."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moegraft.backends.triton.weights.rows import BaseRows
from moegraft.quant.checks import num_parts
from moegraft.quant.formats import UNQUANTIZED, format_of
from moegraft.types import ExpertWeights

_ABSENT: dict[str, Any] = dict.fromkeys(
    (
        *("base_ptr", "base_scales_ptr", "base_stride", "scales_ptr", "globals_ptr"),
        *("scale_stride_e", "scale_stride_n", "scale_stride_k", "global_stride"),
    )
)


class Stored(NamedTuple):
    """A weights' tensor as a kernel reads it.

    Attributes:
        tensor: the values; int32 words of eight 4-bit ones.
        strides: of experts, outputs and inputs, in elements, or in ``unit`` words.
        unit: 4 where strides are whole 16 bytes, which the compiler cannot see in their numbers.
    """

    tensor: torch.Tensor
    strides: tuple[int, int, int]
    unit: int

    @staticmethod
    def of(weight: torch.Tensor) -> Stored:
        """Describe ``[E, out, in]``, any strides."""
        if weight.dtype != torch.uint8:
            return Stored(weight, (weight.stride(0), weight.stride(1), weight.stride(2)), 1)
        words = weight.view(torch.int32)
        unit = 4 if all(stride % 4 == 0 for stride in words.stride()[:2]) else 1
        return Stored(words, (words.stride(0) // unit, words.stride(1) // unit, 1), unit)


def gate_up_arguments(weights: ExpertWeights, base: BaseRows | None) -> dict[str, Any]:
    """Return what gate_up_activation gets for its weights' format, and where the sides' scales are.

    ``base``: x as the product reads it; None = x itself. Plain weights have constants alone: their
    kernels are compiled without all of this.
    """
    found = _arguments(weights, base, False, None)
    layout = weights.layout
    gate_scales = up_scales = gate_global = up_global = 0
    if weights.scales is not None and layout.gated:
        block = format_of(weights.weight_format)
        if num_parts(layout) == 1:  # interleaved, by rows as the weights; or one scale for both
            up_scales = 1 if block.block[0] else 0
        else:
            rows, _ = block.grid(weights.intermediate, weights.hidden)
            up_global = int(layout.gate_up_order == "gate_first")
            gate_global = 1 - up_global
            gate_scales, up_scales = gate_global * rows, up_global * rows
    return {
        **found,
        "GATE_SCALES": gate_scales,
        "UP_SCALES": up_scales,
        "GATE_GLOBAL": gate_global,
        "UP_GLOBAL": up_global,
    }


def gemm_arguments(
    weights: ExpertWeights, base: BaseRows | None, down: bool, part: int | None = None
) -> dict[str, Any]:
    """Return what grouped_gemm gets for its weights' format; ``part``: of gate_up's halves."""
    return _arguments(weights, base, down, part)


def _arguments(
    weights: ExpertWeights, base: BaseRows | None, down: bool, part: int | None
) -> dict[str, Any]:
    scales = weights.scales
    if scales is None:
        return {**_ABSENT, "FORMAT": UNQUANTIZED}
    grid = scales.down if down else scales.gate_up
    whole = scales.down_global if down else scales.gate_up_global
    if part is not None:
        grid = grid.unflatten(1, (num_parts(weights.layout), -1))[:, part]
        whole = None if whole is None else whole[:, part]
    return {
        **_ABSENT,
        "FORMAT": weights.weight_format,
        "base_ptr": None if base is None else base.values,
        "base_stride": None if base is None else base.values.stride(0),
        "base_scales_ptr": None if base is None else base.scales,
        # Some GPUs do not know e4m3, but any can read its bits.
        "scales_ptr": grid.view(torch.uint8) if grid.dtype == torch.float8_e4m3fn else grid,
        "scale_stride_e": grid.stride(0),
        "scale_stride_n": grid.stride(1),
        "scale_stride_k": grid.stride(2),
        "globals_ptr": whole,
        "global_stride": None if whole is None else whole.stride(0),
    }
