"""The whole layer on the fused kernels: modes ``in_kernel``, ``fused_serial`` and ``base``.

    route -> (lora_shrink_expand) gate_up_activation -> (lora_shrink_expand) down -> finalize

The delta's programs are the first of the GEMM's launch, or a launch before it that the GEMM
overtakes. ``in_kernel`` and ``fused_serial`` differ in dependent launch alone: without it, every
launch follows the one before.
"""

from __future__ import annotations

import torch

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.launch import (
    run_delta,
    run_down,
    run_finalize,
    run_gate_up,
    run_route,
)
from moegraft.backends.triton.workspace import Workspace, make_workspace
from moegraft.call import LayerCall


def run_layer(
    call: LayerCall, config: FusedConfig, workspace: Workspace | None = None
) -> torch.Tensor:
    """Run a layer; without a live adapter the base layer and its launches only.

    Args:
        call: the layer call.
        config: tiles.
        workspace: scratch to use; None = allocated for this call.
    """
    x, weights, table = call.x_TH, call.weights, call.table
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.shape[0]:
        return out
    lora, top_k = call.lora, call.topk_ids.shape[1]
    pairs = call.topk_ids.numel()
    ws = workspace or make_workspace(weights, pairs, config.block_m, lora)
    slots = call.slots.slots if call.slots is not None and lora else None
    run_route(call.topk_ids, slots, weights, ws, config, call.expert_offset)
    if not lora:
        table = None
    if table is not None and not config.merged:
        run_delta(x, weights, table, ws, top_k, config, down=False)
    run_gate_up(x, weights, ws, top_k, config, table, slots)
    if table is not None and not config.merged:
        run_delta(ws.h, weights, table, ws, top_k, config, down=True)
    run_down(call.topk_weights, weights, ws, config, table, slots)
    run_finalize(ws, out, top_k, call.scale, config)
    return out
