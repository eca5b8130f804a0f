"""Activations as the base product of a W8A8 format reads them."""

from __future__ import annotations

import torch

from moegraft.quant.elements import E4M3
from moegraft.quant.formats import WeightFormat

#: Scale of a group of zeros, so that nothing is divided by 0.
_SMALLEST = 1e-10


def rounded_activations(rows: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    """Return fp32 ``[N, in]`` as the format's base product sees it; itself for 16-bit ones.

    One fp32 scale per row and group of columns: the group's largest absolute value over 448. The
    last group may be narrower. The same bits on every device.
    """
    group = weight_format.activation_group
    if group is None or not rows.shape[0]:
        return rows
    columns = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -columns % group)).unflatten(1, (-1, group))
    # By a tensor: on CUDA torch multiplies by a number's reciprocal instead. A maximum that is a
    # multiple of 7, as every seventh is, has an exact scale, and 16-bit values that lie right
    # between two of e4m3; a scale one bit off rounds them all the other way: 1.4 % of an output.
    largest = padded.new_full((), E4M3.largest)
    scales = (padded.abs().amax(-1, keepdim=True) / largest).clamp_(min=_SMALLEST)
    seen = E4M3.decode(E4M3.encode(padded / scales)) * scales
    return seen.flatten(1)[:, :columns]
