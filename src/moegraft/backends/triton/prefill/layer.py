"""The whole layer with many rows per expert: modes ``in_kernel``, ``fused_serial`` and ``base``.

Rows of h, y and S have the order of the blocks of :mod:`.route`: only x is gathered, by token, and
y by ``finalize``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.finalize import finalize_kernel
from moegraft.backends.triton.fused import in_pieces, prepared, run_layer
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.prefill import portable
from moegraft.backends.triton.prefill.block_groups import run_block_groups
from moegraft.backends.triton.prefill.config import PrefillConfig, has_tensor_map, max_pairs
from moegraft.backends.triton.prefill.route import run_route
from moegraft.backends.triton.prefill.token_order import token_order
from moegraft.call import LayerCall


def run_prefill(call: LayerCall, config: PrefillConfig, other: FusedConfig) -> torch.Tensor:
    """Run a layer; without a live adapter the base layer and its launches only.

    Args:
        call: the layer call.
        config: tiles.
        other: of the decode kernels, for weights that no tensor map can read, and quantised ones
            beside an arena of another dtype.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    arena = None if call.table is None else call.table.arena.data
    quantised = call.weights.scales is not None
    other_dtype = arena is not None and arena.dtype != call.weights.dtype
    if not has_tensor_map(call.weights) or (quantised and other_dtype):
        return run_layer(call, other)
    call = prepared(call)
    most = max_pairs(call.weights, call.table if call.lora else None)
    if call.topk_ids.numel() > most:
        return in_pieces(call, lambda piece: run_prefill(piece, config, other), most)
    x, weights, table = call.x_TH, call.weights, call.table
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.shape[0]:
        return out
    top_k, hidden = call.topk_ids.shape[1], weights.hidden
    gemms: Any = portable
    tokens: Any = x
    if config.hopper and not other_dtype:
        from moegraft.backends.triton.prefill import hopper, hopper_fp8

        gemms = hopper_fp8 if quantised else hopper
        x = hopper.aligned(x)
        tokens = hopper_fp8.run_tokens(x, weights) if quantised else x
    elif config.hopper:
        config = PrefillConfig()
    # A table that only ever held empty slots has no ranks to make groups of.
    slots = call.slots if call.lora and table is not None and table.max_rank else None
    options = config.launch_options()
    order = groups = s = None
    if slots is not None and table is not None:
        order = token_order(slots, table.num_slots, options)
    rows = run_route(
        call.topk_ids, order, weights.num_experts, config.block_m, call.expert_offset,
        config.row_step, options,
    )  # fmt: skip
    if slots is not None and table is not None:
        groups = run_block_groups(table, slots.slots, rows, top_k, config.block_m, options)
        s = gemms.run_shrink(tokens, groups, False, rows, top_k, config)
    h = gemms.run_gate_up(tokens, weights, groups, s, rows, top_k, config)
    if groups is not None:
        s = gemms.run_shrink(h, groups, True, rows, top_k, config)
    y = gemms.run_down(h, call.topk_weights, weights, groups, s, rows, config)
    block = min(256, triton.next_power_of_2(hidden))
    listed(finalize_kernel)[(out.shape[0], triton.cdiv(hidden, block))](
        y, rows.pair_row, out, None, None, None, None, hidden, out.stride(0), call.scale,
        DELTA=False, TOP_K=top_k, BLOCK_H=block, BY_ROW=True, num_warps=2, **options,
    )  # fmt: skip
    return out
