"""The on-disk layouts: one file each, one line here, asked in this order."""

from __future__ import annotations

from moegraft.adapters.layouts import (
    fused_linear,
    linear,
    linear_vectors,
    peft_fused,
    per_expert,
    per_projection,
)
from moegraft.adapters.layouts.base import Layout, LayoutResult, ReadOptions

#: Each takes the keys it understands and leaves the rest to the next.
LAYOUTS: tuple[Layout, ...] = (
    peft_fused.PeftFused(),
    per_expert.PerExpert(),
    per_projection.PerProjection(),
    linear_vectors.LinearVectors(),
    linear.DenseLinear(),
    fused_linear.FusedLinear(),
)

__all__ = ["LAYOUTS", "Layout", "LayoutResult", "ReadOptions"]
