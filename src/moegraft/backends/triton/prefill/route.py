"""Stage ``permute`` for many pairs: a counting sort by expert in three launches, linear in P.

Writes what :mod:`moegraft.backends.triton.route` writes, but no segments: pairs are taken in the
order of their tokens' slots, the sort is stable, and so the rows of an expert are sorted by slot.

    count  per chunk of pairs: how many each expert has, and how many earlier experts have
    scan   per expert: how many of its pairs lie in earlier chunks
    place  per chunk: sorts it by expert, and gives each pair its row; a few programs more write the
           blocks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.sync import launch_next, launch_wait

#: Pairs of one program.
CHUNK = 1024
#: Programs that write the blocks.
BLOCK_PROGRAMS = 16


@triton.jit
def _load_experts(
    topk_ids_ptr, order_ptr, i, num_pairs, expert_offset, TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """Return (pair, local expert) of places ``i``; NUM_EXPERTS where a pair is not local."""
    in_range = i < num_pairs
    token = i // TOP_K
    if HAS_ORDER:
        token = tl.load(order_ptr + token, mask=in_range, other=0).to(tl.int32)
    pair = token * TOP_K + i % TOP_K
    # Compared before the cast: an int64 id beyond 32 bits must not come back as a small one.
    expert = tl.load(topk_ids_ptr + pair, mask=in_range, other=-1) - expert_offset
    local = in_range & (expert >= 0) & (expert < NUM_EXPERTS)
    return pair, tl.where(local, expert.to(tl.int32), NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "expert_offset"])
def route_count_kernel(
    topk_ids_ptr,  # [P] int32/int64
    order_ptr,  # [T] integer: tokens in the order of their slots
    counts_ptr,  # [chunks, BINS] int32 out
    starts_ptr,  # [chunks, BINS] int32 out: pairs of earlier experts in the chunk
    num_pairs,
    expert_offset,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # a power of two above NUM_EXPERTS
    CHUNK: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    launch_next(PDL)
    launch_wait(PDL)
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    _, expert = _load_experts(
        topk_ids_ptr, order_ptr, i, num_pairs, expert_offset, TOP_K, NUM_EXPERTS, HAS_ORDER
    )
    counts = tl.histogram(expert, BINS)
    at = chunk * BINS + tl.arange(0, BINS)
    tl.store(counts_ptr + at, counts)
    tl.store(starts_ptr + at, tl.cumsum(counts, 0) - counts)


@triton.jit(do_not_specialize=["num_chunks"])
def route_scan_kernel(
    counts_ptr,  # [chunks, BINS] int32; out: pairs of the same expert in earlier chunks
    totals_ptr,  # [BINS] int32 out
    num_chunks,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    launch_next(PDL)
    launch_wait(PDL)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    for c0 in range(0, num_chunks, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        at = counts_ptr + c[:, None] * BINS + e[None, :]
        mask = (c < num_chunks)[:, None] & (e < BINS)[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(counts, 0) - counts + total[None, :], mask=mask)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + e, total, mask=e < BINS)


@triton.jit(do_not_specialize=["num_pairs", "expert_offset", "num_chunks", "num_blocks"])
def route_place_kernel(
    topk_ids_ptr,
    order_ptr,
    counts_ptr,
    starts_ptr,
    totals_ptr,
    row_pair_ptr,  # [rows] int32 out
    pair_row_ptr,  # [P] int32 out, -1 = not local
    block_info_ptr,  # [blocks + 3] int32 out: expert * 256 + rows, how many have rows, tickets
    num_pairs,
    expert_offset,
    num_chunks,
    num_blocks,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROW_STEP: tl.constexpr,  # an expert's blocks have as many rows each, to a multiple of this
    PDL: tl.constexpr,
):
    """See the top of the file."""
    launch_next(PDL)
    launch_wait(PDL)
    chunk = tl.program_id(0)
    e = tl.arange(0, BINS)
    totals = tl.where(e < NUM_EXPERTS, tl.load(totals_ptr + e), 0)
    blocks = (totals + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(blocks, 0) - blocks
    steps = tl.maximum(blocks, 1) * ROW_STEP
    block_rows = (totals + steps - 1) // steps * ROW_STEP
    if chunk >= num_chunks:
        # Blocks with rows come first; the others have 0.
        if chunk == num_chunks:
            tl.store(block_info_ptr + num_blocks, tl.sum(blocks, 0))
            tl.store(block_info_ptr + num_blocks + 1 + tl.arange(0, 2), tl.zeros([2], tl.int32))
        last = tl.where(e < NUM_EXPERTS, first + blocks, num_blocks)
        last = tl.where(e <= NUM_EXPERTS, last, first)
        most = tl.max(last - first, 0)
        for c in range(chunk - num_chunks, most, tl.num_programs(0) - num_chunks):
            rows = tl.minimum(tl.maximum(totals - c * block_rows, 0), block_rows)
            tl.store(block_info_ptr + first + c, e * 256 + rows, mask=first + c < last)
        return
    place = tl.arange(0, CHUNK)
    _, expert = _load_experts(
        topk_ids_ptr, order_ptr, chunk * CHUNK + place, num_pairs, expert_offset, TOP_K,
        NUM_EXPERTS, HAS_ORDER,
    )  # fmt: skip
    keys = tl.sort(expert * CHUNK + place)
    expert = keys // CHUNK
    i = chunk * CHUNK + keys % CHUNK
    in_range = i < num_pairs
    token = i // TOP_K
    if HAS_ORDER:
        token = tl.load(order_ptr + token, mask=in_range, other=0).to(tl.int32)
    pair = token * TOP_K + i % TOP_K
    at = chunk * BINS + expert
    index = place - tl.load(starts_ptr + at) + tl.load(counts_ptr + at)
    rows = tl.maximum(tl.gather(block_rows, expert, 0), 1)
    block = tl.gather(first, expert, 0) + index // rows
    row = block * BLOCK_M + index % rows
    local = in_range & (expert < NUM_EXPERTS)
    tl.store(row_pair_ptr + row, pair, mask=local)
    tl.store(pair_row_ptr + pair, tl.where(local, row, -1), mask=in_range)


@dataclass(frozen=True)
class Rows:
    """What route writes; see :class:`moegraft.backends.triton.workspace.RouteBuffers`.

    Attributes:
        block_m: rows that a block has room for.
        num_blocks: blocks that there is room for; those with rows come first.
        num_rows: rows of all blocks, the length of buffers in their order.
        live_blocks: int32 ``[1]``, how many blocks have rows.
        tickets: int32 ``[2]``, 0: for what programs of gate_up and of down have taken.
    """

    block_m: int
    num_blocks: int
    num_rows: int
    row_pair: torch.Tensor
    pair_row: torch.Tensor
    block_info: torch.Tensor
    live_blocks: torch.Tensor
    tickets: torch.Tensor


def run_route(
    topk_ids: torch.Tensor,
    order: torch.Tensor | None,
    num_experts: int,
    block_m: int,
    expert_offset: int = 0,
    row_step: int | None = None,
    options: dict[str, Any] | None = None,
) -> Rows:
    """Sort the pairs by expert, in three launches.

    Args:
        topk_ids: ``[T, K]``.
        order: tokens in the order of their slots; None = as they are.
        num_experts: of this rank.
        block_m: rows that a block has room for.
        expert_offset: the first expert of this rank.
        row_step: share an expert's rows among its blocks, to a multiple of this; None = fill one
            block after the other.
        options: of the launches, :meth:`.PrefillConfig.launch_options`.
    """
    pairs, device = topk_ids.numel(), topk_ids.device
    chunks, bins = triton.cdiv(pairs, CHUNK), triton.next_power_of_2(num_experts + 1)
    blocks = num_experts + pairs // block_m

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    info = ints(blocks + 3)
    rows = Rows(
        block_m, blocks, blocks * block_m, ints(blocks * block_m), ints(pairs), info[:blocks],
        info[blocks : blocks + 1], info[blocks + 1 :],
    )  # fmt: skip
    counts, starts, totals = ints(chunks, bins), ints(chunks, bins), ints(bins)
    constants = {
        "TOP_K": topk_ids.shape[1], "NUM_EXPERTS": num_experts, "BINS": bins, "CHUNK": CHUNK,
        "HAS_ORDER": order is not None,
    }  # fmt: skip
    options = options or {"PDL": False}
    places = topk_ids if order is None else order
    listed(route_count_kernel)[(chunks,)](
        topk_ids, places, counts, starts, pairs, expert_offset, **constants, num_warps=4,
        **options,
    )  # fmt: skip
    listed(route_scan_kernel)[(triton.cdiv(bins, 8),)](
        counts, totals, chunks, BINS=bins, BLOCK_C=32 if chunks <= 32 else 128,
        BLOCK_E=8, num_warps=4, **options,
    )  # fmt: skip
    listed(route_place_kernel)[(chunks + BLOCK_PROGRAMS,)](
        topk_ids, places, counts, starts, totals, rows.row_pair, rows.pair_row, rows.block_info,
        pairs, expert_offset, chunks, blocks, **constants, BLOCK_M=block_m,
        ROW_STEP=row_step or block_m, num_warps=4, **options,
    )  # fmt: skip
    return rows
