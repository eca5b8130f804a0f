"""Launch the delta's kernel, and say what a GEMM needs whose first programs compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from moegraft.backends.triton.config import FusedConfig, block_r
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.lora_shrink_expand import lora_shrink_expand_kernel
from moegraft.backends.triton.workspace import RouteBuffers, Workspace
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES
from moegraft.types import ExpertWeights

#: Rows of one product of lora_shrink_expand, the least that the matrix unit takes.
SEGMENT_ROWS = 16


def gate_up_tiles(weights: ExpertWeights, config: FusedConfig) -> int:
    """Return how many programs write h of one block."""
    return triton.cdiv(weights.intermediate, config.gate_up.block_n)


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
    listed(lora_shrink_expand_kernel)[(min(units.num_units, config.delta_programs),)](
        x, out, ws.states[2 if down else 0], table.arena.data, ws.segments, ws.row_pair,
        units.records, units.records.view(torch.int32), table.expert_map, ws.h_counter,
        gate_up_tiles(weights, config), units.num_units, ws.num_pairs, units.size_k, units.size_n,
        x.stride(0), table.records.stride(0), units.map_stride, table.num_slots,
        TOP_K=top_k, DOWN=down, SIDES=units.sides, SPLITS=config.splits(down), UNIT=units.unit,
        EVEN_K=units.even_k, EVEN_N=units.even_n, BLOCK_ROWS=config.block_m, BLOCK_M=SEGMENT_ROWS,
        BLOCK_R=block_r(table.max_rank), BLOCK_K=tile.block_k, BLOCK_N=tile.block_n,
        STAGES=tile.num_stages, num_warps=tile.num_warps, **config.launch_options(),
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


def delta_arguments(
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
