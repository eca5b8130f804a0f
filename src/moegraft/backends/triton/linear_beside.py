"""Stage ``linear_lora`` in two launches, the first of them beside the host's own products.

The rank vectors ``S = A x`` need only x, so they are computed on a side stream while the current
stream computes the base products; the expand then reads S, its tile of ``B`` and its tile of the
output, and is short. In a CUDA graph that costs less than one launch behind the products that does
both. The bits are those of :mod:`moegraft.backends.triton.linear_lora`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.linear_lora import (
    MAX_PROJECTIONS,
    LinearTile,
    choose_tile,
    expand,
    linear_lora_group,
    load_b,
    shrink,
)
from moegraft.backends.triton.token_segments import token_segments
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES
from moegraft.streams import Fork
from moegraft.types import TokenSlots

#: Above this many tokens the products fill the machine and leave a side stream nothing.
MAX_TOKENS = 256


def fits_beside(tables: Sequence[SiteTable], slots: TokenSlots) -> bool:
    """True when these linears can share the launches: one bank, at most four, no width of 1.

    And only within a CUDA graph, where a fork costs little, and for few tokens.
    """
    if not slots.in_graph or not 0 < slots.num_tokens <= MAX_TOKENS:
        return False
    arenas = {table.arena.data.data_ptr() for table in tables}
    wide = all(table.site.projections[0].out_features > 1 for table in tables)
    return len(arenas) == 1 and len(tables) <= MAX_PROJECTIONS and wide


class LinearBeside:
    """One call in two parts: made before the base products, :meth:`add_to` behind them.

    Args:
        x: ``[T, in]``, unchanged until :meth:`add_to`.
        tables: one per linear.
        slots: adapter slot per token; such that :func:`fits_beside`.

    The rank vectors are allocated here, on the current stream, and freed behind the join.
    """

    def __init__(self, x: torch.Tensor, tables: Sequence[SiteTable], slots: TokenSlots) -> None:
        self._x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
        self._tables = tuple(tables)
        self._slots = slots
        num_tokens = x.shape[0]
        columns = sum(table.site.projections[0].out_features for table in tables)
        self._max_rank = max(table.max_rank for table in tables)
        itemsize = max(x.element_size(), tables[0].arena.data.element_size())
        num_slots = tables[0].num_slots
        self._tile = choose_tile(num_tokens, num_slots, columns, self._max_rank, itemsize)
        self._found = token_segments(slots, num_slots, self._tile.block_m)
        self._ranks = torch.empty(
            len(tables), num_tokens, self._max_rank, dtype=torch.float32, device=x.device
        )
        self._fork = Fork(x.device, self._shrink)

    def add_to(self, outs: Sequence[torch.Tensor]) -> None:
        """Join, and add each linear's delta to its out ``[T, out]`` in place."""
        self._fork.join()
        tile, found, tables = self._tile, self._found, self._tables
        if len({out.dtype for out in outs}) > 1 or any(out.stride(1) != 1 for out in outs):
            linear_lora_group(self._x, tables, self._slots, outs)  # says what it can't take
            return
        first_tiles = [0]
        for out in outs:
            first_tiles.append(first_tiles[-1] + triton.cdiv(out.shape[1], tile.block_n))
        num_tiles = first_tiles[len(outs)]
        # A single row may have any stride.
        strides = [out.stride(0) if out.shape[0] > 1 else out.shape[1] for out in outs]
        use = _repeated(len(outs))
        linear_expand_kernel[(found.segments.shape[0] * num_tiles,)](
            tables[0].arena.data, self._ranks, found.order, found.segments,
            *(tables[i].records for i in use), *(outs[i] for i in use),
            *(strides[i] for i in use), *(outs[i].shape[1] for i in use),
            *(first_tiles[i] for i in use[1:]),
            num_tiles, self._x.shape[0], tables[0].records.stride(0),
            NUM_PROJECTIONS=len(outs), RANKS=self._max_rank, UNIT=self._unit,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_R=tile.block_r, num_warps=4,
        )  # fmt: skip

    def _shrink(self) -> None:
        tile, found, tables = self._tile, self._found, self._tables
        chunks = triton.cdiv(self._max_rank, tile.block_r)
        use = _repeated(len(tables))
        linear_shrink_kernel[(found.segments.shape[0] * len(tables) * chunks,)](
            self._x, tables[0].arena.data, self._ranks, found.order, found.segments,
            *(tables[i].records for i in use),
            self._x.shape[0], self._x.shape[1], self._x.stride(0), tables[0].records.stride(0),
            NUM_PROJECTIONS=len(tables), CHUNKS=chunks, RANKS=self._max_rank, UNIT=self._unit,
            EVEN_K=self._x.shape[1] % tile.block_k == 0, BLOCK_M=tile.block_m,
            BLOCK_R=tile.block_r, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip

    @property
    def _unit(self) -> int:
        return UNIT_BYTES // self._tables[0].arena.data.element_size()

    @property
    def tile(self) -> LinearTile:
        """How the work is cut."""
        return self._tile


def _repeated(number: int) -> list[int]:
    """Return which linear stands for each argument; those that do not exist repeat the last."""
    return [min(i, number - 1) for i in range(MAX_PROJECTIONS)]


@triton.jit
def _pick(p, records0_ptr, records1_ptr, records2_ptr, records3_ptr, NUM_PROJECTIONS: tl.constexpr):
    """Return projection ``p``'s records."""
    records_ptr = records0_ptr
    if NUM_PROJECTIONS > 1:
        if p == 1:
            records_ptr = records1_ptr
    if NUM_PROJECTIONS > 2:
        if p == 2:
            records_ptr = records2_ptr
    if NUM_PROJECTIONS > 3:
        if p == 3:
            records_ptr = records3_ptr
    return records_ptr


@triton.jit(do_not_specialize=["num_tokens"])
def linear_shrink_kernel(
    x_ptr,  # [T, K]
    arena_ptr,
    ranks_ptr,  # [projections, T, RANKS] fp32 out, only live ranks of tokens with factors
    order_ptr,  # [T] int32
    segments_ptr,  # [segments, 4] int32: start, end, slot
    records0_ptr, records1_ptr, records2_ptr, records3_ptr,  # [S, 8] int64
    num_tokens,
    size_k,
    x_stride,
    slot_stride,
    NUM_PROJECTIONS: tl.constexpr,
    CHUNKS: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``S = A x`` of one segment, projection and chunk of ranks."""
    pid = tl.program_id(0)
    first_rank = pid % CHUNKS * BLOCK_R
    p = pid // CHUNKS % NUM_PROJECTIONS
    segment = segments_ptr + pid // (CHUNKS * NUM_PROJECTIONS) * 4
    start = tl.load(segment)
    end = tl.load(segment + 1)
    slot = tl.load(segment + 2)
    if start >= end:
        return
    records_ptr = _pick(p, records0_ptr, records1_ptr, records2_ptr, records3_ptr, NUM_PROJECTIONS)
    record = records_ptr + slot.to(tl.int64) * slot_stride
    rank = tl.load(record + 6).to(tl.int32)
    a_ptr = arena_ptr + tl.multiple_of(tl.load(record) * UNIT, UNIT)
    a_stride = tl.multiple_of(tl.load(record + 4).to(tl.int32), UNIT)
    if first_rank >= rank:
        return
    m = tl.arange(0, BLOCK_M)
    row_mask = start + m < end
    rows = tl.load(order_ptr + start + m, mask=row_mask, other=0).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    s = shrink(
        x_ptrs, a_ptr, a_stride, row_mask, first_rank, rank, size_k, EVEN_K, BLOCK_M, BLOCK_R,
        BLOCK_K,
    )  # fmt: skip
    r = first_rank + tl.arange(0, BLOCK_R)
    out = ranks_ptr + (p * num_tokens + rows)[:, None] * RANKS + r[None, :]
    tl.store(out, s, mask=row_mask[:, None] & (r < rank)[None, :])


@triton.jit(
    do_not_specialize=["first_tile1", "first_tile2", "first_tile3", "num_tiles", "num_tokens"]
)
def linear_expand_kernel(
    arena_ptr,
    ranks_ptr,  # [projections, T, RANKS] fp32
    order_ptr,  # [T] int32
    segments_ptr,  # [segments, 4] int32: start, end, slot
    records0_ptr, records1_ptr, records2_ptr, records3_ptr,  # [S, 8] int64
    out0_ptr, out1_ptr, out2_ptr, out3_ptr,  # [T, N], in and out
    out_stride0, out_stride1, out_stride2, out_stride3,
    size_n0, size_n1, size_n2, size_n3,
    first_tile1, first_tile2, first_tile3,
    num_tiles,
    num_tokens,
    slot_stride,
    NUM_PROJECTIONS: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``out += scale * S B`` of one segment and tile of columns."""
    tile = tl.program_id(0) % num_tiles
    segment = segments_ptr + tl.program_id(0) // num_tiles * 4
    start = tl.load(segment)
    end = tl.load(segment + 1)
    slot = tl.load(segment + 2)
    if start >= end:
        return
    p = tile * 0
    out_ptr, out_stride, size_n, first_tile = out0_ptr, out_stride0, size_n0, 0
    if NUM_PROJECTIONS > 1:
        if tile >= first_tile1:
            p = 1
            out_ptr, out_stride, size_n, first_tile = out1_ptr, out_stride1, size_n1, first_tile1
    if NUM_PROJECTIONS > 2:
        if tile >= first_tile2:
            p = 2
            out_ptr, out_stride, size_n, first_tile = out2_ptr, out_stride2, size_n2, first_tile2
    if NUM_PROJECTIONS > 3:
        if tile >= first_tile3:
            p = 3
            out_ptr, out_stride, size_n, first_tile = out3_ptr, out_stride3, size_n3, first_tile3
    records_ptr = _pick(p, records0_ptr, records1_ptr, records2_ptr, records3_ptr, NUM_PROJECTIONS)
    record = records_ptr + slot.to(tl.int64) * slot_stride
    rank = tl.load(record + 6).to(tl.int32)
    scale = tl.load(record + 7).to(tl.int32).to(tl.float32, bitcast=True)
    b_ptr = arena_ptr + tl.multiple_of(tl.load(record + 1) * UNIT, UNIT)
    b_stride = tl.multiple_of(tl.load(record + 5).to(tl.int32), UNIT)
    if rank <= 0:
        return
    m = tl.arange(0, BLOCK_M)
    row_mask = start + m < end
    rows = tl.load(order_ptr + start + m, mask=row_mask, other=0).to(tl.int64)
    columns = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + rows[:, None] * out_stride + columns[None, :]
    mask = row_mask[:, None] & (columns < size_n)[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0)
    delta = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=1):
        r = r0 + tl.arange(0, BLOCK_R)
        s_ptrs = ranks_ptr + (p * num_tokens + rows)[:, None] * RANKS + r[None, :]
        s = tl.load(s_ptrs, mask=row_mask[:, None] & (r < rank)[None, :], other=0.0)
        b = load_b(b_ptr, b_stride, r0, rank, columns, size_n, BLOCK_R)
        delta += expand(s, b)
    result = out.to(tl.float32) + delta * scale
    tl.store(out_ptrs, result.to(out.dtype), mask=mask)
