"""Stage ``linear_lora`` for few tokens: one launch whose programs hand ``S = A x`` to one another.

A decode step moves few bytes here; its time is the chain of loads that wait for one another. So
the first programs of the launch, the *shrink units*, each read a short part of K (one of SPLITS)
for one segment and one projection, and leave a partial S in a small workspace. The others, the
*expand units*, each own a tile of columns: they fetch their part of B and of ``out``, look at the
partials until all are there, add them up in order, multiply and write once.

**Hand-over.** No counter: a partial is complete when none of its words is ``EMPTY``, bits that no
result has (a NaN is stored as the plain one). So the look that finds everything there has read it
already. Words are 32 bits, which the hardware never tears, and they are read past L1.

**Clearing.** A workspace has two halves that launches use in turn. Each clears the half that the
launch before it used, after ``launch_wait``, that is when nobody reads it; and the launch after it
writes there only after *its* ``launch_wait``. The first use fills both.

**Progress.** Expand units have higher numbers than all shrink units, programs of a launch start in
the order of their numbers, and shrink units wait for nothing but earlier launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.linear_partials import EMPTY, partials_of
from moegraft.backends.triton.linear_parts import (
    MAX_PROJECTIONS,
    expand,
    load_b,
    load_record,
    pick,
)
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.sync import launch_next, launch_wait
from moegraft.backends.triton.token_segments import (
    TokenSegments,
    has_segments,
    token_segments,
)
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES
from moegraft.types import TokenSlots

#: Rows of a segment: the least that the matrix unit takes.
SEGMENT_ROWS = 16
#: Up to this many tokens.
MAX_SPLIT_TOKENS = 256
#: Largest rank, of 16-bit factors and x, and of fp32 ones (no matrix unit: registers spill).
MAX_SPLIT_RANK, MAX_EXACT_RANK = 128, 16
#: Parts of K, unless a step over K would be longer than this.
SPLITS, MIN_CHUNK = 8, 256
#: How every NaN is handed over, so that none looks like EMPTY.
PLAIN_NAN = tl.constexpr(0x7FC00000)


@dataclass(frozen=True)
class SplitTile:
    """What shapes a launch; never depends on which adapters are live.

    Attributes:
        chunk: columns of A that a shrink unit reads, a multiple of ``block_k``.
        block_k: columns that it reads at once.
        block_n: columns of ``out`` of an expand unit.
        block_r: at least the largest rank.
        shrink_programs, expand_programs: at most so many of a kind; they take several units.
        num_warps: as Triton takes it.
    """

    chunk: int
    block_k: int
    block_n: int
    block_r: int
    shrink_programs: int = 264
    expand_programs: int = 528
    num_warps: int = 4

    @property
    def shares(self) -> int:
        """Warps that share a step over K, up to 8; the matrix unit takes 16 columns at once."""
        return max(1, min(8, self.num_warps, self.block_k // 16))


@lru_cache(maxsize=1024)
def choose_split(
    num_tokens: int, size_k: int, max_rank: int, itemsize: int = 2
) -> SplitTile | None:
    """Return the tile of a launch, or None where one program per tile does better or must do.

    Args:
        num_tokens, size_k: T and the linear's input size.
        max_rank: the largest rank that any slot may hold.
        itemsize: bytes of x's or the factors' dtype, the larger.
    """
    exact = itemsize == 4
    if num_tokens > MAX_SPLIT_TOKENS or max_rank > (MAX_EXACT_RANK if exact else MAX_SPLIT_RANK):
        return None
    block_r = max(16, triton.next_power_of_2(max_rank))
    chunk = max(MIN_CHUNK, triton.next_power_of_2(triton.cdiv(size_k, SPLITS)))
    chunk = min(chunk, max(16, triton.next_power_of_2(size_k)))
    block_k = min(chunk, 64 if exact else min(512, 2**14 // block_r))
    return SplitTile(chunk, block_k, 64 if exact else 128, block_r)


def launch_split(
    x: torch.Tensor,
    tables: Sequence[SiteTable],
    slots: TokenSlots,
    outs: Sequence[torch.Tensor],
    tile: SplitTile,
    pdl: bool,
) -> None:
    """Add the deltas of up to four linears of one bank; see :mod:`.linear_lora`."""
    size_k, arena, num_slots = x.shape[1], tables[0].arena.data, tables[0].num_slots
    assert max(table.max_rank for table in tables) <= tile.block_r, tile
    assert tile.chunk % tile.block_k == 0, tile
    # The step's first launch follows the one that makes the segments; later ones read them, and
    # the factors of adapters that the step holds, before those ahead of them are complete.
    early = pdl and has_segments(slots, num_slots, SEGMENT_ROWS)
    found: TokenSegments = token_segments(slots, num_slots, SEGMENT_ROWS, pdl)
    num_segments = found.segments.shape[0]
    splits = triton.cdiv(size_k, tile.chunk)
    shrink_units = num_segments * len(outs) * splits
    partials = partials_of(slots, num_slots, shrink_units * SEGMENT_ROWS * tile.block_r)
    turn = partials.turn
    first_tiles = [0]
    for out in outs:
        first_tiles.append(first_tiles[-1] + triton.cdiv(out.shape[1], tile.block_n))
    num_tiles = first_tiles[len(outs)]
    shrink_programs = min(shrink_units, tile.shrink_programs)
    programs = shrink_programs + min(num_segments * num_tiles, tile.expand_programs)
    # A single row may have any stride.
    strides = [out.stride(0) if x.shape[0] > 1 else out.shape[1] for out in outs]
    # Arguments of projections that do not exist repeat the last one's.
    use = [min(i, len(outs) - 1) for i in range(MAX_PROJECTIONS)]
    listed(linear_split_kernel)[(programs,)](
        x, arena, found.order, found.segments, partials.halves[turn], partials.halves[1 - turn],
        *(tables[i].records for i in use), *(outs[i] for i in use),
        *(strides[i] for i in use), *(outs[i].shape[1] for i in use),
        *(first_tiles[i] for i in use[1:]),
        num_tiles, num_segments, shrink_programs, size_k, x.stride(0), tables[0].records.stride(0),
        NUM_PROJECTIONS=len(outs), UNIT=UNIT_BYTES // arena.element_size(), SPLITS=splits,
        EVEN_K=size_k % tile.chunk == 0, STEPS=tile.chunk // tile.block_k, SHARES=tile.shares,
        BLOCK_M=SEGMENT_ROWS,
        BLOCK_N=tile.block_n, BLOCK_R=tile.block_r, BLOCK_K=tile.block_k, EARLY=early, PDL=pdl,
        num_warps=tile.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    partials.turn = 1 - turn


@triton.jit
def _load_k(ptr, rows, row_stride, row_mask, first_k, size_k, EVEN_K: tl.constexpr,
            SHARES: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return BLOCK_K columns of some rows, ``[SHARES, rows, BLOCK_K / SHARES]``; 0 outside."""
    width: tl.constexpr = BLOCK_K // SHARES
    share = tl.arange(0, SHARES)[:, None, None] * width
    k = first_k + share + tl.arange(0, width)[None, None, :]
    mask = row_mask[None, :, None]
    if not EVEN_K:
        mask = mask & (k < size_k)
    return tl.load(ptr + rows[None, :, None] * row_stride + k, mask=mask, other=0.0)


