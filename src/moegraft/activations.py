"""The activation functions between gate_up and down, in fp32: one table for all backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from moegraft.errors import UnsupportedError
from moegraft.types import Activation, WeightLayout

#: kind -> f(x, alpha) on fp32 tensors.
POINTWISE: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda x, alpha: F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x),
    "gelu": lambda x, alpha: F.gelu(x),
    "gelu_tanh": lambda x, alpha: F.gelu(x, approximate="tanh"),
    "relu": lambda x, alpha: F.relu(x),
    "relu2": lambda x, alpha: F.relu(x).square(),
}


def check_activation(activation: Activation) -> None:
    """Raise :class:`UnsupportedError` when no backend knows the activation."""
    if activation.kind != "custom" and activation.kind not in POINTWISE:
        raise UnsupportedError(
            f"Activation {activation.kind!r} is not implemented; known: "
            f"{', '.join([*POINTWISE, 'custom'])}."
        )


def apply_activation(
    gate_up: torch.Tensor, activation: Activation, layout: WeightLayout, intermediate: int
) -> torch.Tensor:
    """Return ``h``, fp32 ``[N, I]``, from packed fp32 ``gate_up`` ``[N, 2I]`` (``[N, I]`` ungated).

    Formula: see :class:`moegraft.types.Activation`.
    """
    if activation.custom is not None:
        return activation.custom(gate_up)
    f = POINTWISE[activation.kind]
    up = gate_up[:, layout.columns("up", intermediate)]
    if not layout.gated:
        return f(up, activation.alpha)
    gate = gate_up[:, layout.columns("gate", intermediate)]
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.up_shift:
        up = up + activation.up_shift
    return f(gate, activation.alpha) * up
