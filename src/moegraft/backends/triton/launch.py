"""Launch the kernels of one layer, each by one function: its grid, its arguments, its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from moegraft.backends.triton.activation import activation_constants
from moegraft.backends.triton.config import FusedConfig, block_r
from moegraft.backends.triton.finalize import finalize_kernel
from moegraft.backends.triton.gate_up_activation import gate_up_activation_kernel
from moegraft.backends.triton.grouped_gemm import grouped_gemm_kernel
from moegraft.backends.triton.lora_shrink_expand import lora_shrink_expand_kernel
from moegraft.backends.triton.route import route_kernel
from moegraft.backends.triton.workspace import MAX_DENSE_PAIRS, RouteBuffers, Workspace
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES
from moegraft.types import ExpertWeights

#: Rows of one product of lora_shrink_expand, the least that the matrix unit takes.
SEGMENT_ROWS = 16
#: Pairs above which route has more and wider programs.
MAX_PAIRS_OF_4_WARPS = 1024


def run_route(
    topk_ids: torch.Tensor,
    slots: torch.Tensor | None,
    num_experts: int,
    ws: RouteBuffers,
    config: FusedConfig,
    expert_offset: int = 0,
) -> None:
    """Sort the pairs into blocks and, with slots int32 ``[T]``, segments."""
    pairs = ws.num_pairs
    dense = pairs <= MAX_DENSE_PAIRS
    many = pairs > MAX_PAIRS_OF_4_WARPS
    block_i = triton.next_power_of_2(pairs) if dense else 4 if many else 8
    block_j = min(1024 if many else 512, triton.next_power_of_2(pairs))
    block_e = 8
    pair_programs = triton.cdiv(pairs, block_i)
    expert_programs = 0 if dense else triton.cdiv(num_experts + 1, block_e)
    route_kernel[(pair_programs + expert_programs,)](
        topk_ids, ws.pair_row if slots is None else slots,
        ws.row_pair, ws.pair_row, ws.segments, ws.states, ws.block_info, ws.h_counter,
        pairs, expert_offset, ws.num_blocks, pair_programs,
        TOP_K=topk_ids.shape[1], NUM_EXPERTS=num_experts, BLOCK_M=config.block_m, BLOCK_I=block_i,
        BLOCK_J=block_j, BLOCK_E=block_e, DENSE=dense,
        HAS_SLOTS=slots is not None, num_warps=8 if many else 4, **_pdl(config),
    )  # fmt: skip


def run_delta(
    x: torch.Tensor,
    weights: ExpertWeights,
    table: SiteTable,
    ws: Workspace,
    top_k: int,
    config: FusedConfig,
    down: bool,
) -> None:
    """Launch lora_shrink_expand for gate and up (x per token) or for down (h per pair)."""
    tile = config.delta
    units = DeltaUnits.of(weights, table, ws, config, down)
    out = ws.delta_down if down else ws.delta_gate_up
    lora_shrink_expand_kernel[(min(units.num_units, config.delta_programs),)](
        x, out, ws.states[2 if down else 0], table.arena.data, ws.segments, ws.row_pair,
        units.records, units.records.view(torch.int32), table.expert_map, ws.h_counter,
        gate_up_tiles(weights, config), units.num_units, ws.num_pairs, units.size_k, units.size_n,
        x.stride(0), table.records.stride(0), units.map_stride, table.num_slots,
        TOP_K=top_k, DOWN=down, SIDES=units.sides, SPLITS=config.splits(down), UNIT=units.unit,
        EVEN_K=units.even_k, EVEN_N=units.even_n, BLOCK_ROWS=config.block_m, BLOCK_M=SEGMENT_ROWS,
        BLOCK_R=block_r(table.max_rank), BLOCK_K=tile.block_k, BLOCK_N=tile.block_n,
        STAGES=tile.num_stages, num_warps=tile.num_warps, **_pdl(config),
    )  # fmt: skip


@dataclass(frozen=True)
class DeltaUnits:
    """What describes the units of one side's delta; see :mod:`.segment_delta`."""

    records: torch.Tensor
    num_units: int
    size_k: int
    size_n: int
    sides: int
    map_stride: int
    unit: int
    even_k: bool
    even_n: bool

    @staticmethod
    def of(
        weights: ExpertWeights, table: SiteTable, ws: RouteBuffers, config: FusedConfig, down: bool
    ) -> DeltaUnits:
        """Describe the units of gate and up, or of down."""
        assert table.expert_map is not None
        tile = config.delta
        sides = 2 if weights.layout.gated and not down else 1
        sizes = (weights.hidden, weights.intermediate)
        size_k, size_n = sizes[::-1] if down else sizes
        return DeltaUnits(
            records=table.records[:, table.records.shape[1] - 1 if down else 0 :],
            num_units=ws.num_pairs * sides * config.splits(down),
            size_k=size_k,
            size_n=size_n,
            sides=sides,
            map_stride=table.expert_map.stride(0),
            unit=UNIT_BYTES // table.arena.data.element_size(),
            even_k=size_k % tile.block_k == 0,
            even_n=size_n % (tile.block_n * config.splits(down)) == 0,
        )


