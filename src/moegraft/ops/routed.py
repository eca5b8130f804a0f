"""The base layer on packed routing, with a delta of gate and up from outside: plain weights.

:mod:`moegraft.ops.block_scale` has the siblings for quantised weights, :mod:`.routed_core` what all
of them do.
"""

from __future__ import annotations

import torch

from moegraft.ops.activation_types import ActivationLike
from moegraft.ops.events import EventLike
from moegraft.ops.routed_core import Gemms, RoutedOptions, UnfinalizedRows, run


def routed_moe_lora(
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    *,
    topk_weights: torch.Tensor | None = None,
    routing_bias: torch.Tensor | None = None,
    gate_up_lora_delta: torch.Tensor | None = None,
    activation_lora_input: torch.Tensor | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    intermediate_size: int | None = None,
    local_expert_offset: int = 0,
    local_num_experts: int | None = None,
    routed_scaling_factor: float | None = None,
    routing_method_type: int | None = None,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    output: torch.Tensor | None = None,
    activation_type: ActivationLike = None,
    lora_ready_event: EventLike = 0,
    gemm2_done_event: EventLike = 0,
    up_first: bool = False,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    backend: str | None = None,
) -> torch.Tensor | UnfinalizedRows:
    """Run the experts, adding a delta that the caller computed before the activation.

    Args:
        topk_ids: int32 ``[T, K]`` packed by :func:`pack_topk`; plain int32/int64 ids when
            ``topk_weights`` is given. Experts that are not here (-1 too) contribute exactly 0.
        hidden_states: ``[T, H]``, bf16, fp16 or fp32, as the weights.
        gemm1_weights: ``[E, 2I, H]``, gate first; ``[E, I, H]`` for activations without a gate.
        gemm2_weights: ``[E, H, I]``.
        topk_weights: float ``[T, K]``, used in their own precision; None = packed.
        routing_bias: must be None: the op does not route.
        gate_up_lora_delta: contiguous ``[T, K, 2I]`` as gate | up (``[T, K, I]`` without a gate)
            in any float dtype, before the activation, without routing weight. Pairs that are not
            local are not read.
        activation_lora_input: contiguous ``[T, K, I]`` in x's dtype to write h to, the very
            values that meet ``gemm2_weights``; exactly 0 where a pair is not local.
        num_experts, top_k, intermediate_size: checked when given; experts of the whole model.
        local_expert_offset, local_num_experts: which experts the weights are.
        routed_scaling_factor: multiplies the sum, once; None = 1.
        routing_method_type: see :data:`moegraft.ops.arguments.ROUTING_METHODS`.
        do_finalize: False returns :class:`UnfinalizedRows`; the factor belongs to
            :func:`finalize_moe_lora` then.
        enable_pdl: False turns dependent launch off; else it is used where the GPU has it.
        output: ``[T, H]`` in x's dtype to write to; shares no memory with other arguments.
        activation_type: see :data:`moegraft.ops.activation_types.NAMES`; None = SwiGLU.
        lora_ready_event: the delta is read only behind this event: the raw product of gate and up
            runs before it. A ``torch.cuda.Event``, a raw handle, or 0.
        gemm2_done_event: recorded behind the down product, before the sum.
        up_first: ``gemm1_weights`` are ``[up | gate]``. The delta stays gate | up.
        use_shuffled_weight, weight_layout: refused unless they say plain weights.
        backend: force a backend by name.

    Returns:
        ``[T, H]`` in x's dtype (``output`` when given), or :class:`UnfinalizedRows`.

    Raises:
        UnsupportedError: quantised, shuffled or block-major weights, an activation or routing
            method without implementation, a routing bias.
        MoegraftError: shapes, dtypes, devices or the expert range disagree; the event is wrong.
        PlanError: no backend runs this.
    """
    options: RoutedOptions = {
        "topk_weights": topk_weights,
        "routing_bias": routing_bias,
        "gate_up_lora_delta": gate_up_lora_delta,
        "activation_lora_input": activation_lora_input,
        "num_experts": num_experts,
        "top_k": top_k,
        "intermediate_size": intermediate_size,
        "local_expert_offset": local_expert_offset,
        "local_num_experts": local_num_experts,
        "routed_scaling_factor": routed_scaling_factor,
        "routing_method_type": routing_method_type,
        "do_finalize": do_finalize,
        "enable_pdl": enable_pdl,
        "output": output,
        "activation_type": activation_type,
        "lora_ready_event": lora_ready_event,
        "gemm2_done_event": gemm2_done_event,
        "up_first": up_first,
        "use_shuffled_weight": use_shuffled_weight,
        "weight_layout": weight_layout,
        "backend": backend,
    }
    return run(topk_ids, hidden_states, Gemms(gemm1_weights, gemm2_weights), options)
