"""The operators of ``torch.ops.moegraft``: they write to their outputs and return nothing.

Arguments are flat (tensors and numbers), so that graphs can hold them, and are taken as checked:
the functions around them do that. ``backend`` is a name, or ``""`` for the plan's choice, and so is
``overlap``, the mode (torch's dispatch takes no argument of that name).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import cast

import torch

from moegraft.call import LayerCall, Mode
from moegraft.env import forced_backend
from moegraft.factor_table import Arena, SiteTable
from moegraft.layer import MAX_PLANS, run_plan
from moegraft.ops import sums
from moegraft.plan import Plan, make_plan
from moegraft.problem import Problem
from moegraft.routed_call import RoutedCall
from moegraft.sites import expert_site
from moegraft.types import (
    Activation,
    ActivationKind,
    ExpertWeights,
    GateUpOrder,
    TokenSlots,
    WeightLayout,
    WeightScales,
)

_ACTIVATION = "str activation, float? limit, float alpha, float up_shift"
#: Of quantised weights: those of gate_up and down, then their global ones if the format has them.
_FORMAT = "str weight_format, Tensor[] scales, ScalarType? dtype"
_ROUTED = (
    "(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    f"{_FORMAT}, Tensor? gate_up_delta, str order, {_ACTIVATION}, int expert_offset, "
)
_EVENTS = "int lora_ready, int gemm2_done, bool pdl, str backend, "


def cached_plan(problem: Problem, backend: str | None, mode: Mode | None = None) -> Plan:
    """Return the plan for a problem; plans are made once for each setting of MOEGRAFT_BACKEND."""
    return _plan(problem, backend or forced_backend(), mode)


def plan_of_call(
    weights: ExpertWeights,
    num_tokens: int,
    top_k: int,
    max_rank: int,
    backend: str | None,
    mode: Mode | None,
) -> Plan:
    """Return :func:`cached_plan` of a call; weights keep theirs, so none is described again."""
    plans: dict[Hashable, Plan] = weights.cache.setdefault("plans", {})
    key = (num_tokens, top_k, max_rank, backend or forced_backend(), mode)
    found = plans.get(key)
    if found is None:
        if len(plans) >= MAX_PLANS:
            plans.clear()
        problem = Problem.of(weights, num_tokens, top_k, max_rank)
        found = plans[key] = cached_plan(problem, backend, mode)
    return found


@lru_cache(maxsize=512)
def _plan(problem: Problem, backend: str | None, mode: Mode | None) -> Plan:
    return make_plan(problem, backend, mode)


@torch.library.custom_op(
    "moegraft::routed_moe_lora",
    mutates_args=("out", "h"),
    schema=f"{_ROUTED} float scale, {_EVENTS} Tensor(a!) out, Tensor(b!)? h) -> ()",
)
def routed_moe_lora_op(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weight_format: str,
    scales: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
    gate_up_delta: torch.Tensor | None,
    order: str,
    activation: str,
    limit: float | None,
    alpha: float,
    up_shift: float,
    expert_offset: int,
    scale: float,
    lora_ready: int,
    gemm2_done: int,
    pdl: bool,
    backend: str,
    out: torch.Tensor,
    h: torch.Tensor | None,
) -> None:
    """Run the layer with a delta from outside; see :class:`moegraft.routed_call.RoutedCall`."""
    act = Activation(cast(ActivationKind, activation), limit, alpha, up_shift)
    layout = WeightLayout(cast(GateUpOrder, order))
    found = _scales(scales, dtype)
    weights = ExpertWeights(gate_up, down, None, None, act, layout, weight_format, found)
    _run_routed(
        RoutedCall(
            x, topk_ids, topk_weights, weights, expert_offset, scale, gate_up_delta, h,
            lora_ready, gemm2_done, pdl, out,
        ),
        backend,
    )  # fmt: skip


@torch.library.custom_op(
    "moegraft::routed_moe_lora_rows",
    mutates_args=("rows", "pair_to_row", "h"),
    schema=f"{_ROUTED} {_EVENTS} Tensor(a!) rows, Tensor(b!) pair_to_row, Tensor(c!)? h) -> ()",
)
def routed_moe_lora_rows_op(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weight_format: str,
    scales: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
    gate_up_delta: torch.Tensor | None,
    order: str,
    activation: str,
    limit: float | None,
    alpha: float,
    up_shift: float,
    expert_offset: int,
    lora_ready: int,
    gemm2_done: int,
    pdl: bool,
    backend: str,
    rows: torch.Tensor,
    pair_to_row: torch.Tensor,
    h: torch.Tensor | None,
) -> None:
    """Run the layer up to the rows of the down product."""
    act = Activation(cast(ActivationKind, activation), limit, alpha, up_shift)
    layout = WeightLayout(cast(GateUpOrder, order))
    found = _scales(scales, dtype)
    weights = ExpertWeights(gate_up, down, None, None, act, layout, weight_format, found)
    _run_routed(
        RoutedCall(
            x, topk_ids, topk_weights, weights, expert_offset, 1.0, gate_up_delta, h,
            lora_ready, gemm2_done, pdl, None, rows, pair_to_row,
        ),
        backend,
    )  # fmt: skip


@torch.library.custom_op(
    "moegraft::finalize_moe_lora",
    mutates_args=("out",),
    schema="(Tensor rows, Tensor topk_weights, Tensor pair_to_row, Tensor? down_delta, "
    "float scale, str backend, Tensor(a!) out) -> ()",
)
def finalize_moe_lora_op(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    pair_to_row: torch.Tensor,
    down_delta: torch.Tensor | None,
    scale: float,
    backend: str,
    out: torch.Tensor,
) -> None:
    """``out[t] = scale * sum_k w * (rows[pair_to_row] + down_delta)``, negative rows skipped."""
    sums.combine(rows, topk_weights, pair_to_row, down_delta, out, scale, backend)


@torch.library.custom_op(
    "moegraft::add_down_delta",
    mutates_args=("out",),
    schema="(Tensor(a!) out, Tensor down_delta, Tensor? topk_ids, int first_expert, "
    "int end_expert, float scale, str backend) -> ()",
)
def add_down_delta_op(
    out: torch.Tensor,
    down_delta: torch.Tensor,
    topk_ids: torch.Tensor | None,
    first_expert: int,
    end_expert: int,
    scale: float,
    backend: str,
) -> None:
    """``out[t] += scale * sum_k down_delta[t, k]`` over the local pairs."""
    sums.add_down_delta(out, down_delta, topk_ids, first_expert, end_expert, scale, backend)


@torch.library.custom_op(
    "moegraft::moe_lora",
    mutates_args=("out",),
    schema="(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    f"{_FORMAT}, Tensor? gate_up_bias, Tensor? down_bias, Tensor? arena, Tensor? records, "
    "Tensor? expert_map, Tensor? slots, int[] live, bool in_graph, str order, bool out_major, "
    f"{_ACTIVATION}, "
    "int max_rank, int expert_offset, float scale, str overlap, str backend, Tensor(a!) out) -> ()",
)
def moe_lora_op(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weight_format: str,
    scales: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    arena: torch.Tensor | None,
    records: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    slots: torch.Tensor | None,
    live: Sequence[int],
    in_graph: bool,
    order: str,
    out_major: bool,
    activation: str,
    limit: float | None,
    alpha: float,
    up_shift: float,
    max_rank: int,
    expert_offset: int,
    scale: float,
    overlap: str,
    backend: str,
    out: torch.Tensor,
) -> None:
    """Run the whole layer; the factor table comes as its tensors and is decoded afresh.

    Without ``arena`` and ``records`` there are no adapters, without ``slots`` only base tokens.
    """
    act = Activation(cast(ActivationKind, activation), limit, alpha, up_shift)
    layout = WeightLayout(cast(GateUpOrder, order), out_major)
    found = _scales(scales, dtype)
    weights = ExpertWeights(
        gate_up, down, gate_up_bias, down_bias, act, layout, weight_format, found
    )
    site = expert_site(
        "experts", weights.num_experts, weights.hidden, weights.intermediate, weights.layout
    )
    table = batch = None
    if arena is not None and records is not None:
        table = SiteTable(site, Arena(arena), records, expert_map, max_rank)
    if slots is not None:
        batch = TokenSlots(slots, tuple(live), {}, in_graph)
    call = LayerCall(
        x, topk_ids, topk_weights, weights, table, batch, expert_offset, scale, out
    )  # fmt: skip
    problem = Problem.of(weights, topk_ids.shape[0], topk_ids.shape[1], max_rank)
    run_plan(cached_plan(problem, backend or None, cast(Mode, overlap) if overlap else None), call)


for _op in (
    routed_moe_lora_op,
    routed_moe_lora_rows_op,
    finalize_moe_lora_op,
    add_down_delta_op,
    moe_lora_op,
):
    # Nothing is returned, so nothing has a shape to work out.
    _op.register_fake(lambda *args, **kwargs: None)


def _scales(scales: Sequence[torch.Tensor], dtype: torch.dtype | None) -> WeightScales | None:
    if not scales or dtype is None:
        return None
    whole = scales[2:] or (None, None)
    return WeightScales(scales[0], scales[1], whole[0], whole[1], dtype)


def _run_routed(call: RoutedCall, backend: str) -> None:
    plan = cached_plan(Problem.of(call.weights, *call.topk_ids.shape), backend or None)
    import_module(f"moegraft.backends.{plan.backend}.routed").run_routed(call)
