"""W8A8 weights whose activations are left as they are: the format's own error is against them."""

from __future__ import annotations

from dataclasses import replace

from moegraft.quant.experts import weight_format_of
from moegraft.quant.formats import FORMATS, WeightFormat
from moegraft.types import ExpertWeights


def unrounded_weights(weights: ExpertWeights) -> ExpertWeights | None:
    """Return weights of a W8A8 format in the format that reads activations as they are.

    The tensors are the same ones. None for a format that does not round activations.
    """
    found = weight_format_of(weights)
    if found is None or found.activation_group is None:
        return None
    return replace(weights, weight_format=unrounded_format(found).name)


def unrounded_format(weight_format: WeightFormat) -> WeightFormat:
    """Return the format of the same values and scales that reads activations as they are."""
    stored = (weight_format.element, weight_format.block, weight_format.scale)
    return next(
        other
        for other in FORMATS.values()
        if (other.element, other.block, other.scale) == stored and other.activation_group is None
    )
