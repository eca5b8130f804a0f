"""Launch the kernels of one layer, each by one function: its grid, its arguments, its options."""

from __future__ import annotations

import torch
import triton

from moegraft.backends.triton.activation import activation_constants
from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.finalize import finalize_kernel
from moegraft.backends.triton.gate_up_activation import gate_up_activation_kernel
from moegraft.backends.triton.grouped_gemm import grouped_gemm_kernel
from moegraft.backends.triton.launch_delta import delta_arguments, gate_up_tiles
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.route import route_kernel
from moegraft.backends.triton.weights.arguments import Stored, gate_up_arguments, gemm_arguments
from moegraft.backends.triton.weights.rows import (
    BaseRows,
    copy_arguments,
    make_base_rows,
    run_base_rows,
)
from moegraft.backends.triton.workspace import MAX_DENSE_PAIRS, RouteBuffers, Workspace
from moegraft.factor_table import SiteTable
from moegraft.quant.checks import num_parts
from moegraft.types import ExpertWeights

#: Pairs above which route has more and wider programs.
MAX_PAIRS_OF_4_WARPS = 1024


def run_route(
    topk_ids: torch.Tensor,
    slots: torch.Tensor | None,
    num_experts: int,
    ws: RouteBuffers,
    config: FusedConfig,
    expert_offset: int = 0,
    source: torch.Tensor | None = None,
    base: BaseRows | None = None,
) -> None:
    """Sort the pairs into blocks and, with slots int32 ``[T]``, segments.

    ``base``: the copy of ``source`` (x) that the base product reads, made in the same launch.
    """
    pairs = ws.num_pairs
    dense = pairs <= MAX_DENSE_PAIRS
    many = pairs > MAX_PAIRS_OF_4_WARPS
    block_i = triton.next_power_of_2(pairs) if dense else 4 if many else 8
    block_j = min(1024 if many else 512, triton.next_power_of_2(pairs))
    block_e = 8
    pair_programs = triton.cdiv(pairs, block_i)
    expert_programs = 0 if dense else triton.cdiv(num_experts + 1, block_e)
    copy, copy_programs = copy_arguments(source, base)
    listed(route_kernel)[(copy_programs + pair_programs + expert_programs,)](
        topk_ids, ws.pair_row if slots is None else slots,
        ws.row_pair, ws.pair_row, ws.segments, ws.states, ws.block_info, ws.h_counter,
        pairs, expert_offset, ws.num_blocks, pair_programs,
        TOP_K=topk_ids.shape[1], NUM_EXPERTS=num_experts, BLOCK_M=config.block_m, BLOCK_I=block_i,
        BLOCK_J=block_j, BLOCK_E=block_e, DENSE=dense,
        HAS_SLOTS=slots is not None, num_warps=8 if many else 4,
        base_programs=copy_programs or None, **copy, **config.launch_options(),
    )  # fmt: skip


def run_gate_up(
    x: torch.Tensor,
    weights: ExpertWeights,
    ws: Workspace,
    top_k: int,
    config: FusedConfig,
    table: SiteTable | None = None,
    slots: torch.Tensor | None = None,
    every_pair: torch.Tensor | None = None,
    keep_h: bool = False,
) -> None:
    """Launch gate_up_activation; with table and slots it adds (if merged, computes) the delta.

    ``every_pair``: a delta of all pairs that somebody else computed, ``[P, 2I]`` as gate | up, in
    any float dtype; without table and slots. ``keep_h``: leave h in ``ws.h`` also where only the
    base product of down reads it, which may have a copy of its own.
    """
    tile = config.gate_up
    inter, hidden = weights.intermediate, weights.hidden
    w = Stored.of(weights.gate_up_oi)
    bias = weights.gate_up_bias
    tiles = gate_up_tiles(weights, config)
    programs, delta = delta_arguments(weights, table, ws, config, down=False)
    h = ws.base_h
    listed(gate_up_activation_kernel)[(programs + ws.num_blocks * tiles,)](
        x, w.tensor, bias, ws.h, ws.delta_gate_up if every_pair is None else every_pair,
        ws.states, ws.row_pair, ws.block_info, slots, ws.h_counter,
        hidden, inter, x.stride(0), *w.strides,
        0 if bias is None else bias.stride(0), tiles, ws.num_pairs,
        h_base_ptr=None if h is None else h.values,
        h_base_scales_ptr=None if h is None else h.scales,
        h_base_stride=None if h is None else h.values.stride(0), STORE_ROWS=h is not None,
        STORE_H=h is None or keep_h or table is not None,
        TOP_K=top_k, HAS_BIAS=bias is not None, WORD_UNIT=w.unit,
        DELTA="all" if every_pair is not None else "none" if slots is None else "some",
        EVEN_K=hidden % tile.block_k == 0, EVEN_N=inter % tile.block_n == 0, SWAP=tile.swap,
        BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **gate_up_arguments(weights, ws.base_x), **activation_constants(weights), **delta,
        **config.launch_options(),
    )  # fmt: skip


