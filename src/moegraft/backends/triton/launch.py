"""Launch the fused kernels of one layer: route, gate_up_activation, down_expand, finalize."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.down_expand import down_expand_kernel, finalize_kernel
from moegraft.backends.triton.gate_up_activation import gate_up_activation_kernel
from moegraft.backends.triton.lora_shrink import lora_shrink_kernel
from moegraft.backends.triton.route import route_kernel
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES
from moegraft.types import ExpertWeights


@dataclass
class Workspace:
    """Scratch of one layer call at fixed addresses; one per stream and per graph.

    ``rows = num_blocks * block_m`` is the most rows that any routing of P pairs can need.
    """

    num_pairs: int
    num_blocks: int
    row_pair: torch.Tensor
    pair_row: torch.Tensor
    pair_head: torch.Tensor
    block_info: torch.Tensor
    desc64: torch.Tensor
    desc32: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    ranks_gate_up: torch.Tensor
    ranks_down: torch.Tensor


#: Up to this many pairs one program routes them all, and block numbers are dense.
MAX_DENSE_PAIRS = 32


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return how many block numbers P pairs over E experts can need."""
    if num_pairs <= MAX_DENSE_PAIRS:
        return min(num_pairs, num_experts + num_pairs // block_m)
    return num_experts + num_pairs // block_m


def make_workspace(
    weights: ExpertWeights, num_pairs: int, block_m: int, max_rank: int, y_dtype: torch.dtype
) -> Workspace:
    """Allocate scratch for P pairs."""
    blocks = max_blocks(num_pairs, weights.num_experts, block_m)
    rows = blocks * block_m

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=weights.device)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=weights.device)

    return Workspace(
        num_pairs=num_pairs,
        num_blocks=blocks,
        row_pair=ints(rows),
        pair_row=ints(num_pairs),
        pair_head=ints(num_pairs),
        block_info=ints(blocks),
        desc64=ints(rows, 8, dtype=torch.int64),
        desc32=ints(rows, 16),
        h=floats(rows, weights.intermediate, dtype=weights.dtype),
        y=floats(num_pairs, weights.hidden, dtype=y_dtype),
        ranks_gate_up=floats(rows, 2 if weights.layout.gated else 1, max(max_rank, 1)),
        ranks_down=floats(rows, max(max_rank, 1)),
    )


def run_route(
    topk_ids: torch.Tensor,
    slots: torch.Tensor | None,
    weights: ExpertWeights,
    table: SiteTable | None,
    ws: Workspace,
    config: FusedConfig,
    expert_offset: int = 0,
) -> None:
    """Sort the pairs into blocks and segments and look the segments' factors up."""
    pairs, num_experts = ws.num_pairs, weights.num_experts
    dense = pairs <= MAX_DENSE_PAIRS
    block_i = triton.next_power_of_2(pairs) if dense else 8
    block_e = 8
    pair_programs = triton.cdiv(pairs, block_i)
    expert_programs = 0 if dense else triton.cdiv(num_experts + 1, block_e)
    has_slots = slots is not None and table is not None
    table_args: tuple[torch.Tensor, ...]
    if table is not None and has_slots:
        assert table.expert_map is not None
        records = table.records
        table_args = (records, records.view(torch.int32), table.expert_map)
        strides = (records.stride(0), table.expert_map.stride(0))
    else:
        table_args, strides = (ws.desc64, ws.desc32, ws.desc32), (0, 0)
    route_kernel[(pair_programs + expert_programs,)](
        topk_ids, slots if has_slots else ws.pair_row,
        ws.row_pair, ws.pair_row, ws.pair_head, ws.block_info, ws.desc64, ws.desc32,
        *table_args, pairs, expert_offset, ws.num_blocks, *strides, pair_programs,
        TOP_K=topk_ids.shape[1], NUM_EXPERTS=num_experts, GATED=weights.layout.gated,
        UNIT=_unit(weights), BLOCK_M=config.block_m, BLOCK_I=block_i,
        BLOCK_J=min(512, triton.next_power_of_2(pairs)),
        BLOCK_E=block_e, DENSE=dense, HAS_SLOTS=has_slots, PDL=config.pdl,
        num_warps=4, **_launch_options(config),
    )  # fmt: skip


def run_shrink(
    rows: torch.Tensor,
    weights: ExpertWeights,
    table: SiteTable,
    ws: Workspace,
    top_k: int,
    config: FusedConfig,
    down: bool,
) -> None:
    """Launch lora_shrink for gate and up (rows per token) or down (rows of h)."""
    tile = config.shrink
    ranks = ws.ranks_down if down else ws.ranks_gate_up
    sides = 2 if weights.layout.gated and not down else 1
    max_rank = ranks.shape[-1]
    chunks = triton.cdiv(max_rank, tile.block_n)
    size_k = rows.shape[1]
    lora_shrink_kernel[(ws.num_pairs * chunks * sides,)](
        rows, ranks, table.arena.data, ws.desc64, ws.desc32, ws.row_pair, ws.pair_head,
        size_k, rows.stride(0),
        TOP_K=top_k, FIRST=2 if down else 2 - sides, SIDES=sides, RANK_CHUNKS=chunks,
        RANK_STRIDE=max_rank, UNIT=_unit(weights), EVEN_K=size_k % tile.block_k == 0,
        BLOCK_M=config.block_m, BLOCK_R=tile.block_n, BLOCK_K=tile.block_k, PDL=config.pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **_launch_options(config),
    )  # fmt: skip


