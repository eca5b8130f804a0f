"""The GEMMs of a layer with many rows, on Hopper; see :mod:`.hopper_gemm`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moegraft.backends.triton.activation import activation_constants
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.prefill.block_groups import BlockGroups, gemm_operands
from moegraft.backends.triton.prefill.config import BLOCK_M, PrefillConfig
from moegraft.backends.triton.prefill.hopper_gemm import hopper_gemm_kernel
from moegraft.backends.triton.prefill.route import Rows
from moegraft.types import ExpertWeights

#: Bits of an infinite bfloat16's exponent.
_INFINITY = 0x7F80
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)


def _map(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _LAYOUT)


def _grid(rows: Rows, tiles: int) -> tuple[int]:
    return (min(device_facts().num_sms, rows.num_blocks * tiles),)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy whose rows can be read 16 bytes at a time."""
    if x.stride(0) % 16 or x.data_ptr() % 16:  # what the compiler asks of a number is 16
        return x.clone(memory_format=torch.contiguous_format)
    return x


def run_gate_up(
    x: torch.Tensor, weights: ExpertWeights, groups: BlockGroups | None, s: torch.Tensor | None,
    rows: Rows, top_k: int, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return h ``[rows, I]``, in the order of the blocks."""
    hidden, inter, bias = weights.hidden, weights.intermediate, weights.gate_up_bias
    x = _gathered(x)
    h = torch.empty(rows.num_rows, inter, dtype=weights.dtype, device=x.device)
    constants = activation_constants(weights)
    constants.pop("COLUMN_STEP")
    gate, up = constants.pop("GATE_START"), constants.pop("UP_START")
    is_gated = constants["GATED"]
    starts = {"START0": gate, "START1": up} if is_gated else {"START0": 0, "START1": 128}
    weight = _map(weights.gate_up.view(-1, hidden), 128, 64)
    _launch(
        x, weight, weight, bias, rows.row_pair, _map(h, 64, 128), h if s is None else s, groups,
        rows, False, (hidden, inter, x.stride(0)), config,
        {
            "GATHER": True, "TOP_K": top_k, "WEIGHTED": False, "LORA": s is not None, **starts,
            **constants,
        },
    )  # fmt: skip
    return h


def run_down(
    h: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights,
    groups: BlockGroups | None, s: torch.Tensor | None, rows: Rows, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return y ``[rows, H]``, weighted, in the order of the blocks."""
    hidden, inter = weights.hidden, weights.intermediate
    y = torch.empty(rows.num_rows, hidden, dtype=weights.dtype, device=h.device)
    constants: dict[str, Any] = {
        "GATHER": False, "TOP_K": topk_weights.shape[1], "WEIGHTED": True, "LORA": s is not None,
        "START0": 0, "START1": 128, "GATED": False, "KIND": "silu", "ALPHA": 1.0,
        "HAS_LIMIT": False, "LIMIT": 0.0, "UP_SHIFT": 0.0,
    }  # fmt: skip
    _launch(
        h, _map(h, 128, 64), _map(weights.down.view(-1, inter), 128, 64), weights.down_bias,
        topk_weights, _map(y, 64, 128), h if s is None else s, groups, rows, True,
        (inter, hidden, h.stride(0)), config, constants,
    )  # fmt: skip
    return y


def _launch(
    x: torch.Tensor, h_map: TensorDescriptor, weight_map: TensorDescriptor,
    bias: torch.Tensor | None, topk_weights: torch.Tensor, out_map: TensorDescriptor,
    s: torch.Tensor, groups: BlockGroups | None, rows: Rows, down: bool,
    sizes: tuple[int, int, int], config: PrefillConfig, constants: dict[str, Any],
) -> None:  # fmt: skip
    """Launch one GEMM; ``sizes`` are K, N and the stride of x."""
    assert config.block_m == BLOCK_M, "the kernel's rows of a block"
    tiles = triton.cdiv(sizes[1], 128 if constants["GATED"] else 256)
    operands = gemm_operands(groups, rows, down)
    hopper_gemm_kernel[_grid(rows, tiles)](
        x, h_map, weight_map, bias, topk_weights, out_map, s, rows.row_pair, rows.block_info,
        rows.live_blocks, *operands.tensors, *sizes, 0 if bias is None else bias.stride(0), tiles,
        s.stride(0), *operands.numbers, HAS_BIAS=bias is not None, STAGES=config.stages,
        INF=_INFINITY, num_warps=4, **constants,
    )  # fmt: skip
