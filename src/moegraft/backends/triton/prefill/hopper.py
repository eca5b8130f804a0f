"""The whole layer with many rows per expert, on Hopper; see :mod:`.hopper_gemm`.

Rows of h, y and S have the order of the blocks, so that tensor maps can read and write them; only x
is gathered, and ``finalize`` gathers y.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moegraft.backends.triton.activation import activation_constants
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.finalize import finalize_kernel
from moegraft.backends.triton.prefill.block_groups import BlockGroups, run_block_groups
from moegraft.backends.triton.prefill.config import PrefillConfig
from moegraft.backends.triton.prefill.group_shrink import run_group_shrink
from moegraft.backends.triton.prefill.hopper_gemm import hopper_gemm_kernel
from moegraft.backends.triton.prefill.route import Rows, run_route
from moegraft.backends.triton.prefill.token_order import token_order
from moegraft.backends.triton.workspace import y_dtype
from moegraft.call import LayerCall
from moegraft.types import ExpertWeights

#: Bits of an infinite number's exponent, as int16.
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)


def _map(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _LAYOUT)


def _lora_args(
    groups: BlockGroups | None, s: torch.Tensor | None, rows: Rows, down: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return a GEMM's tensors and numbers that only adapters need."""
    if groups is None or s is None:
        return (rows.row_pair,) * 5, (16, 16, 4, 4)
    first = groups.b_groups.shape[0] - 1 if down else 0
    b_groups = groups.b_groups[first:]
    tensors = (
        groups.row_segment, groups.counts[int(down)], b_groups, b_groups.view(torch.int32),
        groups.table.arena.data,
    )  # fmt: skip
    return tensors, (s.stride(0), groups.rank_rows, groups.max_groups, groups.b_groups.stride(0))


def run_hopper(call: LayerCall, out: torch.Tensor, config: PrefillConfig) -> torch.Tensor:
    """Run a layer that :func:`.layer.run_prefill` has prepared; returns ``out`` ``[T, H]``."""
    x, weights, table = call.x_TH, call.weights, call.table
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous().clone()
    top_k, hidden = call.topk_ids.shape[1], weights.hidden
    slots = call.slots if call.lora and table is not None else None
    order = None if slots is None or table is None else token_order(slots, table.num_slots)
    rows = run_route(call.topk_ids, order, weights.num_experts, config.block_m, call.expert_offset)
    groups = None
    if slots is not None and table is not None:
        groups = run_block_groups(table, slots.slots, rows, top_k, config.block_m)
    h = _gate_up(x, weights, groups, rows, top_k, config)
    y = _down(h, call.topk_weights, weights, groups, rows, config)
    block = min(256, triton.next_power_of_2(hidden))
    finalize_kernel[(out.shape[0], triton.cdiv(hidden, block))](
        y, rows.pair_row, out, None, None, None, None, hidden, out.stride(0), call.scale,
        DELTA=False, TOP_K=top_k, BLOCK_H=block, PDL=False, BY_ROW=True, num_warps=2,
    )  # fmt: skip
    return out


def _grid(rows: Rows, tiles: int) -> tuple[int]:
    return (min(device_facts().num_sms, rows.num_blocks * tiles),)


def _constants(weights: ExpertWeights, config: PrefillConfig, lora: bool) -> dict[str, Any]:
    return {
        "STAGES": config.stages, "LORA": lora,
        "INF": _INFINITY[weights.dtype], "num_warps": 4,
    }  # fmt: skip


def _gate_up(
    x: torch.Tensor, weights: ExpertWeights, groups: BlockGroups | None, rows: Rows,
    top_k: int, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    hidden, inter, bias = weights.hidden, weights.intermediate, weights.gate_up_bias
    h = torch.empty(rows.num_blocks * config.block_m, inter, dtype=weights.dtype, device=x.device)
    s = None
    if groups is not None:
        s = run_group_shrink(x, groups, False, rows, top_k, config)
    constants = activation_constants(weights)
    constants.pop("COLUMN_STEP")
    start, up = constants.pop("GATE_START"), constants.pop("UP_START")
    is_gated = constants["GATED"]
    tiles = triton.cdiv(inter, 128 if is_gated else 256)
    tensors, numbers = _lora_args(groups, s, rows, down=False)
    weight = _map(weights.gate_up.view(-1, hidden), 128, 64)
    hopper_gemm_kernel[_grid(rows, tiles)](
        x, weight, weight, bias, rows.row_pair, _map(h, 64, 128), h if s is None else s,
        rows.row_pair, rows.block_info, rows.block_info[rows.num_blocks:], *tensors,
        hidden, inter, x.stride(0), 0 if bias is None else bias.stride(0), tiles, *numbers,
        GATHER=True, TOP_K=top_k, WEIGHTED=False, START0=start, START1=up if is_gated else 128,
        HAS_BIAS=bias is not None, EVEN_K=hidden % 64 == 0, **constants,
        **_constants(weights, config, s is not None),
    )  # fmt: skip
    return h


def _down(
    h: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights,
    groups: BlockGroups | None, rows: Rows, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    hidden, inter, bias = weights.hidden, weights.intermediate, weights.down_bias
    top_k = topk_weights.shape[1]
    y = torch.empty(h.shape[0], hidden, dtype=y_dtype(weights.dtype), device=h.device)
    s = None
    if groups is not None:
        s = run_group_shrink(h, groups, True, rows, top_k, config)
    tiles = triton.cdiv(hidden, 256)
    tensors, numbers = _lora_args(groups, s, rows, down=True)
    hopper_gemm_kernel[_grid(rows, tiles)](
        h, _map(h, 128, 64), _map(weights.down.view(-1, inter), 128, 64), bias, topk_weights,
        _map(y, 64, 128), h if s is None else s, rows.row_pair, rows.block_info,
        rows.block_info[rows.num_blocks:], *tensors,
        inter, hidden, h.stride(0), 0 if bias is None else bias.stride(0), tiles, *numbers,
        GATHER=False, TOP_K=top_k, GATED=False, WEIGHTED=True, START0=0, START1=128,
        HAS_BIAS=bias is not None, KIND="silu", ALPHA=1.0, HAS_LIMIT=False, LIMIT=0.0,
        UP_SHIFT=0.0, EVEN_K=inter % 64 == 0, **_constants(weights, config, s is not None),
    )  # fmt: skip
    return y
