"""The GEMMs of a layer with many rows, by Triton alone: for every GPU with tensor maps."""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraft.backends.triton.activation import activation_constants
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.prefill.block_groups import BlockGroups, gemm_operands
from moegraft.backends.triton.prefill.config import PrefillConfig
from moegraft.backends.triton.prefill.down import prefill_down_kernel
from moegraft.backends.triton.prefill.gate_up import prefill_gate_up_kernel
from moegraft.backends.triton.prefill.group_shrink import run_group_shrink
from moegraft.backends.triton.prefill.route import Rows
from moegraft.backends.triton.workspace import y_dtype
from moegraft.types import ExpertWeights

#: The stages have the same names as in :mod:`.hopper`.
run_shrink = run_group_shrink


def run_gate_up(
    x: torch.Tensor, weights: ExpertWeights, groups: BlockGroups | None, s: torch.Tensor | None,
    rows: Rows, top_k: int, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return h ``[rows, I]``, in the order of the blocks."""
    tile, bias = config.gate_up, weights.gate_up_bias
    hidden, inter = weights.hidden, weights.intermediate
    h = torch.empty(rows.num_rows, inter, dtype=weights.dtype, device=x.device)
    desc = TensorDescriptor.from_tensor(
        weights.gate_up.view(-1, hidden), [tile.block_n, tile.block_k]
    )
    tiles = triton.cdiv(inter, tile.block_n)
    constants = activation_constants(weights)
    constants.pop("COLUMN_STEP")
    operands = gemm_operands(groups, rows, down=False)
    listed(prefill_gate_up_kernel)[(rows.num_blocks * tiles,)](
        x, desc, bias, h, h if s is None else s, rows.row_pair, rows.block_info,
        *operands.tensors, hidden, inter, x.stride(0), 0 if bias is None else bias.stride(0),
        tiles, *operands.numbers, TOP_K=top_k, HAS_BIAS=bias is not None,
        EVEN_K=hidden % tile.block_k == 0, LORA=s is not None, UNIT=operands.unit,
        BLOCK_M=config.block_m, TAIL_M=config.tail_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **constants,
    )  # fmt: skip
    return h


def run_down(
    h: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights,
    groups: BlockGroups | None, s: torch.Tensor | None, rows: Rows, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return y ``[rows, H]``, weighted, in the order of the blocks."""
    tile, bias = config.down, weights.down_bias
    hidden, inter = weights.hidden, weights.intermediate
    y = torch.empty(rows.num_rows, hidden, dtype=y_dtype(weights.dtype), device=h.device)
    desc = TensorDescriptor.from_tensor(weights.down.view(-1, inter), [tile.block_n, tile.block_k])
    tiles = triton.cdiv(hidden, tile.block_n)
    operands = gemm_operands(groups, rows, down=True)
    listed(prefill_down_kernel)[(rows.num_blocks * tiles,)](
        h, desc, bias, topk_weights, y, h if s is None else s, rows.row_pair, rows.block_info,
        *operands.tensors, inter, hidden, 0 if bias is None else bias.stride(0), tiles,
        *operands.numbers[:2], HAS_BIAS=bias is not None, EVEN_K=inter % tile.block_k == 0,
        LORA=s is not None, UNIT=operands.unit, BLOCK_M=config.block_m, TAIL_M=config.tail_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return y