@triton.jit
def _hold(value, HOLD: tl.constexpr):
    """Return a 16-bit tile as it is, but not before what stands above it in the program.

    Else the compiler has it written to shared memory, and so waits for it, before it asks for x.
    """
    if HOLD and value.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=2
        )
    else:
        return value


@triton.jit
def _product(x, a):
    """Return ``x @ a.T`` of each share, fp32; of two dtypes both are read as fp32."""
    if x.dtype != a.dtype:  # a router in fp32 over a bank in bf16
        x = x.to(tl.float32)
        a = a.to(tl.float32)
    return tl.dot(x, tl.permute(a, 0, 2, 1), input_precision="ieee")


@triton.jit
def _sum_shares(acc, SHARES: tl.constexpr):
    """Return the sum over the first of three dimensions, 1, 2, 4 or 8, in a fixed order."""
    M: tl.constexpr = acc.shape[1]
    R: tl.constexpr = acc.shape[2]
    s = tl.permute(acc, 1, 2, 0)
    if SHARES == 8:
        low, high = tl.split(tl.reshape(s, M, R, 4, 2))
        s = low + high
    if SHARES >= 4:
        low, high = tl.split(tl.reshape(s, M, R, 2, 2))
        s = low + high
    if SHARES >= 2:
        low, high = tl.split(tl.reshape(s, M, R, 2))
        s = low + high
    return tl.reshape(s, M, R)


