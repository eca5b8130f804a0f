"""Which of vLLM's layers moegraft takes over, and the reason where it does not."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.platforms import current_platform

from moegraft.hosts.vllm.formulas import Formula, formula

logger = logging.getLogger("vllm.moegraft")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def experts_formula(wrapper: Any, lora_config: Any) -> Formula | str:
    """Return how to run a layer's experts, or why they are left to vLLM.

    Args:
        wrapper: vLLM's LoRA wrapper of the layer, before its slot tensors exist.
        lora_config: vLLM's.
    """
    experts = wrapper._moe_kernel.fused_experts
    weights = wrapper.base_layer.routed_experts
    w13, w2 = weights.w13_weight, getattr(weights, "w2_weight", None)
    if type(experts) is not TritonExperts:
        return f"its experts run on {type(experts).__name__}, which lays out weights its own way"
    if experts.quant_dtype is not None or w13.dtype not in _DTYPES or w2 is None:
        return f"its weights are {w13.dtype}, quantised; served are bfloat16, float16 and float32"
    if lora_config.fully_sharded_loras and wrapper.tp_size > 1:
        return "fully_sharded_loras splits ranks over GPUs"
    if lora_config.lora_dtype != w13.dtype:
        return f"adapters are kept as {lora_config.lora_dtype}, the weights are {w13.dtype}"
    name = wrapper.moe_config.activation.value
    found = formula(name, experts)
    if found is None:
        return f"there is no activation {name!r}"
    sizes = (
        wrapper.local_num_experts,
        wrapper.intermediate_size_per_partition * (2 if found.layout.gated else 1),
        wrapper.hidden_size,
    )
    if tuple(w13.shape) != sizes:
        return f"its weights are {tuple(w13.shape)}, not {sizes}"
    return found


def reason_against_linear(wrapper: Any, lora_config: Any) -> str | None:
    """Return why a linear's deltas are left to vLLM; None when they are not.

    Args:
        wrapper: vLLM's LoRA wrapper of the linear, with its slot tensors.
        lora_config: vLLM's.
    """
    if envs.VLLM_LORA_ENABLE_DUAL_STREAM:
        return "VLLM_LORA_ENABLE_DUAL_STREAM has a path of its own"
    if lora_config.fully_sharded_loras and wrapper.tp_size > 1:
        return "fully_sharded_loras splits ranks over GPUs"
    if lora_config.lora_dtype not in _DTYPES:
        return f"adapters are kept as {lora_config.lora_dtype}"
    if not wrapper.lora_a_stacked or not current_platform.can_update_inplace():
        return "vLLM does not add their deltas in place"
    return None


_said: set[str] = set()


def say_why_not(layer: str, reason: str, what: str = "experts") -> None:
    """Log one line per reason, naming the first layer that has it."""
    if reason not in _said:
        _said.add(reason)
        logger.warning(
            "moegraft leaves %s to vLLM, at %s and wherever this holds too: %s.",
            what,
            layer,
            reason,
        )
