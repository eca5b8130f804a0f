"""The whole layer on the fused kernels: modes ``in_kernel``, ``fused_serial`` and ``base``.

    route -> (lora_shrink_expand) gate_up_activation -> (lora_shrink_expand) down -> finalize

The delta's programs are the first of the GEMM's launch, or a launch before it that the GEMM
overtakes. gate_up adds its delta before the activation; down's joins in finalize, so that down
never waits for it. ``in_kernel`` and ``fused_serial`` differ in dependent launch alone: without
it, every launch follows the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moegraft.backends.launch_list import refuse
from moegraft.backends.triton.config import MAX_BLOCK_R, FusedConfig
from moegraft.backends.triton.launch import run_down, run_finalize, run_gate_up, run_route
from moegraft.backends.triton.launch_delta import run_delta
from moegraft.backends.triton.weights import fp4_hopper
from moegraft.backends.triton.workspace import MAX_PAIRS, Workspace, make_workspace
from moegraft.call import LayerCall
from moegraft.types import ExpertWeights, TokenSlots


def run_layer(
    call: LayerCall, config: FusedConfig, workspace: Workspace | None = None
) -> torch.Tensor:
    """Run a layer; without a live adapter the base layer and its launches only.

    Args:
        call: the layer call.
        config: tiles.
        workspace: scratch to use, in the order of columns that these GEMMs read; None = allocated
            for this call.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    call = prepared(call)
    if call.topk_ids.numel() > MAX_PAIRS:
        return in_pieces(call, lambda piece: run_layer(piece, config))
    x, weights, table = call.x_TH, call.weights, call.table
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.shape[0]:
        return out
    cuda = config.cuda_fp4 and fp4_hopper.can_read(weights)
    lora, top_k = call.lora, call.topk_ids.shape[1]
    ws = workspace
    if ws is None:
        dtype = torch.float32 if table is None else delta_dtype(weights.dtype, table.max_rank)
        pairs = call.topk_ids.numel()
        ws = make_workspace(weights, pairs, config.block_m, lora, dtype, top_k=top_k, eights=cuda)
    slots = call.slots.slots if call.slots is not None and lora else None
    run_route(
        call.topk_ids, slots, weights.num_experts, ws, config, call.expert_offset, x, ws.base_x
    )
    if not lora:
        table = None
    if table is not None and not config.merged:
        run_delta(x, weights, table, ws, top_k, config, down=False)
    if cuda:
        fp4_hopper.run_gate_up(weights, ws, top_k, config, slots)
    else:
        run_gate_up(x, weights, ws, top_k, config, table, slots)
    if table is not None and not config.merged:
        run_delta(ws.h, weights, table, ws, top_k, config, down=True)
    if cuda:
        fp4_hopper.run_down(call.topk_weights, weights, ws, config)
    else:
        run_down(call.topk_weights, weights, ws, config, table)
    delta_weights = call.topk_weights if lora else None
    run_finalize(ws, out, top_k, call.scale, config, delta_weights, slots)
    return out


def delta_dtype(dtype: torch.dtype, max_rank: int) -> torch.dtype:
    """Return the dtype that deltas have between launches: that of the weights, rounded once.

    fp32 where ranks are done in several rounds, which would round at each.
    """
    return dtype if max_rank <= MAX_BLOCK_R else torch.float32


def prepared(call: LayerCall) -> LayerCall:
    """Return the call with tensors as the kernels read them; copies only what is not so yet."""
    x = call.x_TH.to(call.weights.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    if x.dtype != call.x_TH.dtype and call.out is None:
        call = replace(call, out=torch.empty_like(call.x_TH))
    return replace(
        call,
        x_TH=x,
        weights=_with_plain_biases(call.weights),
        topk_ids=call.topk_ids.contiguous(),
        topk_weights=call.topk_weights.contiguous(),
    )


def _with_plain_biases(weights: ExpertWeights) -> ExpertWeights:
    biases = (weights.gate_up_bias, weights.down_bias)
    if all(bias is None or bias.stride(1) == 1 for bias in biases):
        return weights
    gate_up, down = (None if bias is None else bias.contiguous() for bias in biases)
    return replace(weights, gate_up_bias=gate_up, down_bias=down)


def in_pieces(
    call: LayerCall, run: Callable[[LayerCall], torch.Tensor], max_pairs: int = MAX_PAIRS
) -> torch.Tensor:
    """Run a call of many tokens in pieces of at most ``max_pairs``; no row depends on the cut."""
    refuse("it runs in pieces, which use the same memory one after the other")
    out = torch.empty_like(call.x_TH) if call.out is None else call.out
    step = max_pairs // call.topk_ids.shape[1]
    for start in range(0, call.x_TH.shape[0], step):
        rows = slice(start, start + step)
        slots = call.slots
        if slots is not None:
            slots = TokenSlots(slots.slots[rows], slots.live)
        run(
            replace(
                call,
                x_TH=call.x_TH[rows],
                topk_ids=call.topk_ids[rows],
                topk_weights=call.topk_weights[rows],
                slots=slots,
                out=out[rows],
            )
        )
    return out
