"""Stage ``lora_shrink`` on the GPU: the rank vectors ``S = A x`` of every segment, in fp32.

One program per segment, block of ranks and projection. Small and plain: the check of the fused
kernels, which compute the rank vectors beside the base weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.config import block_r
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.segment_factors import load_factor, load_segment
from moegraft.backends.triton.workspace import RouteBuffers
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES

#: Rows of one product, and the step over the input.
BLOCK_M, BLOCK_K = 16, 64


def run_lora_shrink(
    x: torch.Tensor,
    table: SiteTable,
    projections: tuple[str, ...],
    ws: RouteBuffers,
    top_k: int,
    out: torch.Tensor,
) -> None:
    """Launch lora_shrink for neighbouring projections of one side.

    Args:
        x: ``[T, in]`` for gate and up, else ``[P, in]``; adjacent columns.
        table: the factors.
        projections: in the table's order.
        ws: the routing, made with slots.
        top_k: K.
        out: fp32 ``[len(projections), P, max_rank]``; only the live ranks of pairs that have a
            delta are written.
    """
    if not ws.num_pairs or not table.max_rank:
        return
    assert table.expert_map is not None
    records = projection_records(table, projections)
    rank_rows = block_r(table.max_rank)
    grid = (ws.num_pairs, triton.cdiv(table.max_rank, rank_rows), len(projections))
    listed(lora_shrink_kernel)[grid](
        x, out, table.arena.data, ws.segments, ws.row_pair, records, records.view(torch.int32),
        table.expert_map, ws.num_pairs, x.shape[1], table.max_rank, x.stride(0), records.stride(0),
        table.expert_map.stride(0), table.num_slots,
        TOP_K=top_k, BY_TOKEN=projections != ("down",),
        UNIT=UNIT_BYTES // table.arena.data.element_size(),
        BLOCK_M=BLOCK_M, BLOCK_R=rank_rows, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip


def projection_records(table: SiteTable, projections: tuple[str, ...]) -> torch.Tensor:
    """Return the records ``[S, .., 8]`` from the first of neighbouring projections on."""
    names = [p.name for p in table.site.projections]
    first = names.index(projections[0])
    assert tuple(names[first : first + len(projections)]) == projections, projections
    return table.records[:, first:]


@triton.jit(do_not_specialize=["num_pairs", "max_rank", "map_stride", "num_slots"])
def lora_shrink_kernel(
    x_ptr,  # [T, K] or [P, K]
    s_ptr,  # [sides, P, max_rank] fp32 out
    arena_ptr,
    segments_ptr,
    row_pair_ptr,
    records_ptr,
    records_i32_ptr,
    map_ptr,
    num_pairs,
    size_k,
    max_rank,
    x_stride,
    slot_stride,
    map_stride,
    num_slots,
    TOP_K: tl.constexpr,
    BY_TOKEN: tl.constexpr,  # x has a row per token, not per pair
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """See the top of the file."""
    side = tl.program_id(2)
    first_row, end_row, slot, expert = load_segment(segments_ptr, tl.program_id(0))
    if first_row >= 0:
        offset, a_stride, rank, _ = load_factor(
            records_ptr, records_i32_ptr, map_ptr, slot, side, expert, slot_stride, map_stride,
            num_slots, 0, UNIT,
        )  # fmt: skip
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        k = tl.arange(0, BLOCK_K)
        if tl.program_id(1) * BLOCK_R < rank:
            for m0 in range(first_row, end_row, BLOCK_M):
                rows = m0 + tl.arange(0, BLOCK_M)
                row_mask = rows < end_row
                pairs = tl.load(row_pair_ptr + rows, mask=row_mask, other=0).to(tl.int64)
                x_rows = pairs // TOP_K if BY_TOKEN else pairs
                s = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for k0 in range(0, size_k, BLOCK_K):
                    k_mask = (k0 + k < size_k)[None, :]
                    x = tl.load(
                        x_ptr + x_rows[:, None] * x_stride + (k0 + k)[None, :],
                        mask=row_mask[:, None] & k_mask,
                        other=0.0,
                    )
                    a = tl.load(
                        arena_ptr + offset + r[:, None] * a_stride + (k0 + k)[None, :],
                        mask=(r < rank)[:, None] & k_mask,
                        other=0.0,
                    )
                    if x.dtype != a.dtype:
                        x = x.to(tl.float32)
                        a = a.to(tl.float32)
                    s = tl.dot(x, tl.trans(a), s, input_precision="ieee")
                s_rows = side.to(tl.int64) * num_pairs + pairs
                s_ptrs = s_ptr + s_rows[:, None] * max_rank + r[None, :]
                tl.store(s_ptrs, s, mask=row_mask[:, None] & (r < rank)[None, :])