def run_gate_up(
    x: torch.Tensor,
    weights: ExpertWeights,
    table: SiteTable | None,
    ws: Workspace,
    top_k: int,
    config: FusedConfig,
) -> None:
    """Launch gate_up_activation; a table means: with the rank vectors that the shrink left."""
    tile, layout = config.gate_up, weights.layout
    inter, hidden = weights.intermediate, weights.hidden
    up = layout.columns("up", inter)
    gate = layout.columns("gate", inter) if layout.gated else up
    w = weights.gate_up_oi
    tiles = triton.cdiv(inter, tile.block_n)
    act = weights.activation
    gate_up_activation_kernel[(ws.num_blocks * tiles,)](
        x, weights.gate_up, weights.gate_up_bias, ws.h, ws.ranks_gate_up,
        x if table is None else table.arena.data, ws.desc64, ws.desc32,
        ws.row_pair, ws.block_info,
        hidden, inter, x.stride(0), w.stride(0), w.stride(1), w.stride(2),
        0 if weights.gate_up_bias is None else weights.gate_up_bias.stride(0), tiles,
        TOP_K=top_k, GATE_START=gate.start, UP_START=up.start, COLUMN_STEP=up.step or 1,
        GATED=layout.gated, HAS_BIAS=weights.gate_up_bias is not None,
        KIND=act.kind, ALPHA=act.alpha, UP_SHIFT=act.up_shift,
        HAS_LIMIT=act.limit is not None, LIMIT=act.limit or 0.0,
        LORA=table is not None, RANK_STRIDE=ws.ranks_gate_up.shape[-1], UNIT=_unit(weights),
        EVEN_K=hidden % tile.block_k == 0, EVEN_N=inter % tile.block_n == 0,
        BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        BLOCK_R=config.shrink.block_n, PDL=config.pdl, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **_launch_options(config),
    )  # fmt: skip


def run_down(
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    table: SiteTable | None,
    ws: Workspace,
    config: FusedConfig,
) -> None:
    """Launch down_expand; a table means: with the rank vectors that the shrink left."""
    tile, w = config.down, weights.down_oi
    inter, hidden = weights.intermediate, weights.hidden
    tiles = triton.cdiv(hidden, tile.block_n)
    down_expand_kernel[(ws.num_blocks * tiles,)](
        ws.h, weights.down, weights.down_bias, topk_weights, ws.y, ws.ranks_down,
        ws.h if table is None else table.arena.data, ws.desc64, ws.desc32,
        ws.row_pair, ws.block_info,
        hidden, inter, w.stride(0), w.stride(1), w.stride(2), tiles,
        HAS_BIAS=weights.down_bias is not None,
        LORA=table is not None, RANK_STRIDE=ws.ranks_down.shape[-1], UNIT=_unit(weights),
        EVEN_K=inter % tile.block_k == 0, EVEN_N=hidden % tile.block_n == 0,
        BLOCK_M=config.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        BLOCK_R=config.shrink.block_n, PDL=config.pdl, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **_launch_options(config),
    )  # fmt: skip


def run_finalize(
    ws: Workspace, out: torch.Tensor, top_k: int, scale: float, config: FusedConfig
) -> None:
    """Sum the weighted rows of each token."""
    hidden = out.shape[1]
    block = min(256, triton.next_power_of_2(hidden))
    finalize_kernel[(out.shape[0], triton.cdiv(hidden, block))](
        ws.y, ws.pair_row, out, hidden, out.stride(0), scale,
        TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k), BLOCK_H=block, PDL=config.pdl,
        num_warps=4, **_launch_options(config),
    )  # fmt: skip


def run_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    table: SiteTable | None,
    slots: torch.Tensor | None,
    ws: Workspace,
    config: FusedConfig,
    out: torch.Tensor,
    expert_offset: int = 0,
    scale: float = 1.0,
) -> None:
    """Run the whole layer; without table or slots, the base layer and its launches only."""
    top_k = topk_ids.shape[1]
    if slots is None:
        table = None
    run_route(topk_ids, slots, weights, table, ws, config, expert_offset)
    if table is not None:
        run_shrink(x, weights, table, ws, top_k, config, down=False)
    run_gate_up(x, weights, table, ws, top_k, config)
    if table is not None:
        run_shrink(ws.h, weights, table, ws, top_k, config, down=True)
    run_down(topk_weights, weights, table, ws, config)
    run_finalize(ws, out, top_k, scale, config)


def _unit(weights: ExpertWeights) -> int:
    return UNIT_BYTES // weights.dtype.itemsize


def _launch_options(config: FusedConfig) -> dict[str, bool]:
    # Interpreters and older cards know no such option, so it is only passed when it is on.
    return {"launch_pdl": True} if config.pdl else {}
