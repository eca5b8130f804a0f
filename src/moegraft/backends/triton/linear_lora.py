"""Stage ``linear_lora``: dense linears that read the same x, in one launch.

Few tokens of common ranks go to :mod:`.linear_split`, see :func:`.linear_split.choose_split`. Here
is the kernel for the rest: one program per segment (at most ``BLOCK_M`` tokens of one slot) and
tile of output columns. It computes the rank vectors ``S = A x`` of its segment itself, so it waits
for no other program, and adds ``scale * S B`` to its tile. A comes from L2 for all tiles but the
first that reads it; the wider a tile, the less often S is computed again. Programs of unused
segments, and of slots without factors for the projection, end at once.

Rows are picked by the segments: rows without a delta are neither read nor written, and nothing
crosses from one slot's rows to another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl

from moegraft.backends.launch_list import LaunchLists
from moegraft.backends.triton.linear_parts import (
    MAX_PROJECTIONS,
    add_product,
    expand,
    load_b,
    load_record,
)
from moegraft.backends.triton.linear_split import SplitTile, choose_split, launch_split
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.sync import launch_next, launch_wait
from moegraft.backends.triton.token_segments import TokenSegments, max_segments, token_segments
from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES
from moegraft.types import TokenSlots

#: Up to this many tokens a segment has 16 rows, then 64: factors are read less often.
MAX_SMALL_TOKENS = 1024
#: Programs that are enough for a GPU; more make tiles wider instead, and S is computed less often.
FULL_GPU = 66
_lists = LaunchLists()


@dataclass(frozen=True)
class LinearTile:
    """What shapes a launch; never depends on which adapters are live.

    Attributes:
        block_m: rows of a segment.
        block_n: columns that are computed at once.
        pieces: a tile is ``pieces * block_n`` columns wide.
        block_r: ranks at once; a larger live rank is done in several rounds.
        block_k: step over the input.
        num_warps, num_stages: as Triton takes them.
    """

    block_m: int
    block_n: int
    pieces: int
    block_r: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3


@lru_cache(maxsize=1024)
def choose_tile(
    num_tokens: int, num_slots: int, columns: int, max_rank: int, itemsize: int = 2
) -> LinearTile:
    """Return the tile of a launch: narrow for few tokens, wide where programs abound.

    Args:
        num_tokens, num_slots: T and S.
        columns: output columns of all projections together.
        max_rank: the largest rank that any slot may hold.
        itemsize: bytes of x's or the factors' dtype, the larger.
    """
    exact = itemsize == 4  # no tensor cores: small tiles, or registers spill
    block_m = 16 if exact or num_tokens <= MAX_SMALL_TOKENS else 64
    block_r = min(16 if exact else 64, max(16, triton.next_power_of_2(max_rank)))
    block_k = 512 if block_r <= 32 else 256
    if exact or block_m == 64:
        block_k = 64
    # A bank may have many slots, but few have tokens at the same time.
    programs = max_segments(num_tokens, min(num_slots, 8), block_m) * columns
    wide = min(512, max(128, triton.next_power_of_2(triton.cdiv(programs, FULL_GPU))))
    block_n = min(wide, 64 if exact else 128)
    # With several rounds of ranks, S would be computed again for each piece.
    one_round = max_rank <= block_r
    pieces = wide // block_n if one_round else 1
    num_warps = 4 if block_m == 16 and (one_round or exact) else 8  # else registers spill
    return LinearTile(block_m, block_n, pieces, block_r, block_k, num_warps)


def linear_lora(x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor) -> None:
    """See :meth:`moegraft.stages.Stages.linear_lora`."""
    linear_lora_group(x, (table,), slots, (out,))


def linear_lora_group(
    x: torch.Tensor,
    tables: Sequence[SiteTable],
    slots: TokenSlots,
    outs: Sequence[torch.Tensor],
    *,
    tile: LinearTile | SplitTile | None = None,
    pdl: bool = False,
) -> None:
    """Add the deltas of several linears that read the same x, in one launch for up to four.

    ``outs[i][t] += scale * B[slot_t] (A[slot_t] x[t])`` in place, with the factors of
    ``tables[i]``; summed in fp32, rounded once. Rows without a delta are not touched.

    Args:
        x: ``[T, in]``; rows may have any stride.
        tables: one per linear. Those of one bank share a launch; others get their own.
        slots: adapter slot per token, -1 = none.
        outs: one ``[T, out_i]`` per linear, with adjacent columns and any row stride. They may
            be columns of one tensor; they may not overlap each other or x.
        tile: how to cut the work, which also says with which kernel; None = chosen by the sizes.
        pdl: programmatic dependent launch (Hopper and newer).

    The host reads nothing of the device, so a CUDA graph may hold the launches; see
    :func:`moegraft.backends.triton.token_segments.token_segments` for what a graph needs. An empty
    ``slots.live`` means no launch at all: capture with the slots that replays may use.

    Raises:
        MoegraftError: the columns of an out are not adjacent in memory.
    """
    if not slots.live or not x.shape[0]:
        return
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    for out in outs:
        if out.shape[1] > 1 and out.stride(1) != 1:
            raise MoegraftError(
                f"The columns of out {tuple(out.shape)} are {out.stride(1)} elements apart; the "
                "deltas are added in place to adjacent ones only: pass a row-major tensor."
            )
    for part in _launches(tables, outs):
        _launch(x, [tables[i] for i in part], slots, [outs[i] for i in part], tile, pdl)


def _launches(tables: Sequence[SiteTable], outs: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield which linears share a launch: those of one bank and one dtype of out, in order."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (table, out) in enumerate(zip(tables, outs, strict=True)):
        # Triton takes the number 1 for a constant, which can't be picked among others.
        alone = i if out.shape[1] == 1 else -1
        records = table.records
        key = (id(table.arena), records.stride(0), records.shape[0], out.dtype, alone)
        groups.setdefault(key, []).append(i)
    for members in groups.values():
        for first in range(0, len(members), MAX_PROJECTIONS):
            yield members[first : first + MAX_PROJECTIONS]


def _launch(
    x: torch.Tensor,
    tables: Sequence[SiteTable],
    slots: TokenSlots,
    outs: Sequence[torch.Tensor],
    tile: LinearTile | SplitTile | None,
    pdl: bool,
) -> None:
    num_tokens, size_k = x.shape
    arena, num_slots = tables[0].arena.data, tables[0].num_slots
    max_rank = max([table.max_rank for table in tables])
    if tile is None:
        columns = sum([out.shape[1] for out in outs])
        itemsize = max(x.element_size(), arena.element_size())
        tile = choose_split(num_tokens, size_k, max_rank, itemsize) or choose_tile(
            num_tokens, num_slots, columns, max_rank, itemsize
        )
    if isinstance(tile, SplitTile):
        launch_split(x, tables, slots, outs, tile, pdl)
        return
    found = token_segments(slots, num_slots, tile.block_m, pdl)
    kind = (
        x.shape, x.stride(), x.dtype, arena.dtype, tables[0].kind, max_rank,
        tuple([(out.shape[1], out.stride(), out.dtype) for out in outs]), tile, pdl,
    )  # fmt: skip
    inputs = [x, arena, found.order, found.segments, *[table.records for table in tables], *outs]
    _lists.run(kind, inputs, partial(_launch_tile, x, tables, found, outs, tile, pdl))


def _launch_tile(
    x: torch.Tensor,
    tables: Sequence[SiteTable],
    found: TokenSegments,
    outs: Sequence[torch.Tensor],
    tile: LinearTile,
    pdl: bool,
) -> None:
    num_tokens, size_k = x.shape
    arena = tables[0].arena.data
    first_tiles = [0]
    for out in outs:
        first_tiles.append(first_tiles[-1] + triton.cdiv(out.shape[1], tile.block_n * tile.pieces))
    num_tiles = first_tiles[len(outs)]
    # A single row may have any stride.
    strides = [out.stride(0) if num_tokens > 1 else out.shape[1] for out in outs]
    # Arguments of projections that do not exist repeat the last one's.
    use = [min(i, len(outs) - 1) for i in range(MAX_PROJECTIONS)]
    listed(linear_lora_kernel)[(found.segments.shape[0] * num_tiles,)](
        x, arena, found.order, found.segments,
        *(tables[i].records for i in use), *(outs[i] for i in use),
        *(strides[i] for i in use), *(outs[i].shape[1] for i in use),
        *(first_tiles[i] for i in use[1:]),
        num_tiles, size_k, x.stride(0), tables[0].records.stride(0), tile.pieces,
        NUM_PROJECTIONS=len(outs), UNIT=UNIT_BYTES // arena.element_size(),
        MANY_RANKS=max(table.max_rank for table in tables) > tile.block_r,
        EVEN_K=size_k % tile.block_k == 0, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_R=tile.block_r, BLOCK_K=tile.block_k, PDL=pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _shrink(
    x_ptrs, a_ptr, a_stride, row_mask, first_rank, rank, size_k, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``S = A x`` fp32 ``[BLOCK_M, BLOCK_R]``; ranks past the live one are 0."""
    r = first_rank + tl.arange(0, BLOCK_R)
    r_mask = (r < rank)[:, None]
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + r[:, None] * a_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for k0 in range(0, size_k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            a = tl.load(a_ptrs, mask=r_mask, other=0.0)
        else:
            k_mask = (k0 + k < size_k)[None, :]
            x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask, other=0.0)
            a = tl.load(a_ptrs, mask=r_mask & k_mask, other=0.0)
        acc = add_product(x, a, acc)
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    return acc


