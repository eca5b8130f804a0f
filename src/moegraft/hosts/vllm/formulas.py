"""vLLM's activations by name, as moegraft's.

vLLM's ``swigluoai`` reads gate and up interleaved and has fixed numbers; the other gated ones read
``[gate | up]``. ``silu`` and ``swigluoai_uninterleave`` take limit, alpha and shift from the
model's configuration, newer versions through ``activation_config``, older ones from the
quantisation configuration even where nothing is quantised.
"""

from __future__ import annotations

from typing import Any

from moegraft.hosts.formula import Formula
from moegraft.types import Activation, ActivationKind, WeightLayout

_GATED: dict[str, ActivationKind] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
_UNGATED: dict[str, ActivationKind] = {
    "silu_no_mul": "silu",
    "gelu_no_mul": "gelu",
    "gelu_tanh_no_mul": "gelu_tanh",
    "relu2_no_mul": "relu2",
}


def formula(name: str, experts: Any) -> Formula | None:
    """Return the formula of vLLM's activation ``name``; None when moegraft has none for it.

    Args:
        name: the value of vLLM's ``MoEActivation``.
        experts: vLLM's experts object, whose configuration holds limit, alpha and beta.
    """
    limit, alpha, shift = _numbers(experts)
    if name == "silu":
        return Formula(Activation("silu", limit=limit), WeightLayout())
    if name in _GATED:
        return Formula(Activation(_GATED[name]), WeightLayout())
    if name in _UNGATED:
        return Formula(Activation(_UNGATED[name]), WeightLayout("no_gate"))
    if name == "swigluoai":
        return Formula(Activation("silu", 7.0, 1.702, 1.0), WeightLayout("interleaved"))
    if name == "swigluoai_uninterleave" and limit is not None:
        return Formula(Activation("silu", limit, alpha, shift), WeightLayout())
    return None


def _numbers(experts: Any) -> tuple[float | None, float, float]:
    """Return limit, alpha and what is added to up."""
    config = getattr(experts, "activation_config", None)
    if config is not None:
        return config.clamp_limit, config.alpha, config.beta
    config = experts.quant_config
    alpha, beta = config.gemm1_alpha, config.gemm1_beta
    return (
        config.gemm1_clamp_limit,
        1.0 if alpha is None else alpha,
        0.0 if beta is None else beta,
    )
