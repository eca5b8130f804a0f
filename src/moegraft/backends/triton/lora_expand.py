"""Stage ``lora_expand`` on the GPU: ``scale * B S`` of every segment, in fp32.

A program takes one segment, some tiles of output columns and one projection. It either adds to rows
of the base product in place, or leaves the delta in a buffer of its own and marks its pairs, for
the launch that adds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.lora_shrink import BLOCK_M, projection_records
from moegraft.backends.triton.segment_factors import load_factor, load_segment
from moegraft.backends.triton.workspace import RouteBuffers
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES

#: Columns of a tile and ranks of one product.
BLOCK_N, BLOCK_R = 64, 16
#: Programs per projection: most pairs open no segment, and programs without work are not free.
PROGRAMS = 8192


def run_lora_expand(
    ranks: torch.Tensor, table: SiteTable, projection: str, ws: RouteBuffers, out: torch.Tensor
) -> None:
    """Add one projection's delta in place.

    Args:
        ranks: fp32 ``[P, max_rank]`` from lora_shrink.
        table: the factors.
        projection: which.
        ws: the routing, made with slots.
        out: fp32 ``[P, out]`` view with any strides; rows without a delta are not touched.
    """
    strides = (out.stride(0), out.stride(1), 0)
    _launch(ranks[None], table, (projection,), ws, out, strides, out.shape[1], in_place=True)


def run_lora_delta(
    ranks: torch.Tensor,
    table: SiteTable,
    projections: tuple[str, ...],
    ws: RouteBuffers,
    out: torch.Tensor,
) -> None:
    """Write the deltas of neighbouring projections to a buffer and mark the pairs that have one.

    Args:
        ranks: fp32 ``[len(projections), P, max_rank]`` from lora_shrink.
        table: the factors.
        projections: in the table's order.
        ws: the routing, made with slots; ``ws.states`` is marked.
        out: fp32 ``[P, len(projections) * out]``; only rows and halves with a delta are written.
    """
    width = out.shape[1] // len(projections)
    strides = (out.stride(0), 1, width)
    _launch(ranks, table, projections, ws, out, strides, width, in_place=False)


def _launch(
    ranks: torch.Tensor,
    table: SiteTable,
    projections: tuple[str, ...],
    ws: RouteBuffers,
    out: torch.Tensor,
    strides: tuple[int, int, int],
    width: int,
    in_place: bool,
) -> None:
    if not ws.num_pairs or not table.max_rank:
        return
    assert table.expert_map is not None
    records = projection_records(table, projections)
    states = ws.states[2 if projections == ("down",) else 0]
    programs = min(triton.cdiv(width, BLOCK_N), triton.cdiv(PROGRAMS, ws.num_pairs))
    grid = (ws.num_pairs, programs, len(projections))
    listed(lora_expand_kernel)[grid](
        ranks, out, states, table.arena.data, ws.segments, ws.row_pair, records,
        records.view(torch.int32), table.expert_map, ws.num_pairs, width, table.max_rank, *strides,
        records.stride(0), table.expert_map.stride(0), table.num_slots,
        IN_PLACE=in_place, UNIT=UNIT_BYTES // table.arena.data.element_size(),
        BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N, num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "max_rank", "map_stride", "num_slots"])
def lora_expand_kernel(
    s_ptr,  # [sides, P, max_rank] fp32
    out_ptr,  # fp32
    states_ptr,  # [sides, P] int32; only written when not IN_PLACE
    arena_ptr,
    segments_ptr,
    row_pair_ptr,
    records_ptr,
    records_i32_ptr,
    map_ptr,
    num_pairs,
    size_n,
    max_rank,
    row_stride,
    column_stride,
    side_stride,
    slot_stride,
    map_stride,
    num_slots,
    IN_PLACE: tl.constexpr,  # add to out, else write the delta and mark its pairs
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """See the top of the file. B meets S in fp32: nothing of either is rounded."""
    side = tl.program_id(2).to(tl.int64)
    first_row, end_row, slot, expert = load_segment(segments_ptr, tl.program_id(0))
    if first_row >= 0:
        offset, b_stride, rank, scale = load_factor(
            records_ptr, records_i32_ptr, map_ptr, slot, side, expert, slot_stride, map_stride,
            num_slots, 1, UNIT,
        )  # fmt: skip
        if rank > 0:
            for n0 in range(tl.program_id(1) * BLOCK_N, size_n, tl.num_programs(1) * BLOCK_N):
                n = n0 + tl.arange(0, BLOCK_N)
                n_mask = n < size_n
                for m0 in range(first_row, end_row, BLOCK_M):
                    rows = m0 + tl.arange(0, BLOCK_M)
                    row_mask = rows < end_row
                    pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0).to(tl.int64)
                    s_rows = s_ptr + (side * num_pairs + pairs)[:, None] * max_rank
                    delta = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    for r0 in range(0, rank, BLOCK_R):
                        r = r0 + tl.arange(0, BLOCK_R)
                        r_mask = r < rank
                        s_mask = row_mask[:, None] & r_mask[None, :]
                        s = tl.load(s_rows + r[None, :], mask=s_mask, other=0.0)
                        b = tl.load(
                            arena_ptr + offset + r[:, None] * b_stride + n[None, :],
                            mask=r_mask[:, None] & n_mask[None, :],
                            other=0.0,
                        )
                        delta = tl.dot(s, b.to(tl.float32), delta, input_precision="ieee")
                    delta = delta * scale
                    out_rows = out_ptr + pairs[:, None] * row_stride + side * side_stride
                    out_ptrs = out_rows + n.to(tl.int64)[None, :] * column_stride
                    mask = row_mask[:, None] & n_mask[None, :]
                    if IN_PLACE:
                        delta += tl.load(out_ptrs, mask=mask, other=0.0)
                    elif n0 == 0:
                        tl.store(states_ptr + side * num_pairs + pairs, 257, mask=row_mask)
                    tl.store(out_ptrs, delta, mask=mask)