def run_down(
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    ws: Workspace,
    config: FusedConfig,
    table: SiteTable | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Launch down with the routing weight.

    With table (and ``merged``) its first programs compute the delta, for finalize to add. With
    slots it adds a delta that is there; the callers want one or the other.
    """
    tile, w = config.down, Stored.of(weights.down_oi)
    inter, hidden = weights.intermediate, weights.hidden
    bias = weights.down_bias
    tiles = triton.cdiv(hidden, tile.block_n)
    programs, delta = delta_arguments(weights, table, ws, config, down=True)
    listed(grouped_gemm_kernel)[(programs + ws.num_blocks * tiles,)](
        ws.h, w.tensor, bias, topk_weights, ws.y, ws.delta_down, ws.states[2],
        ws.row_pair, ws.block_info, slots, ws.h_counter, gate_up_tiles(weights, config),
        hidden, inter, ws.h.stride(0), *w.strides,
        0 if bias is None else bias.stride(0), tiles, ws.num_pairs,
        TOP_K=topk_weights.shape[1], AFTER_H=True, X_BY_TOKEN=False, WEIGHTED=True,
        HAS_BIAS=bias is not None, HAS_DELTA=slots is not None,
        EVEN_K=inter % tile.block_k == 0, EVEN_N=hidden % tile.block_n == 0, SWAP=tile.swap,
        BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        OUT_PARTS=1, WORD_UNIT=w.unit, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **gemm_arguments(weights, ws.base_h, down=True), **delta, **config.launch_options(),
    )  # fmt: skip


def run_grouped_gemm(
    x: torch.Tensor,
    weights: ExpertWeights,
    ws: RouteBuffers,
    top_k: int,
    config: FusedConfig,
    out: torch.Tensor,
    down: bool,
    base: BaseRows | None = None,
) -> None:
    """Launch a plain product with its bias: gate_up of x per token, or down of h per pair.

    ``out`` is fp32 ``[P, columns]`` in the host's columns; only rows of local pairs are written.
    ``base``: x as the product reads it, made here where it is None. Gate and up of quantised
    weights are a launch each where each has scales of its own.
    """
    tile = config.down if down else config.gate_up
    w = Stored.of(weights.down_oi if down else weights.gate_up_oi)
    bias = weights.down_bias if down else weights.gate_up_bias
    if bias is not None and bias.stride(1) != 1:
        bias = bias.contiguous()
    size_k = weights.intermediate if down else weights.hidden
    if base is None:
        base = make_base_rows(weights.weight_format, x.shape[0], x.shape[1], x.dtype, x.device)
        run_base_rows(x, base)
    parts = 1 if down or weights.scales is None else num_parts(weights.layout)
    size_n = w.tensor.shape[1] // parts
    tiles = triton.cdiv(size_n, tile.block_n)
    _, delta = delta_arguments(weights, None, ws, config, down=True)  # none of them
    for part in range(parts):
        columns = slice(part * size_n, (part + 1) * size_n)
        part_bias = None if bias is None else bias[:, columns]
        form = gemm_arguments(weights, base, down, part if parts > 1 else None)
        listed(grouped_gemm_kernel)[(ws.num_blocks * tiles,)](
            x, w.tensor[:, columns], part_bias, None, out[:, columns],
            None, None, ws.row_pair, ws.block_info, None, ws.h_counter, 0, size_n, size_k,
            x.stride(0), *w.strides,
            0 if bias is None else bias.stride(0), tiles, ws.num_pairs,
            TOP_K=top_k, AFTER_H=False, X_BY_TOKEN=not down, WEIGHTED=False,
            HAS_BIAS=bias is not None, HAS_DELTA=False, OUT_PARTS=parts, WORD_UNIT=w.unit,
            EVEN_K=size_k % tile.block_k == 0, EVEN_N=size_n % tile.block_n == 0, SWAP=tile.swap,
            BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **form, **delta,
            **config.launch_options(),
        )  # fmt: skip


def run_finalize(
    ws: Workspace,
    out: torch.Tensor,
    top_k: int,
    scale: float,
    config: FusedConfig,
    delta_weights: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Sum the weighted rows of each token.

    ``delta_weights``: the routing weights, to add down's delta here, where nothing waits for it;
    with ``slots`` int32 ``[T]``.
    """
    hidden = out.shape[1]
    block = min(256, triton.next_power_of_2(hidden))
    listed(finalize_kernel)[(out.shape[0], triton.cdiv(hidden, block))](
        ws.y, ws.pair_row, out, slots, delta_weights, ws.delta_down, ws.states[2],
        hidden, out.stride(0), scale, DELTA=delta_weights is not None,
        TOP_K=top_k, BLOCK_H=block,
        num_warps=2, **config.launch_options(),
    )  # fmt: skip
