"""The MoE-LoRA layer. Read this file first: it is the whole computation on one screen.

    plan -> permute -> gate_up (+ LoRA) -> activation -> down (+ LoRA) -> finalize

Each stage is specified in :mod:`moegraft.stages`, its maths in :mod:`moegraft.reference`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import torch

from moegraft.activations import check_activation
from moegraft.call import LayerCall, Mode
from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.plan import Plan, make_plan
from moegraft.problem import Problem
from moegraft.sites import expert_site
from moegraft.stages import Stages
from moegraft.types import ExpertWeights, TokenSlots

#: Plans that a layer keeps, by number of tokens: every length of prompt brings another.
MAX_PLANS = 64


class MoeLoraLayer:
    """One MoE layer's experts, with any adapters of a factor table applied per token.

    Args:
        weights: the base weights, in the host's own storage.
        table: where the adapters' factors are; None = a layer without adapters.
        expert_offset: global id of local expert 0; pairs outside the local range contribute 0.
        routed_scaling_factor: multiplies the summed output.
        backend: force a backend by name.
        mode: force how adapters and base overlap; ``base`` refuses batches with adapters.

    Raises:
        PlanError: no backend can run these weights here; raised now, not in the first forward.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        table: SiteTable | None = None,
        *,
        expert_offset: int = 0,
        routed_scaling_factor: float = 1.0,
        backend: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        check_activation(weights.activation)
        check_expert_offset(expert_offset)
        if table is not None:
            check_table(table, weights)
        self.weights = weights
        self.table = table
        self.expert_offset = expert_offset
        self.routed_scaling_factor = routed_scaling_factor
        max_rank = 0 if table is None else table.max_rank
        self._plan = lru_cache(MAX_PLANS)(partial(_plan_experts, weights, max_rank, backend, mode))
        self.plan(num_tokens=1, top_k=1)

    def plan(self, num_tokens: int, top_k: int) -> Plan:
        """Return the plan for a batch of T tokens; ``plan(...).explain()`` says why."""
        return self._plan(num_tokens, top_k)

    def __call__(
        self,
        x_TH: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        slots: TokenSlots | None = None,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            x_TH: ``[T, H]`` activations, fp32/bf16/fp16.
            topk_ids: ``[T, K]`` int32/int64 global expert ids; -1 or not local = contributes 0.
            topk_weights: ``[T, K]`` float routing weights.
            slots: adapter slot per token; None = base only.

        Returns:
            ``[T, H]`` in x's dtype. Tokens without an adapter get exactly the base result.

        Raises:
            MoegraftError: shapes, dtypes or devices disagree.
        """
        check_call(self.weights, self.table, x_TH, topk_ids, topk_weights, slots)
        call = LayerCall(
            x_TH,
            topk_ids,
            topk_weights,
            self.weights,
            self.table,
            slots,
            self.expert_offset,
            self.routed_scaling_factor,
        )
        return run_plan(self.plan(*topk_ids.shape), call)


def run_plan(plan: Plan, call: LayerCall) -> torch.Tensor:
    """Run a checked call with what its plan chose."""
    if plan.mode == "base":
        if call.slots is not None and call.slots.live:
            raise MoegraftError(
                f"This layer was made with mode='base', but the batch uses adapter slots "
                f"{list(call.slots.live)}; make it with another mode, or pass slots=None."
            )
        call = replace(call, table=None)
    return run_stages(plan.stages, call) if plan.run is None else plan.run(call)


def check_call(
    weights: ExpertWeights,
    table: SiteTable | None,
    x_TH: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    slots: TokenSlots | None,
) -> None:
    """Raise :class:`MoegraftError` unless shapes, dtypes and devices agree; reads no values."""
    if x_TH.dim() != 2 or x_TH.shape[1] != weights.hidden:
        raise MoegraftError(f"x has shape {tuple(x_TH.shape)}; expected [T, {weights.hidden}].")
    num_tokens = x_TH.shape[0]
    shape = topk_ids.shape
    if topk_weights.shape != shape or len(shape) != 2 or shape[0] != num_tokens:
        raise MoegraftError(
            f"topk_ids {tuple(shape)} and topk_weights {tuple(topk_weights.shape)} "
            f"must both be [T, K] with T = {num_tokens}, the rows of x."
        )
    if not shape[1]:
        raise MoegraftError(f"topk_ids have shape {tuple(shape)}: no expert per token.")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise MoegraftError(f"topk_ids are {topk_ids.dtype}; expected int32 or int64.")
    if x_TH.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise MoegraftError(f"x is {x_TH.dtype}; expected float32, bfloat16 or float16.")
    if not topk_weights.is_floating_point():
        raise MoegraftError(f"topk_weights are {topk_weights.dtype}; expected a float dtype.")
    for name, tensor in (("x", x_TH), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.device != weights.device:
            raise MoegraftError(
                f"{name} is on {tensor.device}, the experts' weights on {weights.device}."
            )
    if slots is not None and slots.num_tokens != num_tokens:
        raise MoegraftError(
            f"The batch has {num_tokens} tokens but {slots.num_tokens} adapter slots."
        )
    if slots is not None and table is not None:
        table.check_live(slots)


def run_stages(stages: Stages, call: LayerCall) -> torch.Tensor:
    """Run a layer stage by stage; a plan with a fused run replaces this whole function."""
    weights, table, slots = call.weights, call.table, call.slots
    x_TH = call.x_TH
    perm = stages.permute(call.topk_ids, slots, weights.num_experts, call.expert_offset)
    gate_up = stages.gate_up(x_TH, weights, perm)
    if call.lora:
        assert table is not None and slots is not None
        stages.lora_shrink_expand(x_TH, table, call.sides, perm, slots, gate_up)
    h = stages.activation(gate_up, weights, x_TH.dtype)
    y = stages.down(h, weights, perm)
    if call.lora:
        assert table is not None and slots is not None
        stages.lora_shrink_expand(h, table, ("down",), perm, slots, y)
    if weights.post_norm is not None:
        y = weights.post_norm(y)
    out = stages.finalize(y, call.topk_weights, perm, call.scale)
    return out.to(x_TH.dtype) if call.out is None else call.out.copy_(out)


def _plan_experts(
    weights: ExpertWeights,
    max_rank: int,
    backend: str | None,
    mode: Mode | None,
    num_tokens: int,
    top_k: int,
) -> Plan:
    return make_plan(Problem.of(weights, num_tokens, top_k, max_rank), backend, mode)


def check_expert_offset(expert_offset: int) -> None:
    """Raise for an offset below 0, with which the id -1 would name an expert."""
    if expert_offset < 0:
        raise MoegraftError(f"expert_offset={expert_offset} is below 0: it is a global expert id.")


def check_table(table: SiteTable, weights: ExpertWeights) -> None:
    """Raise unless the table was made for experts of these sizes, on their device."""
    if table.arena.data.device != weights.device:
        raise MoegraftError(
            f"The factor table is on {table.arena.data.device}, the weights on {weights.device}."
        )
    compiling, site = torch.compiler.is_compiling(), table.site
    if not compiling and weights.cache.get("fits") is site:
        return
    sizes = (weights.num_experts, weights.hidden, weights.intermediate, weights.layout)
    if (site.num_experts, site.projections) != (sizes[0], expert_site("", *sizes).projections):
        found = ", ".join(f"{p.name} {p.in_features}->{p.out_features}" for p in site.projections)
        raise MoegraftError(
            f"The factor table is for {site.num_experts} experts with {found}; the weights hold "
            f"{sizes[0]} experts with H={sizes[1]}, I={sizes[2]}, {sizes[3].gate_up_order}."
        )
    if not compiling:
        weights.cache["fits"] = site
