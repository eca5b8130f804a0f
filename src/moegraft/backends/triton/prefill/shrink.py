"""Stage ``lora_shrink`` for many rows: ``S = scale * A x`` of neighbouring projections.

One program per 64 rows of one expert. It takes its segments one after the other; rows of other
segments are not loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.config import block_r
from moegraft.backends.triton.lora_shrink import projection_records
from moegraft.backends.triton.prefill.block_segments import BlockSegments
from moegraft.backends.triton.prefill.config import PrefillConfig
from moegraft.backends.triton.prefill.route import Rows
from moegraft.backends.triton.segment_factors import load_factor


@triton.jit(do_not_specialize=["map_stride", "num_slots"])
def prefill_shrink_kernel(
    x_ptr,  # [T, K] by token, or [P, K]
    s_ptr,  # [P, SIDES * max_rank] out, in x's dtype
    arena_ptr,
    row_pair_ptr,
    block_info_ptr,
    row_segment_ptr,  # this and the next two: see block_segments
    block_slots_ptr,
    records_ptr,
    records_i32_ptr,
    map_ptr,
    size_k,
    max_rank,
    x_stride,
    slot_stride,
    map_stride,
    num_slots,
    TOP_K: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    SIDES: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows of a GEMM's block
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """See the top of the file."""
    parts: tl.constexpr = BLOCK_ROWS // BLOCK_M
    block = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    info = tl.load(block_info_ptr + block)
    live_rows = info % 256 - part * BLOCK_M
    if live_rows <= 0:
        return
    expert = info // 256
    m = tl.arange(0, BLOCK_M)
    row_mask = m < live_rows
    pairs = tl.load(
        row_pair_ptr + block.to(tl.int64) * BLOCK_ROWS + part * BLOCK_M + m, mask=row_mask, other=0
    )
    row_segment = tl.load(
        row_segment_ptr + block.to(tl.int64) * BLOCK_ROWS + part * BLOCK_M + m, mask=row_mask,
        other=-1,
    )  # fmt: skip
    # Rows are sorted by slot, so a part's segments are a run.
    first = tl.min(tl.where(row_segment >= 0, row_segment, 2147483647), 0)
    last = tl.max(row_segment, 0)
    x_rows = (pairs // TOP_K if BY_TOKEN else pairs).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_base = x_ptr + x_rows[:, None] * x_stride + k[None, :]
    s_base = s_ptr + pairs.to(tl.int64)[:, None] * (SIDES * max_rank)
    for segment in range(first, last + 1):
        rows = row_segment == segment
        wide = tl.load(block_slots_ptr + block * BLOCK_ROWS + segment).to(tl.int64)
        a_offset, a_stride, rank, scale = load_factor(
            records_ptr, records_i32_ptr, map_ptr, wide, 0, expert, slot_stride, map_stride,
            num_slots, 0, UNIT,
        )  # fmt: skip
        a2_offset, a2_stride, rank2, scale2 = a_offset, a_stride, rank, scale
        if SIDES == 2:
            a2_offset, a2_stride, rank2, scale2 = load_factor(
                records_ptr, records_i32_ptr, map_ptr, wide, 1, expert, slot_stride, map_stride,
                num_slots, 0, UNIT,
            )  # fmt: skip
        for r0 in range(0, tl.maximum(rank, rank2), BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            x_ptrs = x_base
            a_ptrs = arena_ptr + a_offset + r[:, None] * a_stride + k[None, :]
            a2_ptrs = arena_ptr + a2_offset + r[:, None] * a2_stride + k[None, :]
            s = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            s2 = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for k0 in range(0, size_k, BLOCK_K):
                x_mask = rows[:, None]
                a_mask = (r < rank)[:, None]
                a2_mask = (r < rank2)[:, None]
                if not EVEN_K:
                    k_mask = (k0 + k < size_k)[None, :]
                    x_mask = x_mask & k_mask
                    a_mask = a_mask & k_mask
                    a2_mask = a2_mask & k_mask
                a = tl.load(a_ptrs, mask=a_mask, other=0.0)
                if SIDES == 2:
                    a2 = tl.load(a2_ptrs, mask=a2_mask, other=0.0)
                x = tl.load(x_ptrs, mask=x_mask, other=0.0)
                s = tl.dot(x, tl.trans(a).to(x.dtype), s, input_precision="ieee")
                if SIDES == 2:
                    s2 = tl.dot(x, tl.trans(a2).to(x.dtype), s2, input_precision="ieee")
                x_ptrs += BLOCK_K
                a_ptrs += BLOCK_K
                a2_ptrs += BLOCK_K
            dtype = s_ptr.dtype.element_ty
            # Also where the live rank ends: those are 0.
            mask = rows[:, None] & (r < max_rank)[None, :]
            tl.store(s_base + r[None, :], (s * scale).to(dtype), mask=mask)
            if SIDES == 2:
                tl.store(s_base + max_rank + r[None, :], (s2 * scale2).to(dtype), mask=mask)


def run_shrink(
    x: torch.Tensor,
    segments: BlockSegments,
    projections: tuple[str, ...],
    rows: Rows,
    top_k: int,
    config: PrefillConfig,
) -> torch.Tensor:
    """Return ``S`` ``[P, sides * max_rank]`` in x's dtype; ranks past a row's live one are 0."""
    table, sides = segments.table, len(projections)
    records = projection_records(table, projections)
    out = torch.empty(rows.num_pairs, sides * table.max_rank, dtype=x.dtype, device=x.device)
    tile = config.shrink
    by_token = projections != ("down",)
    assert table.expert_map is not None
    prefill_shrink_kernel[(rows.num_blocks * (config.block_m // tile.block_n),)](
        x, out, table.arena.data, rows.row_pair, rows.block_info, segments.row_segment,
        segments.block_slots, records,
        records.view(torch.int32), table.expert_map, x.shape[1], table.max_rank, x.stride(0),
        records.stride(0), table.expert_map.stride(0), table.num_slots,
        TOP_K=top_k, BY_TOKEN=by_token, SIDES=sides, UNIT=segments.unit,
        EVEN_K=x.shape[1] % tile.block_k == 0, BLOCK_ROWS=config.block_m, BLOCK_M=tile.block_n,
        BLOCK_R=block_r(table.max_rank), BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out