@triton.jit
def _partial(
    x_ptr, rows, x_stride, a_ptr, a_stride, rank, first_k, size_k, EVEN_K: tl.constexpr,
    STEPS: tl.constexpr, SHARES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Return S of a part of K, fp32 ``[BLOCK_M, BLOCK_R]``; only x waits for earlier launches.

    Each of SHARES warps multiplies its own share of K: one warp alone is a long chain of products.
    """
    r = tl.arange(0, BLOCK_R)
    tokens = rows.to(tl.int64)
    a = _load_k(a_ptr, r, a_stride, r < rank, first_k, size_k, EVEN_K, SHARES, BLOCK_K)
    launch_wait(WAIT)
    x = _load_k(x_ptr, tokens, x_stride, rows >= 0, first_k, size_k, EVEN_K, SHARES, BLOCK_K)
    acc = _product(x, _hold(a, WAIT))
    for step in tl.range(1, STEPS):
        k = first_k + step * BLOCK_K
        a = _load_k(a_ptr, r, a_stride, r < rank, k, size_k, EVEN_K, SHARES, BLOCK_K)
        x = _load_k(x_ptr, tokens, x_stride, rows >= 0, k, size_k, EVEN_K, SHARES, BLOCK_K)
        acc += _product(x, a)
    return _sum_shares(acc, SHARES)


@triton.jit
def _whole_quads(r, rank):
    """Return which ranks are handed over: the live ones and up to three behind them, as 0.

    Four neighbours share an answer, so they are one load and one store.
    """
    return r // 4 * 4 < rank


@triton.jit
def _collect(ptrs, mask, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """Wait until all partials are there; return their sum, in the order of K."""
    s = tl.zeros(ptrs.shape, tl.float32)
    missing = 1
    while missing > 0:
        s = tl.zeros(ptrs.shape, tl.float32)
        empty = tl.zeros(ptrs.shape, tl.int32)
        for i in tl.static_range(SPLITS):
            bits = tl.load(ptrs + i * STEP, mask=mask, other=0, volatile=True)
            empty = empty | (bits == EMPTY).to(tl.int32)
            s += bits.to(tl.float32, bitcast=True)
        missing = tl.max(empty)
    return s


@triton.jit(
    do_not_specialize=[
        "first_tile1", "first_tile2", "first_tile3", "num_tiles", "num_segments", "shrink_programs",
    ]
)  # fmt: skip
def linear_split_kernel(
    x_ptr,  # [T, K]
    arena_ptr,
    order_ptr,  # [segments, BLOCK_M] int32, tokens
    segments_ptr,  # [segments, 4] int32: start, end, slot
    partial_ptr,  # int32 [segments, NUM_PROJECTIONS, SPLITS, BLOCK_M, BLOCK_R], empty
    used_ptr,  # the same, to be cleared
    records0_ptr, records1_ptr, records2_ptr, records3_ptr,  # [S, 8] int64
    out0_ptr, out1_ptr, out2_ptr, out3_ptr,  # [T, N], in and out
    out_stride0, out_stride1, out_stride2, out_stride3,
    size_n0, size_n1, size_n2, size_n3,
    first_tile1, first_tile2, first_tile3,
    num_tiles,
    num_segments,
    shrink_programs,
    size_k,
    x_stride,
    slot_stride,
    NUM_PROJECTIONS: tl.constexpr,
    UNIT: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    STEPS: tl.constexpr,  # a chunk is STEPS * BLOCK_K
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # segments, records and factors may be read before the wait
    PDL: tl.constexpr,
):  # fmt: skip
    """See the top of the file. Used segments are the first; a program ends at an unused one."""
    WAIT: tl.constexpr = PDL and EARLY
    launch_wait(PDL and not EARLY)
    pid = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    words = m[:, None] * BLOCK_R + r[None, :]
    PART: tl.constexpr = BLOCK_M * BLOCK_R
    if pid < shrink_programs:
        num_units = num_segments * (NUM_PROJECTIONS * SPLITS)
        unit = pid
        while unit < num_units:
            segment = unit // (NUM_PROJECTIONS * SPLITS)
            slot = tl.load(segments_ptr + segment * 4 + 2, eviction_policy="evict_last")
            rows = tl.load(order_ptr + segment * BLOCK_M + m, eviction_policy="evict_last")
            p = unit // SPLITS % NUM_PROJECTIONS
            record = pick(
                p, records0_ptr, records1_ptr, records2_ptr, records3_ptr, NUM_PROJECTIONS
            )
            record += slot.to(tl.int64) * slot_stride
            a_ptr, a_stride, rank, _ = load_record(record, slot >= 0, 0, arena_ptr, UNIT)
            if rank > 0:
                first_k = unit % SPLITS * (STEPS * BLOCK_K)
                s = _partial(
                    x_ptr, rows, x_stride, a_ptr, a_stride, rank, first_k, size_k, EVEN_K, STEPS,
                    SHARES, BLOCK_R, BLOCK_K, WAIT,
                )  # fmt: skip
                bits = tl.where(s == s, s.to(tl.int32, bitcast=True), PLAIN_NAN)
                mask = (rows >= 0)[:, None] & _whole_quads(r, rank)[None, :]
                tl.store(partial_ptr + unit * PART + words, bits, mask=mask)
            if slot >= 0:
                launch_wait(WAIT)
                tl.store(used_ptr + unit * PART + words, tl.full(words.shape, EMPTY, tl.int32))
            unit = tl.where(slot >= 0, unit + shrink_programs, num_units)
    else:
        step = tl.num_programs(0) - shrink_programs
        num_units = num_segments * num_tiles
        unit = pid - shrink_programs
        while unit < num_units:
            segment = unit // num_tiles
            slot = tl.load(segments_ptr + segment * 4 + 2, eviction_policy="evict_last")
            rows = tl.load(order_ptr + segment * BLOCK_M + m, eviction_policy="evict_last")
            tile = unit % num_tiles
            p = 0
            if NUM_PROJECTIONS > 1:
                p += (tile >= first_tile1).to(tl.int32)
            if NUM_PROJECTIONS > 2:
                p += (tile >= first_tile2).to(tl.int32)
            if NUM_PROJECTIONS > 3:
                p += (tile >= first_tile3).to(tl.int32)
            record = pick(
                p, records0_ptr, records1_ptr, records2_ptr, records3_ptr, NUM_PROJECTIONS
            )
            record += slot.to(tl.int64) * slot_stride
            b_ptr, b_stride, rank, scale = load_record(record, slot >= 0, 1, arena_ptr, UNIT)
            out_ptr = pick(p, out0_ptr, out1_ptr, out2_ptr, out3_ptr, NUM_PROJECTIONS)
            out_stride = pick(
                p, out_stride0, out_stride1, out_stride2, out_stride3, NUM_PROJECTIONS
            )
            size_n = pick(p, size_n0, size_n1, size_n2, size_n3, NUM_PROJECTIONS)
            first_tile = pick(p, 0, first_tile1, first_tile2, first_tile3, NUM_PROJECTIONS)
            if rank > 0:
                columns = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
                b = load_b(b_ptr, b_stride, 0, rank, columns, size_n, BLOCK_R)
                out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
                mask = (rows >= 0)[:, None] & (columns < size_n)[None, :]
                launch_wait(WAIT)
                out = tl.load(out_ptrs, mask=mask, other=0.0)
                parts = partial_ptr + (segment * NUM_PROJECTIONS + p) * (SPLITS * PART) + words
                quads = (rows >= 0)[:, None] & _whole_quads(r, rank)[None, :]
                s = _collect(parts, quads, SPLITS, PART)
                result = out.to(tl.float32) + expand(s, b) * scale
                tl.store(out_ptrs, result.to(out.dtype), mask=mask)
            unit = tl.where(slot >= 0, unit + step, num_units)
    # Whoever follows may rely on everything before this launch, adapters or not.
    launch_wait(WAIT)
    launch_next(PDL)