def _delta_args(
    weights: ExpertWeights,
    table: SiteTable | None,
    ws: RouteBuffers,
    config: FusedConfig,
    down: bool,
) -> tuple[int, dict[str, Any]]:
    """Return a GEMM's programs for the delta and its arguments for them."""
    if table is None or not config.merged:
        none = dict.fromkeys(
            ("arena_ptr", "segments_ptr", "records_ptr", "records_i32_ptr", "map_ptr")
        )
        zero = dict.fromkeys(
            ("slot_stride", "map_stride", "num_slots", "num_units", "delta_programs"), 0
        )
        off = dict.fromkeys(("UNITS", "DELTA_EVEN_K", "DELTA_EVEN_N"), False)
        one = dict.fromkeys(("UNIT", "DELTA_M", "DELTA_R", "DELTA_K", "DELTA_N", "DELTA_STAGES"), 1)
        return 0, {**none, **zero, **off, **one, "SPLITS": config.splits(down)}
    tile = config.delta
    units = DeltaUnits.of(weights, table, ws, config, down)
    programs = min(units.num_units, config.delta_programs)
    return programs, {
        "arena_ptr": table.arena.data,
        "segments_ptr": ws.segments,
        "records_ptr": units.records,
        "records_i32_ptr": units.records.view(torch.int32),
        "map_ptr": table.expert_map,
        "slot_stride": table.records.stride(0),
        "map_stride": units.map_stride,
        "num_slots": table.num_slots,
        "num_units": units.num_units,
        "delta_programs": programs,
        "UNITS": True,
        "SPLITS": config.splits(down),
        "UNIT": units.unit,
        "DELTA_EVEN_K": units.even_k,
        "DELTA_EVEN_N": units.even_n,
        "DELTA_M": SEGMENT_ROWS,
        "DELTA_R": block_r(table.max_rank),
        "DELTA_K": tile.block_k,
        "DELTA_N": tile.block_n,
        "DELTA_STAGES": tile.num_stages,
    }


def gate_up_tiles(weights: ExpertWeights, config: FusedConfig) -> int:
    """Return how many programs write h of one block."""
    return triton.cdiv(weights.intermediate, config.gate_up.block_n)


