"""Which of vLLM's layers moegraft takes over, and the reason where it does not."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.platforms import current_platform

from moegraft.errors import MoegraftError
from moegraft.factors import UNIT_BYTES
from moegraft.hosts.formula import Formula
from moegraft.hosts.left import LeftToEngine
from moegraft.hosts.slot_tensors import whole_units
from moegraft.hosts.vllm.formulas import formula
from moegraft.ops.operators import cached_plan
from moegraft.problem import Problem
from moegraft.types import ExpertWeights

say_why_not = LeftToEngine(logging.getLogger("vllm.moegraft"), "vLLM").say
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def experts_formula(wrapper: Any, lora_config: Any) -> Formula | str:
    """Return how to run a layer's experts, or why they are left to vLLM.

    Args:
        wrapper: vLLM's LoRA wrapper of the layer, before its slot tensors exist.
        lora_config: vLLM's.
    """
    experts = wrapper._moe_kernel.fused_experts
    weights = wrapper.base_layer.routed_experts
    w13, w2 = getattr(weights, "w13_weight", None), getattr(weights, "w2_weight", None)
    if type(experts) is not TritonExperts:
        return f"its experts run on {type(experts).__name__}, which lays out weights its own way"
    if w13 is None or w2 is None or experts.quant_dtype is not None or w13.dtype not in _DTYPES:
        return "its weights are quantised; served are bfloat16, float16 and float32"
    if lora_config.fully_sharded_loras and wrapper.tp_size > 1:
        return "fully_sharded_loras splits ranks over GPUs"
    if lora_config.lora_dtype != w13.dtype:
        return f"adapters are kept as {lora_config.lora_dtype}, the weights are {w13.dtype}"
    name = wrapper.moe_config.activation.value
    found = formula(name, experts)
    if found is None:
        return f"there is no activation {name!r}"
    width, hidden = wrapper.intermediate_size_per_partition, wrapper.hidden_size
    wanted = (wrapper.local_num_experts, width * (2 if found.layout.gated else 1), hidden)
    if tuple(w13.shape) != wanted:
        return f"its weights are {tuple(w13.shape)}, not {wanted}"
    if not whole_units((hidden, width), w13.dtype):
        return (
            f"rows of {hidden} and {width} values do not begin at multiples of {UNIT_BYTES} bytes"
        )
    try:
        base = ExpertWeights(w13, w2, activation=found.activation, layout=found.layout)
        top_k, max_rank = wrapper.moe_config.experts_per_token, lora_config.max_lora_rank
        cached_plan(Problem.of(base, 1, top_k, max_rank), None)
    except MoegraftError as error:
        return str(error)
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
    num_in = wrapper.lora_a_stacked[0].shape[3]
    if not whole_units((num_in,), lora_config.lora_dtype):
        return f"rows of {num_in} values are no multiples of {UNIT_BYTES} bytes"
    dtype = str(lora_config.lora_dtype).removeprefix("torch.")
    kind = wrapper.lora_a_stacked[0].device.type
    try:
        cached_plan(Problem.of_linear(dtype, kind, 1, num_in, num_in), None)
    except MoegraftError as error:
        return str(error)
    return None
