"""DoRA: from the magnitudes of a file to what is served, which needs the base weights.

DoRA's linear is ``y = c * (W x + s B A x) + bias`` with ``c = m / ||W + s B A||``, one number per
output row. Served is ``y = (W x + bias) + (c - 1) * W x + s (c B) A x``: plain LoRA with c in B,
and a vector c - 1 that scales the base product of the rows that have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moegraft.adapters.bind import BoundAdapter
from moegraft.errors import AdapterError, shorten
from moegraft.sites import LINEAR_PROJECTION, vector_name
from moegraft.types import LoraFactor, SiteFactors


def row_scales(merged: torch.Tensor, magnitude: torch.Tensor, name: str) -> torch.Tensor:
    """Return c, fp32 ``[out]`` on the device of ``merged``.

    Args:
        merged: W + s B A, fp32 ``[out, in]``.
        magnitude: m, ``[out]``.
        name: the linear, for messages.

    Raises:
        AdapterError: a row has no length, so that no number gives it one.
    """
    scales = magnitude.to(merged) / merged.norm(dim=1)
    if not bool(torch.isfinite(scales).all()):
        raise AdapterError(
            f"{name}: DoRA's magnitude can't be applied, for {int((~scales.isfinite()).sum())} "
            "rows of the weight with its delta are zero; is this the model that it was trained on?"
        )
    return scales


def with_weights(bound: BoundAdapter, weight_of: Callable[[str], torch.Tensor]) -> BoundAdapter:
    """Make an adapter's magnitudes servable; one without any is returned as it is.

    Args:
        bound: the adapter.
        weight_of: name of a linear -> its base weight ``[out, in]``, on any device.

    Raises:
        AdapterError: see :func:`row_scales`.
    """
    factors = dict(bound.factors)
    for name in bound.magnitudes:
        linear = factors[name].projections[LINEAR_PROJECTION]
        vector = factors[vector_name(name, "dora")].projections[LINEAR_PROJECTION]
        weight = weight_of(name).detach().float()
        a, b = (t[0].to(weight) for t in (linear.lora_A, linear.lora_B))
        merged = weight + linear.scale * (b @ a)
        scales = row_scales(merged, vector.lora_B[0, :, 0], name).to(linear.lora_B.device)
        lora_b = scales[:, None] * linear.lora_B.float()
        factors[name] = _linear(replace(linear, lora_B=lora_b))
        shift = (scales - 1).reshape(1, -1, 1)
        factors[vector_name(name, "dora")] = _linear(
            LoraFactor(shift.new_ones(1, 1, 1), shift, 1.0)
        )
    return replace(bound, factors=factors, magnitudes=()) if bound.magnitudes else bound


def check_resolved(name: str, bound: BoundAdapter) -> None:
    """Refuse to store an adapter whose magnitudes are still those of its file."""
    if bound.magnitudes:
        raise AdapterError(
            f"Adapter {name!r} has DoRA on {shorten(list(bound.magnitudes))}, which needs the base "
            "weights: pass it through moegraft.adapters.dora.with_weights() first."
        )


def _linear(factor: LoraFactor) -> SiteFactors:
    return SiteFactors({LINEAR_PROJECTION: factor})
