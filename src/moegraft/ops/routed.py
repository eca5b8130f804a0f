"""The base layer on packed routing, with a delta of gate and up from outside: plain weights.

Siblings for block-scaled weights are files beside this one: they read their scales into
:class:`moegraft.types.ExpertWeights`, and share :mod:`moegraft.ops.arguments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moegraft.errors import MoegraftError
from moegraft.ops import arguments
from moegraft.ops.activation_types import ActivationLike, read_activation
from moegraft.ops.events import EventLike, handle_to_record, handle_to_wait_for
from moegraft.ops.operators import routed_moe_lora_op, routed_moe_lora_rows_op
from moegraft.types import Activation


class UnfinalizedRows(NamedTuple):
    """What ``routed_moe_lora(do_finalize=False)`` returns, for :func:`finalize_moe_lora`.

    Attributes:
        rows: ``[padded, H]`` in the dtype of hidden_states: rows of the down product, without
            routing weight and scaling factor. Rows that no pair points to hold anything.
        topk_weights: bf16 ``[T, K]``.
        expanded_idx_to_permuted_idx: int32 ``[T*K]``: pair ``t*K + k`` -> its row; -1 = not local.
    """

    rows: torch.Tensor
    topk_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor


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
    arguments.check_shuffle_flags(use_shuffled_weight, weight_layout)
    arguments.check_routing_method(routing_bias, routing_method_type)
    arguments.check_plain_weights(gemm1_weights, gemm2_weights)
    sizes = _read_sizes(
        hidden_states, gemm1_weights, gemm2_weights, intermediate_size, activation_type, up_first
    )
    local = arguments.local_experts(
        sizes.experts, num_experts, local_expert_offset, local_num_experts
    )
    num_tokens, device, dtype = hidden_states.shape[0], hidden_states.device, hidden_states.dtype
    ids, weights = arguments.read_routing(topk_ids, topk_weights, num_tokens, top_k, device)
    pairs = num_tokens * ids.shape[1]
    delta, h = gate_up_lora_delta, activation_lora_input
    if delta is not None:
        shape = (*ids.shape, sizes.columns)
        arguments.check_tensor(delta, "gate_up_lora_delta", shape, device, contiguous=True)
        delta = delta.view(pairs, sizes.columns)
    if h is not None:
        shape = (*ids.shape, sizes.intermediate)
        arguments.check_tensor(h, "activation_lora_input", shape, device, dtype, contiguous=True)
        read = {"gate_up_lora_delta": gate_up_lora_delta, "hidden_states": hidden_states}
        arguments.check_written(h, "activation_lora_input", {**read, "output": output})
        h = h.view(pairs, sizes.intermediate)
    act = sizes.activation
    common = (
        hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous(),
        ids, weights, gemm1_weights, gemm2_weights, delta, sizes.order,
        act.kind, act.limit, act.alpha, act.up_shift, local.first,
    )  # fmt: skip
    options = (
        handle_to_wait_for(lora_ready_event, "lora_ready_event", device),
        handle_to_record(gemm2_done_event, "gemm2_done_event", device),
        enable_pdl is not False,
        backend or "",
    )
    scale = 1.0 if routed_scaling_factor is None else float(routed_scaling_factor)
    if do_finalize:
        out = _output(output, hidden_states, gate_up_lora_delta)
        routed_moe_lora_op(*common, scale, *options, out, h)
        return out
    if output is not None or scale != 1.0:
        raise MoegraftError(
            f"With do_finalize=False there is nothing to sum: give output and "
            f"routed_scaling_factor={scale} to finalize_moe_lora."
        )
    rows = hidden_states.new_empty(pairs, hidden_states.shape[1])
    pair_to_row = torch.empty(pairs, dtype=torch.int32, device=device)
    routed_moe_lora_rows_op(*common, *options, rows, pair_to_row, h)
    return UnfinalizedRows(rows, weights.to(torch.bfloat16), pair_to_row)


@dataclass(frozen=True)
class _Sizes:
    """What the weights' shapes say: E, I, gate_up's columns and how they are ordered."""

    experts: int
    intermediate: int
    columns: int
    order: str
    activation: Activation


def _read_sizes(
    hidden_states: torch.Tensor,
    gemm1: torch.Tensor,
    gemm2: torch.Tensor,
    intermediate_size: int | None,
    activation_type: ActivationLike,
    up_first: bool,
) -> _Sizes:
    activation, gated = read_activation(activation_type)
    if hidden_states.dim() != 2 or gemm1.dim() != 3 or gemm2.dim() != 3:
        raise MoegraftError(
            f"hidden_states {tuple(hidden_states.shape)} must be [T, H], gemm1_weights "
            f"{tuple(gemm1.shape)} [E, 2I, H] and gemm2_weights {tuple(gemm2.shape)} [E, H, I]."
        )
    hidden, device = hidden_states.shape[1], hidden_states.device
    experts, intermediate = gemm2.shape[0], gemm2.shape[2]
    if intermediate_size is not None and intermediate_size != intermediate:
        raise MoegraftError(
            f"intermediate_size is {intermediate_size}, but gemm2_weights {tuple(gemm2.shape)} "
            f"have I = {intermediate}."
        )
    if gated is None:
        gated = gemm1.shape[1] != intermediate
    columns = intermediate * (2 if gated else 1)
    for name, tensor, shape in (
        ("gemm1_weights", gemm1, (experts, columns, hidden)),
        ("gemm2_weights", gemm2, (experts, hidden, intermediate)),
    ):
        if tuple(tensor.shape) != shape:
            raise MoegraftError(
                f"{name} has shape {tuple(tensor.shape)}; expected {shape}: E = {experts}, "
                f"I = {intermediate} and H = {hidden}, {'with' if gated else 'without'} a gate."
            )
        if (tensor.dtype, tensor.device) != (hidden_states.dtype, device):
            raise MoegraftError(
                f"{name} is {tensor.dtype} on {tensor.device}, hidden_states "
                f"{hidden_states.dtype} on {device}; they must agree."
            )
    order = "no_gate" if not gated else "up_first" if up_first else "gate_first"
    return _Sizes(experts, intermediate, columns, order, activation)


def _output(
    output: torch.Tensor | None, hidden_states: torch.Tensor, delta: torch.Tensor | None
) -> torch.Tensor:
    if output is None:
        return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    if output is hidden_states:
        raise MoegraftError("output is hidden_states; the op reads them while it writes.")
    shape = tuple(hidden_states.shape)
    arguments.check_tensor(output, "output", shape, hidden_states.device, hidden_states.dtype)
    read = {"hidden_states": hidden_states, "gate_up_lora_delta": delta}
    arguments.check_written(output, "output", read)
    return output
