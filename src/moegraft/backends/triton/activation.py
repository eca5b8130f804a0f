"""Stage ``activation`` as device code, in fp32; same formulas as :mod:`moegraft.activations`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moegraft.types import ExpertWeights


def column_constants(weights: ExpertWeights) -> dict[str, Any]:
    """Return where gate and up are among the host's columns, as constants of a kernel."""
    layout, inter = weights.layout, weights.intermediate
    up = layout.columns("up", inter)
    gate = layout.columns("gate", inter) if layout.gated else up
    return {
        "GATE_START": gate.start,
        "UP_START": up.start,
        "COLUMN_STEP": up.step or 1,
        "GATED": layout.gated,
    }


def activation_constants(weights: ExpertWeights) -> dict[str, Any]:
    """Return :func:`column_constants` and those of the activation, which is not ``custom``."""
    act = weights.activation
    return {
        **column_constants(weights),
        "KIND": act.kind,
        "ALPHA": act.alpha,
        "UP_SHIFT": act.up_shift,
        "HAS_LIMIT": act.limit is not None,
        "LIMIT": act.limit or 0.0,
    }


@triton.jit
def pointwise(x, KIND: tl.constexpr, ALPHA: tl.constexpr):
    """Return f(x) for a kind of :data:`moegraft.activations.POINTWISE`."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-ALPHA * x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "relu2", "an activation that the GPU kernels do not know")
        positive = tl.maximum(x, 0.0)
        return positive * positive


@triton.jit
def gated(
    gate,
    up,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
):
    """Return ``f(min(gate, limit)) * (clamp(up, -limit, limit) + up_shift)``."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return pointwise(gate, KIND, ALPHA) * (up + UP_SHIFT)