def run_gate_up(
    x: torch.Tensor,
    weights: ExpertWeights,
    ws: Workspace,
    top_k: int,
    config: FusedConfig,
    table: SiteTable | None = None,
    slots: torch.Tensor | None = None,
    every_pair: torch.Tensor | None = None,
) -> None:
    """Launch gate_up_activation; with table and slots it adds (if merged, computes) the delta.

    ``every_pair``: a delta of all pairs that somebody else computed, ``[P, 2I]`` as gate | up, in
    any float dtype; without table and slots.
    """
    tile = config.gate_up
    inter, hidden = weights.intermediate, weights.hidden
    w = weights.gate_up_oi
    bias = weights.gate_up_bias
    tiles = gate_up_tiles(weights, config)
    programs, delta = _delta_args(weights, table, ws, config, down=False)
    gate_up_activation_kernel[(programs + ws.num_blocks * tiles,)](
        x, weights.gate_up, bias, ws.h, ws.delta_gate_up if every_pair is None else every_pair,
        ws.states, ws.row_pair, ws.block_info, slots, ws.h_counter,
        hidden, inter, x.stride(0), w.stride(0), w.stride(1), w.stride(2),
        0 if bias is None else bias.stride(0), tiles, ws.num_pairs,
        TOP_K=top_k, HAS_BIAS=bias is not None,
        DELTA="all" if every_pair is not None else "none" if slots is None else "some",
        EVEN_K=hidden % tile.block_k == 0, EVEN_N=inter % tile.block_n == 0, SWAP=tile.swap,
        BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **activation_constants(weights), **delta, **_pdl(config),
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
    tile, w = config.down, weights.down_oi
    inter, hidden = weights.intermediate, weights.hidden
    bias = weights.down_bias
    tiles = triton.cdiv(hidden, tile.block_n)
    programs, delta = _delta_args(weights, table, ws, config, down=True)
    grouped_gemm_kernel[(programs + ws.num_blocks * tiles,)](
        ws.h, weights.down, bias, topk_weights, ws.y, ws.delta_down, ws.states[2],
        ws.row_pair, ws.block_info, slots, ws.h_counter, gate_up_tiles(weights, config),
        hidden, inter, ws.h.stride(0), w.stride(0), w.stride(1), w.stride(2),
        0 if bias is None else bias.stride(0), tiles, ws.num_pairs,
        TOP_K=topk_weights.shape[1], AFTER_H=True, X_BY_TOKEN=False, WEIGHTED=True,
        HAS_BIAS=bias is not None, HAS_DELTA=slots is not None,
        EVEN_K=inter % tile.block_k == 0, EVEN_N=hidden % tile.block_n == 0, SWAP=tile.swap,
        BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **delta, **_pdl(config),
    )  # fmt: skip


def run_grouped_gemm(
    x: torch.Tensor,
    weights: ExpertWeights,
    ws: RouteBuffers,
    top_k: int,
    config: FusedConfig,
    out: torch.Tensor,
    down: bool,
) -> None:
    """Launch a plain product with its bias: gate_up of x per token, or down of h per pair.

    ``out`` is fp32 ``[P, columns]`` in the host's columns; only rows of local pairs are written.
    """
    tile = config.down if down else config.gate_up
    w = weights.down_oi if down else weights.gate_up_oi
    bias = weights.down_bias if down else weights.gate_up_bias
    if bias is not None and bias.stride(1) != 1:
        bias = bias.contiguous()
    size_n, size_k = w.shape[1:]
    tiles = triton.cdiv(size_n, tile.block_n)
    _, delta = _delta_args(weights, None, ws, config, down=True)  # none of them
    grouped_gemm_kernel[(ws.num_blocks * tiles,)](
        x, w, bias, None, out, None, None, ws.row_pair, ws.block_info, None, ws.h_counter, 0,
        size_n, size_k, x.stride(0), w.stride(0), w.stride(1), w.stride(2),
        0 if bias is None else bias.stride(0), tiles, ws.num_pairs,
        TOP_K=top_k, AFTER_H=False, X_BY_TOKEN=not down, WEIGHTED=False,
        HAS_BIAS=bias is not None, HAS_DELTA=False,
        EVEN_K=size_k % tile.block_k == 0, EVEN_N=size_n % tile.block_n == 0, SWAP=tile.swap,
        BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **delta, **_pdl(config),
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
    finalize_kernel[(out.shape[0], triton.cdiv(hidden, block))](
        ws.y, ws.pair_row, out, slots, delta_weights, ws.delta_down, ws.states[2],
        hidden, out.stride(0), scale, DELTA=delta_weights is not None,
        TOP_K=top_k, BLOCK_H=block,
        num_warps=2, **_pdl(config),
    )  # fmt: skip


def _pdl(config: FusedConfig) -> dict[str, Any]:
    # Interpreters and older cards know no such launch option, so it is only passed when it is on.
    return {"PDL": True, "launch_pdl": True} if config.pdl else {"PDL": False}
