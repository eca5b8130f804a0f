"""The whole layer as one function: base and adapters of a factor table."""

from __future__ import annotations

import torch

from moegraft.activations import check_activation
from moegraft.call import LayerCall, Mode
from moegraft.errors import MoegraftError, UnsupportedError
from moegraft.factor_table import SiteTable
from moegraft.layer import check_call, check_expert_offset, check_table, run_plan
from moegraft.ops.arguments import check_tensor, check_written
from moegraft.ops.operators import moe_lora_op, plan_of_call
from moegraft.types import ExpertWeights, TokenSlots


def moe_lora(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: ExpertWeights,
    factors: SiteTable | None = None,
    token_slots: TokenSlots | torch.Tensor | None = None,
    *,
    expert_offset: int = 0,
    routed_scaling_factor: float = 1.0,
    out: torch.Tensor | None = None,
    mode: Mode | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Run one MoE layer with any adapters of a factor table, one adapter slot per token.

    Args:
        x: ``[T, H]`` activations, fp32/bf16/fp16.
        topk_ids: ``[T, K]`` int32/int64 global expert ids; -1 or not local = contributes 0.
        topk_weights: ``[T, K]`` float routing weights.
        experts: base weights.
        factors: where the adapters' factors are; None = base only.
        token_slots: slot per token, -1 = base; None = base only. A tensor int32 ``[T]`` is read on
            the host to learn which slots are live; make a :class:`TokenSlots` once per step
            instead, and :meth:`TokenSlots.captured` for a CUDA graph or ``torch.compile``.
        expert_offset: global id of local expert 0.
        routed_scaling_factor: multiplies the sum, of base and delta alike.
        out: ``[T, H]`` in x's dtype to write to; shares no memory with x, ids and weights.
        mode, backend: force the overlap mode, or a backend by name.

    Returns:
        ``[T, H]`` in x's dtype, ``out`` when given. Tokens without an adapter get exactly the base
        result. Plans are kept by size, so a call makes none after the first.

    Raises:
        MoegraftError: shapes, dtypes or devices disagree, or a slot is not in the table.
        PlanError: no backend runs this.
    """
    slots = _slots(token_slots, x.device)
    if out is not None:
        if out is x:
            raise MoegraftError("out is x; the layer reads x while it writes.")
        check_tensor(out, "out", tuple(x.shape), x.device, x.dtype)
        check_written(out, "out", {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights})
    check_call(experts, factors, x, topk_ids, topk_weights, slots)
    check_expert_offset(expert_offset)
    if factors is not None:
        check_table(factors, experts)
    if torch.compiler.is_compiling():
        return _as_operator(
            x, topk_ids, topk_weights, experts, factors, slots, expert_offset,
            routed_scaling_factor, out, mode, backend,
        )  # fmt: skip
    check_activation(experts.activation)
    max_rank = 0 if factors is None else factors.max_rank
    plan = plan_of_call(experts, topk_ids.shape[0], topk_ids.shape[1], max_rank, backend, mode)
    call = LayerCall(
        x, topk_ids, topk_weights, experts, factors, slots, expert_offset, routed_scaling_factor,
        out,
    )  # fmt: skip
    return run_plan(plan, call)


def _slots(
    token_slots: TokenSlots | torch.Tensor | None, device: torch.device
) -> TokenSlots | None:
    if token_slots is None or isinstance(token_slots, TokenSlots):
        return token_slots
    if not isinstance(token_slots, torch.Tensor):
        raise MoegraftError(
            f"token_slots are a {type(token_slots).__name__}; pass TokenSlots.of(token_slots)."
        )
    if token_slots.dim() != 1 or token_slots.dtype not in (torch.int32, torch.int64):
        raise MoegraftError(
            f"token_slots are {token_slots.dtype} {tuple(token_slots.shape)}; expected int32 [T]."
        )
    return TokenSlots.of(token_slots, device)


def format_arguments(
    experts: ExpertWeights,
) -> tuple[str, list[torch.Tensor], torch.dtype | None]:
    """Return what an operator takes of the weights' format: name, scales, activations' dtype."""
    scales = experts.scales
    if scales is None:
        return experts.weight_format, [], None
    found = [scales.gate_up, scales.down]
    if scales.gate_up_global is not None and scales.down_global is not None:
        found += [scales.gate_up_global, scales.down_global]
    return experts.weight_format, found, scales.dtype


def _as_operator(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: ExpertWeights,
    factors: SiteTable | None,
    slots: TokenSlots | None,
    expert_offset: int,
    scale: float,
    out: torch.Tensor | None,
    mode: Mode | None,
    backend: str | None,
) -> torch.Tensor:
    """Call the operator, which a compiled graph can hold."""
    act, layout = experts.activation, experts.layout
    if act.kind == "custom":
        raise UnsupportedError("A custom activation can't be part of a compiled graph.")
    if experts.post_norm is not None:
        raise UnsupportedError("A norm behind experts can't be part of a compiled graph.")
    out = torch.empty_like(x) if out is None else out
    table = (None, None, None) if factors is None else (
        factors.arena.data, factors.records, factors.expert_map,
    )  # fmt: skip
    batch = (None, [], False) if slots is None else (slots.slots, list(slots.live), slots.in_graph)
    moe_lora_op(
        x, topk_ids, topk_weights, experts.gate_up, experts.down, *format_arguments(experts),
        experts.gate_up_bias, experts.down_bias, *table, *batch, layout.gate_up_order,
        layout.out_major, act.kind, act.limit, act.alpha, act.up_shift,
        0 if factors is None else factors.max_rank, expert_offset, scale, mode or "",
        backend or "", out,
    )  # fmt: skip
    return out
