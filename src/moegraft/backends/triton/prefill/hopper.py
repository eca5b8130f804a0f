"""The GEMMs of a layer with many rows, on Hopper; see :mod:`moegraft.backends.cuda.moe_gemm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moegraft.backends.cuda.driver import tensor_map
from moegraft.backends.cuda.group_shrink import STAGES, ShrinkArguments, ShrinkSpec
from moegraft.backends.cuda.moe_gemm import Arguments, Fp8Arguments, Spec
from moegraft.backends.cuda.products import ROW_STEP, kernel
from moegraft.backends.triton.activation import column_constants
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.prefill.block_groups import BlockGroups
from moegraft.backends.triton.prefill.config import PrefillConfig
from moegraft.backends.triton.prefill.route import Rows
from moegraft.types import ExpertWeights

#: Bytes of a row of a tile.
ROW_BYTES = 128
#: Bytes that rows must lie on to be copied 16 bytes at a time.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Fp8Operands:
    """What one GEMM of FP8 weights has beside its values; scales are fp32.

    Attributes:
        weight_scales: ``[E, rows of an expert / 128, K / 128]``.
        x_scales: of x ``[T, K / 128]``, of h ``[K / 128, rows]``.
        h_values: of gate_up, ``[rows, I]`` e4m3 out.
        h_scales: of gate_up, ``[I / 128, rows]`` out.
    """

    weight_scales: torch.Tensor
    x_scales: torch.Tensor
    h_values: torch.Tensor | None = None
    h_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Operands:
    """What one GEMM multiplies, beside what all have.

    Attributes:
        x: ``[T, K]`` by token or ``[rows, K]``.
        weight: ``[E * rows of an expert, K]``.
        bias: ``[E, rows of an expert]`` or None.
        out: ``[rows, N]``.
        s: of :mod:`.group_shrink`, with ``groups``.
        topk_weights: for down.
        fp8: of FP8 weights.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    s: torch.Tensor | None
    topk_weights: torch.Tensor | None
    fp8: Fp8Operands | None = None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy whose rows can be read 16 bytes at a time."""
    if x.stride(0) * x.element_size() % _ALIGNMENT or x.data_ptr() % _ALIGNMENT:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def run_shrink(
    x: torch.Tensor, groups: BlockGroups, down: bool, rows: Rows, top_k: int, config: PrefillConfig
) -> torch.Tensor:
    """Return ``S`` ``[rows, sides * rank rows]`` in x's dtype, where a row has groups."""
    projections = groups.a_groups.shape[0]
    sides, first = (1, projections - 1) if down else (projections - 1, 0)
    s = torch.empty(rows.num_rows, sides * groups.rank_rows, dtype=x.dtype, device=x.device)
    spec = ShrinkSpec(rows.block_m, STAGES, not down, sides, top_k)
    arena = groups.table.arena.data
    p = ShrinkArguments(
        x=x.data_ptr(), s=s.data_ptr(), arena=arena.data_ptr(), row_pair=rows.row_pair.data_ptr(),
        block_info=rows.block_info.data_ptr(), live_blocks=rows.live_blocks.data_ptr(),
        row_segment=groups.row_segment.data_ptr(), group_count=groups.counts[int(down)].data_ptr(),
        a_groups=groups.a_groups[first:].data_ptr(), b_groups=groups.b_groups[first:].data_ptr(),
        ready=groups.ready[int(down)].data_ptr(),
        x_stride=x.stride(0) * 2, s_stride=s.stride(0) * 2, group_stride=groups.b_groups.stride(0),
        side_bytes=groups.rank_rows * 2, max_groups=groups.max_groups, size_k=x.shape[1],
    )  # fmt: skip
    programs = min(device_facts().num_sms, rows.num_blocks)
    kernel(spec, x.device.index).launch(programs, p, overlap=True)
    return s


