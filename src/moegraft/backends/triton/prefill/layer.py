"""The whole layer with many rows per expert: modes ``in_kernel``, ``fused_serial`` and ``base``."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraft.backends.triton.activation import activation_constants
from moegraft.backends.triton.config import FusedConfig, block_r
from moegraft.backends.triton.finalize import finalize_kernel
from moegraft.backends.triton.fused import in_pieces, prepared, run_layer
from moegraft.backends.triton.prefill.block_segments import BlockSegments, run_block_segments
from moegraft.backends.triton.prefill.config import PrefillConfig, has_tensor_map, max_pairs
from moegraft.backends.triton.prefill.down import prefill_down_kernel
from moegraft.backends.triton.prefill.gate_up import prefill_gate_up_kernel
from moegraft.backends.triton.prefill.route import Rows, run_route
from moegraft.backends.triton.prefill.shrink import run_shrink
from moegraft.backends.triton.prefill.token_order import token_order
from moegraft.backends.triton.workspace import y_dtype
from moegraft.call import LayerCall
from moegraft.types import ExpertWeights


def _lora_args(
    segments: BlockSegments | None, filler: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Return a GEMM's tensors, numbers and constants that only adapters need."""
    if segments is None:
        constants = {"LORA": False, "UNIT": 8, "PROJECTIONS": 3, "FAST": 0, "BLOCK_R": 16}
        return (filler,) * 8, (0, 0, 0, 0), constants
    table = segments.table
    assert table.expert_map is not None
    tensors = (
        segments.row_segment, segments.block_slots, segments.block_count, segments.places,
        table.arena.data, table.records, table.records.view(torch.int32), table.expert_map,
    )  # fmt: skip
    numbers = (
        table.max_rank, table.records.stride(0), table.expert_map.stride(0), table.num_slots
    )  # fmt: skip
    constants = {
        "LORA": True, "UNIT": segments.unit, "PROJECTIONS": table.records.shape[1],
        "FAST": segments.fast, "BLOCK_R": block_r(table.max_rank),
    }  # fmt: skip
    return tensors, numbers, constants


def run_prefill(call: LayerCall, config: PrefillConfig, other: FusedConfig) -> torch.Tensor:
    """Run a layer; without a live adapter the base layer and its launches only.

    Args:
        call: the layer call.
        config: tiles.
        other: of the decode kernels, for weights that no tensor map can read.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    if not has_tensor_map(call.weights):
        return run_layer(call, other)
    call = prepared(call)
    most = max_pairs(call.weights)
    if call.topk_ids.numel() > most:
        return in_pieces(call, lambda piece: run_prefill(piece, config, other), most)
    x, weights, table = call.x_TH, call.weights, call.table
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.shape[0]:
        return out
    if config.hopper and (table is None or table.arena.data.dtype == weights.dtype):
        from moegraft.backends.triton.prefill.hopper import run_hopper

        return run_hopper(call, out, config)
    top_k, hidden = call.topk_ids.shape[1], weights.hidden
    slots = call.slots if call.lora else None
    order = None if slots is None or table is None else token_order(slots, table.num_slots)
    rows = run_route(call.topk_ids, order, weights.num_experts, config.block_m, call.expert_offset)
    segments = None
    if slots is not None and table is not None:
        segments = run_block_segments(table, slots.slots, rows, top_k, config.block_m)
    h = _gate_up(x, weights, segments, rows, top_k, config)
    y = _down(h, call.topk_weights, weights, segments, rows, config)
    block = min(256, triton.next_power_of_2(hidden))
    finalize_kernel[(out.shape[0], triton.cdiv(hidden, block))](
        y, rows.pair_row, out, None, None, None, None, hidden, out.stride(0), call.scale,
        DELTA=False, TOP_K=top_k, BLOCK_H=block, PDL=False, num_warps=2,
    )  # fmt: skip
    return out


def _gate_up(
    x: torch.Tensor, weights: ExpertWeights, segments: BlockSegments | None, rows: Rows,
    top_k: int, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    tile, bias = config.gate_up, weights.gate_up_bias
    hidden, inter = weights.hidden, weights.intermediate
    h = torch.empty(rows.num_pairs, inter, dtype=weights.dtype, device=x.device)
    projections = ("gate", "up") if weights.layout.gated else ("up",)
    s = h if segments is None else run_shrink(x, segments, projections, rows, top_k, config)
    desc = TensorDescriptor.from_tensor(
        weights.gate_up.view(-1, hidden), [tile.block_n, tile.block_k]
    )
    tiles = triton.cdiv(inter, tile.block_n)
    tensors, numbers, lora = _lora_args(segments, rows.row_pair)
    constants = activation_constants(weights)
    constants.pop("COLUMN_STEP")
    prefill_gate_up_kernel[(rows.num_blocks * tiles,)](
        x, desc, bias, h, s, rows.row_pair, rows.block_info, *tensors,
        hidden, inter, x.stride(0), 0 if bias is None else bias.stride(0), tiles, *numbers,
        TOP_K=top_k, HAS_BIAS=bias is not None, EVEN_K=hidden % tile.block_k == 0,
        BLOCK_M=config.block_m, TAIL_M=config.tail_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **constants, **lora,
    )  # fmt: skip
    return h


def _down(
    h: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights,
    segments: BlockSegments | None, rows: Rows, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    tile, bias = config.down, weights.down_bias
    hidden, inter, top_k = weights.hidden, weights.intermediate, topk_weights.shape[1]
    y = torch.empty(rows.num_pairs, hidden, dtype=y_dtype(weights.dtype), device=h.device)
    projections = ("down",)
    s = h if segments is None else run_shrink(h, segments, projections, rows, top_k, config)
    desc = TensorDescriptor.from_tensor(weights.down.view(-1, inter), [tile.block_n, tile.block_k])
    tiles = triton.cdiv(hidden, tile.block_n)
    tensors, numbers, lora = _lora_args(segments, rows.row_pair)
    prefill_down_kernel[(rows.num_blocks * tiles,)](
        h, desc, bias, topk_weights, y, s, rows.row_pair, rows.block_info, *tensors,
        inter, hidden, 0 if bias is None else bias.stride(0), tiles, *numbers,
        HAS_BIAS=bias is not None, EVEN_K=inter % tile.block_k == 0,
        BLOCK_M=config.block_m, TAIL_M=config.tail_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **lora,
    )  # fmt: skip
    return y
