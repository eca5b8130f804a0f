"""The routed op on the GPU kernels, with a delta of gate and up from outside.

    route -> gate_up_activation (+ delta) -> down -> finalize                   the delta is there
    route -> gate_up -> (event) pair_activation (+ delta) -> down -> finalize   on its way

With an event the raw gate_up product runs beside whatever computes the delta, which is what the
event is for; without one the fused kernel is faster.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.events import record_event, wait_event
from moegraft.backends.triton.launch import (
    run_down,
    run_finalize,
    run_gate_up,
    run_grouped_gemm,
    run_route,
)
from moegraft.backends.triton.pair_activation import run_pair_activation
from moegraft.backends.triton.pairs import run_number_rows
from moegraft.backends.triton.tiles import choose_config
from moegraft.backends.triton.weights.rows import run_base_rows
from moegraft.backends.triton.workspace import MAX_PAIRS, Workspace, make_workspace
from moegraft.problem import Problem
from moegraft.routed_call import RoutedCall


def run_routed(call: RoutedCall) -> None:
    """Run a routed call; see :class:`moegraft.routed_call.RoutedCall`."""
    num_tokens, top_k = call.topk_ids.shape
    device = call.x_TH.device
    if call.topk_ids.numel() <= MAX_PAIRS:
        _run(call)
        return
    # The pieces lie on one stream: what the first one waits for, the others have waited for too.
    if call.lora_ready:
        wait_event(call.lora_ready, device)
    step = MAX_PAIRS // top_k
    for start in range(0, num_tokens, step):
        _run(call.piece(start, min(start + step, num_tokens)), start * top_k)
    if call.gemm2_done:
        record_event(call.gemm2_done, device)


def _run(call: RoutedCall, first_pair: int = 0) -> None:
    """Run one round of launches; ``first_pair`` is its first pair's number in the whole call."""
    (num_tokens, top_k), weights = call.topk_ids.shape, call.weights
    device = call.x_TH.device
    if not num_tokens:
        # Whoever waits for the event must not wait for an older call's.
        if call.gemm2_done:
            record_event(call.gemm2_done, device)
        return
    config = _config(Problem.of(weights, num_tokens, top_k))
    if call.lora_ready or not call.pdl:
        # Events stand for the completion of launches, and a dependent one may start before that.
        config = config.overlapping(False)
    # fp32, so that the sum has the bits of finalize over the rows of ``do_finalize=False``.
    ws = make_workspace(
        weights, num_tokens * top_k, config.block_m, False, y_type=torch.float32, top_k=top_k
    )
    if call.h is not None:
        ws = replace(ws, h=call.h.zero_())
    x, base_x = call.x_TH, ws.base_x
    run_route(call.topk_ids, None, weights.num_experts, ws, config, call.expert_offset, x, base_x)
    if call.lora_ready:
        _gate_up_beside_event(call, ws, top_k, config)
    else:
        delta, keep_h = call.gate_up_delta, call.h is not None
        run_gate_up(x, weights, ws, top_k, config, every_pair=delta, keep_h=keep_h)
    if call.rows is not None and call.pair_to_row is not None:
        run_grouped_gemm(ws.h, weights, ws, top_k, config, call.rows, True, ws.base_h)
        _record(call, device)
        run_number_rows(ws.pair_row, call.pair_to_row, first_pair)
    if call.out is not None:
        run_down(call.topk_weights, weights, ws, config)
        _record(call, device)
        run_finalize(ws, call.out, top_k, call.scale, config)


def _gate_up_beside_event(call: RoutedCall, ws: Workspace, top_k: int, config: FusedConfig) -> None:
    """Run the raw product; then wait for the delta and make h of it."""
    columns = call.weights.gate_up_oi.shape[1]
    gate_up = torch.empty(ws.num_pairs, columns, dtype=torch.float32, device=call.x_TH.device)
    run_grouped_gemm(call.x_TH, call.weights, ws, top_k, config, gate_up, False, ws.base_x)
    wait_event(call.lora_ready, call.x_TH.device)
    run_pair_activation(gate_up, call.weights, ws.h, ws, every_pair=call.gate_up_delta)
    run_base_rows(ws.h, ws.base_h)


def _record(call: RoutedCall, device: torch.device) -> None:
    if call.gemm2_done:
        record_event(call.gemm2_done, device)


@lru_cache(maxsize=256)
def _config(problem: Problem) -> FusedConfig:
    facts = device_facts()
    config, _ = choose_config(problem, facts)
    return config.overlapping(facts.has_dependent_launch)
