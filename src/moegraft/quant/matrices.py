"""Matrices in a weight format: fp32 to what is stored, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.errors import MoegraftError
from moegraft.quant.formats import WeightFormat


@dataclass(frozen=True)
class QuantisedMatrix:
    """One matrix ``[out, in]``, or several in leading dimensions.

    Attributes:
        values: ``[.., out, in]`` in the format's storage; two 4-bit values per byte.
        scales: ``[.., down, across]``, one per block.
        global_scale: fp32 ``[..]``; None where the format has none.

    Example: ``[64, 256]`` in ``fp8-block``: values e4m3 ``[64, 256]``, scales fp32 ``[1, 2]``.
    """

    values: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None


def quantise(matrix: torch.Tensor, weight_format: WeightFormat) -> QuantisedMatrix:
    """Quantise ``[.., out, in]`` float values, to the nearest that the format has.

    Raises:
        MoegraftError: values that are not finite, or an odd ``in`` of a 4-bit format.
    """
    element, kind = weight_format.element, weight_format.scale
    if matrix.shape[-1] % element.per_item:
        raise MoegraftError(
            f"A matrix {tuple(matrix.shape)} can't be stored as {weight_format.name}, which packs "
            f"{element.per_item} columns into a byte."
        )
    values = matrix.float()
    if not bool(torch.isfinite(values).all()):
        raise MoegraftError(
            f"A matrix {tuple(matrix.shape)} has values that are not finite; {weight_format.name} "
            "can't hold them."
        )
    size = values.abs()
    whole = kind.global_scale(size.amax((-2, -1)), element)
    blocks = _blocks(size, weight_format)
    scales = kind.encode(blocks.amax((-3, -1)), element, whole[..., None, None])
    factor = _expanded(kind.decode(scales) * whole[..., None, None], values.shape, weight_format)
    stored = element.encode(values / torch.where(factor > 0, factor, 1.0))
    return QuantisedMatrix(stored, scales, whole if kind.has_global else None)


def dequantise(matrix: QuantisedMatrix, weight_format: WeightFormat) -> torch.Tensor:
    """Return the values that are stored, fp32 ``[.., out, in]``."""
    values = weight_format.element.decode(matrix.values)
    scales = weight_format.scale.decode(matrix.scales)
    if matrix.global_scale is not None:
        scales = scales * matrix.global_scale[..., None, None]
    rows, columns = values.shape[-2:]
    height, width = _block_sizes(rows, columns, weight_format)
    if rows % height or columns % width:
        return values.mul_(_expanded(scales, values.shape, weight_format))
    blocks = values.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    blocks.mul_(scales[..., :, None, :, None])
    return values


def _blocks(values: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    """View as ``[.., down, block rows, across, block columns]``, filled up with zeros."""
    rows, columns = values.shape[-2:]
    down, across = weight_format.grid(rows, columns)
    height, width = _block_sizes(rows, columns, weight_format)
    padding = (0, across * width - columns, 0, down * height - rows)
    if any(padding):
        values = torch.nn.functional.pad(values, padding)
    return values.unflatten(-1, (across, width)).unflatten(-3, (down, height))


def _expanded(scales: torch.Tensor, shape: torch.Size, weight_format: WeightFormat) -> torch.Tensor:
    """Return each value's scale: ``[.., out, in]``, a view of size 1 where all share one."""
    rows, columns = shape[-2:]
    height, width = _block_sizes(rows, columns, weight_format)
    if height != rows and height != 1:
        scales = scales.repeat_interleave(height, -2)[..., :rows, :]
    if width != columns and width != 1:
        scales = scales.repeat_interleave(width, -1)[..., :columns]
    return scales


def _block_sizes(rows: int, columns: int, weight_format: WeightFormat) -> tuple[int, int]:
    height, width = weight_format.block
    return height or rows, width or columns
