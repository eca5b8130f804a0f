"""Which of SGLang's experts layers moegraft takes over, and the reason where it does not."""

from __future__ import annotations

import logging
from typing import Any

import torch

from moegraft.errors import MoegraftError
from moegraft.factors import UNIT_BYTES
from moegraft.hosts.formula import Formula
from moegraft.hosts.left import LeftToEngine
from moegraft.hosts.slot_tensors import whole_units
from moegraft.ops.operators import cached_plan
from moegraft.problem import Problem
from moegraft.types import Activation, ActivationKind, ExpertWeights, WeightLayout

say_why_not = LeftToEngine(logging.getLogger("sglang.srt.moegraft"), "SGLang").say
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KINDS: dict[tuple[str, bool], ActivationKind] = {
    ("silu", True): "silu",
    ("gelu", True): "gelu",
    ("gelu_tanh", True): "gelu_tanh",
    ("silu", False): "silu",
    ("gelu", False): "gelu",
    ("relu2", False): "relu2",
}


def formula(config: Any) -> Formula | str:
    """Return the formula of SGLang's ``MoeRunnerConfig``, or why moegraft has none for it."""
    kind = _KINDS.get((config.activation, config.is_gated))
    if kind is None:
        gated = "gated" if config.is_gated else "without a gate"
        return f"there is no activation {config.activation!r} {gated}"
    layout = WeightLayout() if config.is_gated else WeightLayout("no_gate")
    if config.gemm1_alpha is not None:
        if kind != "silu" or not config.is_gated or not config.gate_up_interleaved:
            return "its activation has an alpha, which is known of interleaved SwiGLU only"
        if config.gemm1_clamp_limit is None or config.gemm1_beta not in (None, 1.0):
            return "its activation has an alpha with another limit or shift than gpt_oss's"
        activation = Activation("silu", config.gemm1_clamp_limit, config.gemm1_alpha, 1.0)
        return Formula(activation, WeightLayout("interleaved"))
    if config.gemm1_clamp_limit is not None or config.swiglu_limit is not None:
        return "its activation is clamped in a way of its own"
    return Formula(Activation(kind), layout)


def experts_formula(wrapper: Any) -> Formula | str:
    """Return how to run a layer's experts, or why they are left to SGLang.

    Args:
        wrapper: SGLang's LoRA wrapper of the layer.
    """
    base, config = wrapper.base_layer, wrapper.moe_runner_config
    if base.is_shared_fused_moe:
        return "they are the shared experts"
    backend = wrapper._lora_runner_backend
    if not backend.is_triton():
        return f"they run on --moe-runner-backend {backend.value}; served is triton"
    info = wrapper._quant_info
    w13, w2 = getattr(info, "w13_weight", None), getattr(info, "w2_weight", None)
    if w13 is None or w2 is None or _quantised(info) or w13.dtype not in _DTYPES:
        return "its weights are quantised; served are bfloat16, float16 and float32"
    if info.fuse_swiglu_interleaved:
        return "its weights are stored in the order of a fused activation"
    if config.no_combine:
        return "its rows are not summed over the experts here"
    found = formula(config)
    if isinstance(found, str):
        return found
    width, hidden = base.intermediate_size_per_partition, base.hidden_size
    wanted = (base.num_local_experts, width * (2 if config.is_gated else 1), hidden)
    if tuple(w13.shape) != wanted:
        return f"its weights are {tuple(w13.shape)}, not {wanted}"
    if not whole_units((hidden, width), w13.dtype):
        return (
            f"rows of {hidden} and {width} values do not begin at multiples of {UNIT_BYTES} bytes"
        )
    try:
        weights = ExpertWeights(w13, w2, activation=found.activation, layout=found.layout)
        cached_plan(Problem.of(weights, 1, base.top_k, 1), None)
    except MoegraftError as error:
        return str(error)
    return found


def _quantised(info: Any) -> bool:
    used = [name for name in vars(info) if name.startswith("use_") and getattr(info, name)]
    return bool(used) or info.w13_scale is not None or info.w2_scale is not None


def reason_against_buffers(wrapper: Any, a_buffers: Any, dtype: torch.dtype) -> str | None:
    """Return why the slot tensors of a layer can't be read, None when they can.

    Args:
        wrapper: SGLang's LoRA wrapper of the layer.
        a_buffers: name -> the factors A of each layer in SGLang's memory pool.
        dtype: of the slot tensors.
    """
    layer, weights = wrapper.base_layer.layer_id, wrapper._quant_info.w13_weight
    if dtype != weights.dtype:
        return f"adapters are kept as {dtype}, the weights are {weights.dtype}"
    slots, experts = a_buffers["down_proj_moe"][layer].shape[1], weights.shape[0]
    if slots != experts:
        return f"its slots are for {slots} experts, its weights are of {experts}"
    return None