def run_gate_up(
    x: torch.Tensor, weights: ExpertWeights, groups: BlockGroups | None, s: torch.Tensor | None,
    rows: Rows, top_k: int, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return h ``[rows, I]``, in the order of the blocks."""
    h = torch.empty(rows.num_rows, weights.intermediate, dtype=weights.dtype, device=x.device)
    spec = gate_up_spec(weights, s is not None, rows, top_k, config)
    weight = weights.gate_up.view(-1, weights.hidden)
    launch_gemm(spec, Operands(x, weight, weights.gate_up_bias, h, s, None), groups, rows)
    return h


def gate_up_spec(
    weights: ExpertWeights, lora: bool, rows: Rows, top_k: int, config: PrefillConfig
) -> Spec:
    """Return the specialisation of a layer's first GEMM."""
    act, columns = weights.activation, column_constants(weights)
    gated, bias = columns["GATED"], weights.gate_up_bias
    return Spec(
        rows.block_m, config.stages, gather=True, gated=gated, weighted=False, lora=lora,
        top_k=top_k,
        starts=(columns["GATE_START"], columns["UP_START"]) if gated else (0, 128),
        kind=act.kind, alpha=act.alpha, limit=act.limit, up_shift=act.up_shift,
        bias=None if bias is None else bias.dtype,
        fp8=weights.scales is not None,
    )  # fmt: skip


def run_down(
    h: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights,
    groups: BlockGroups | None, s: torch.Tensor | None, rows: Rows, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return y ``[rows, H]``, weighted, in the order of the blocks."""
    y = torch.empty(rows.num_rows, weights.hidden, dtype=weights.dtype, device=h.device)
    spec = down_spec(weights, s is not None, topk_weights, rows, config)
    weight = weights.down.view(-1, weights.intermediate)
    launch_gemm(spec, Operands(h, weight, weights.down_bias, y, s, topk_weights), groups, rows)
    return y


def down_spec(
    weights: ExpertWeights, lora: bool, topk_weights: torch.Tensor, rows: Rows,
    config: PrefillConfig,
) -> Spec:  # fmt: skip
    """Return the specialisation of a layer's second GEMM."""
    bias = weights.down_bias
    return Spec(
        rows.block_m, config.stages, gather=False, gated=False, weighted=True, lora=lora, top_k=1,
        starts=(0, 128), bias=None if bias is None else bias.dtype, weight=topk_weights.dtype,
        fp8=weights.scales is not None,
    )  # fmt: skip


def launch_gemm(spec: Spec, call: Operands, groups: BlockGroups | None, rows: Rows) -> None:
    """Launch one GEMM on all blocks of rows."""
    size_k, size_n = call.weight.shape[1], call.out.shape[1]
    tiles = triton.cdiv(size_n, 128 if spec.gated else 256)
    bias, weights = call.bias, call.topk_weights
    p = (Fp8Arguments if spec.fp8 else Arguments)(
        x=call.x.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
        topk_weights=0 if weights is None else weights.data_ptr(),
        row_pair=rows.row_pair.data_ptr(), block_info=rows.block_info.data_ptr(),
        live_blocks=rows.live_blocks.data_ptr(), x_stride=call.x.stride(0) * call.x.element_size(),
        size_k=size_k,
        size_n=size_n, weight_rows=(2 if spec.gated else 1) * size_n,
        bias_stride=0 if bias is None else bias.stride(0), num_tiles=tiles,
        ticket=rows.tickets[int(spec.weighted)].data_ptr(),
    )  # fmt: skip
    if groups is not None and call.s is not None:
        down = spec.weighted
        b_groups = groups.b_groups[groups.b_groups.shape[0] - 1 if down else 0 :]
        p.s, p.s_stride = call.s.data_ptr(), call.s.stride(0) * 2
        p.row_segment, p.group_count = (
            groups.row_segment.data_ptr(),
            groups.counts[int(down)].data_ptr(),
        )
        p.s_ready = groups.ready[int(down)].data_ptr()
        p.groups, p.group_stride = b_groups.data_ptr(), groups.b_groups.stride(0)
        p.arena, p.max_groups = groups.table.arena.data.data_ptr(), groups.max_groups
        p.side_bytes = groups.rank_rows * 2
    if call.fp8 is not None and isinstance(p, Fp8Arguments):
        _set_scales(p, call.fp8, rows)
    w_map = tensor_map(call.weight, 128, ROW_BYTES // call.weight.element_size())
    x_map = tensor_map(call.x, ROW_STEP, ROW_BYTES // call.x.element_size())
    out_map = tensor_map(call.out, ROW_STEP, ROW_BYTES // call.out.element_size())
    programs = min(device_facts().num_sms, rows.num_blocks * tiles)
    kernel(spec, call.x.device.index).launch(programs, w_map, x_map, out_map, p, overlap=True)


def _set_scales(p: Fp8Arguments, call: Fp8Operands, rows: Rows) -> None:
    p.x_scales, p.weight_scales = call.x_scales.data_ptr(), call.weight_scales.data_ptr()
    p.scale_rows = rows.num_rows
    if call.h_values is not None and call.h_scales is not None:
        p.h_values, p.h_scales = call.h_values.data_ptr(), call.h_scales.data_ptr()