@triton.jit(do_not_specialize=["first_tile1", "first_tile2", "first_tile3", "num_tiles", "pieces"])
def linear_lora_kernel(
    x_ptr,  # [T, K]
    arena_ptr,
    order_ptr,  # [segments * BLOCK_M] int32
    segments_ptr,  # [segments, 4] int32: start, end, slot
    records0_ptr, records1_ptr, records2_ptr, records3_ptr,  # [S, 8] int64
    out0_ptr, out1_ptr, out2_ptr, out3_ptr,  # [T, N], in and out
    out_stride0, out_stride1, out_stride2, out_stride3,
    size_n0, size_n1, size_n2, size_n3,
    first_tile1, first_tile2, first_tile3,
    num_tiles,
    size_k,
    x_stride,
    slot_stride,
    pieces,
    NUM_PROJECTIONS: tl.constexpr,
    UNIT: tl.constexpr,
    MANY_RANKS: tl.constexpr,  # a slot may hold more than BLOCK_R
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See the top of the file. Used segments are the first, so their programs start first."""
    launch_wait(PDL)
    launch_next(PDL)
    tile = tl.program_id(0) % num_tiles
    segment = segments_ptr + tl.program_id(0) // num_tiles * 4
    start = tl.load(segment)
    end = tl.load(segment + 1)
    slot = tl.load(segment + 2)
    if start >= end:
        return
    records_ptr, out_ptr = records0_ptr, out0_ptr
    out_stride, size_n, first_tile = out_stride0, size_n0, 0
    if NUM_PROJECTIONS > 1:
        if tile >= first_tile1:
            records_ptr, out_ptr = records1_ptr, out1_ptr
            out_stride, size_n, first_tile = out_stride1, size_n1, first_tile1
    if NUM_PROJECTIONS > 2:
        if tile >= first_tile2:
            records_ptr, out_ptr = records2_ptr, out2_ptr
            out_stride, size_n, first_tile = out_stride2, size_n2, first_tile2
    if NUM_PROJECTIONS > 3:
        if tile >= first_tile3:
            records_ptr, out_ptr = records3_ptr, out3_ptr
            out_stride, size_n, first_tile = out_stride3, size_n3, first_tile3
    record = records_ptr + slot.to(tl.int64) * slot_stride
    a_ptr, a_stride, rank, scale = load_record(record, slot >= 0, 0, arena_ptr, UNIT)
    b_ptr, b_stride, _, _ = load_record(record, slot >= 0, 1, arena_ptr, UNIT)
    if rank <= 0:
        return
    m = tl.arange(0, BLOCK_M)
    row_mask = start + m < end
    rows = tl.load(order_ptr + start + m, mask=row_mask, other=0).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    out_rows = out_ptr + rows[:, None] * out_stride
    columns = (tile - first_tile) * (BLOCK_N * pieces) + tl.arange(0, BLOCK_N)
    # What comes after the K loop is on its way before it.
    b = load_b(b_ptr, b_stride, 0, rank, columns, size_n, BLOCK_R)
    mask = row_mask[:, None] & (columns < size_n)[None, :]
    out = tl.load(out_rows + columns[None, :], mask=mask, other=0.0)
    s = _shrink(
        x_ptrs, a_ptr, a_stride, row_mask, 0, rank, size_k, EVEN_K, BLOCK_M, BLOCK_R, BLOCK_K
    )
    for piece in tl.range(0, pieces, num_stages=1):
        next_columns = columns + BLOCK_N
        exists = piece + 1 < pieces
        next_size = tl.where(exists, size_n, 0)
        next_b = load_b(b_ptr, b_stride, 0, rank, next_columns, next_size, BLOCK_R)
        next_mask = row_mask[:, None] & (next_columns < next_size)[None, :]
        next_out = tl.load(out_rows + next_columns[None, :], mask=next_mask, other=0.0)
        delta = expand(s, b)
        if MANY_RANKS:
            for r0 in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                more_b = load_b(b_ptr, b_stride, r0, rank, columns, size_n, BLOCK_R)
                more_s = _shrink(
                    x_ptrs, a_ptr, a_stride, row_mask, r0, rank, size_k, EVEN_K, BLOCK_M,
                    BLOCK_R, BLOCK_K,
                )  # fmt: skip
                delta += expand(more_s, more_b)
        result = out.to(tl.float32) + delta * scale
        tl.store(out_rows + columns[None, :], result.to(out.dtype), mask=mask)
        columns, b, out, mask = next_columns, next_b, next_out, next_mask
