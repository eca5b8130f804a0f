"""Stage ``permute`` on the GPU: pairs -> blocks of rows per expert, sorted by slot, in one launch.

Every program finds the place of its own pairs by counting: it reads all P keys and counts those
that come before. No atomics, no program waits for another, nothing comes back to the host.

Blocks are per expert, ``BLOCK_M`` rows each; rows of a block are sorted by slot (-1 first), then by
pair number, so an adapter's rows are one run, a *segment*. ``segments`` int32 ``[P, 4]`` has an
entry per pair in the order of the rows: first row of the segment, the row behind its last, slot,
local expert. The first row is -1 unless the pair opens a segment with a slot.

Block numbers: with few pairs they are dense. With many, expert e's blocks start at
``(pairs of earlier experts) // BLOCK_M + e``, which never overlap and need no prefix sum over
experts; numbers that stay unused have 0 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.sync import launch_next, launch_wait
from moegraft.backends.triton.weights.rows import write_rows


@triton.jit
def _load_keys(
    topk_ids_ptr, slots_ptr, i, num_pairs, expert_offset, TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """Return (local expert, slot) of pairs ``i``.

    The expert is NUM_EXPERTS for pairs that are not local, and one more past the last pair: these
    sort behind all others.
    """
    in_range = i < num_pairs
    # Compared before the cast: an int64 id beyond 32 bits must not come back as a small one.
    expert = tl.load(topk_ids_ptr + i, mask=in_range, other=-1) - expert_offset
    local = in_range & (expert >= 0) & (expert < NUM_EXPERTS)
    expert = expert.to(tl.int32)
    slot = tl.zeros_like(i) - 1
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + i // TOP_K, mask=in_range, other=-1)
        # Garbage in a slot must not disturb the order: it sorts as a slot that no table has.
        slot = tl.minimum(tl.maximum(slot, -1), 65534)
    return tl.where(local, expert, tl.where(in_range, NUM_EXPERTS, NUM_EXPERTS + 1)), slot


@triton.jit(
    do_not_specialize=[
        "num_pairs", "expert_offset", "num_blocks", "pair_programs", "base_programs",
    ]
)  # fmt: skip
def route_kernel(
    topk_ids_ptr,  # [P] int32/int64
    slots_ptr,  # [T] int32
    row_pair_ptr,  # [rows] int32 out
    pair_row_ptr,  # [P] int32 out, -1 = not local
    segments_ptr,  # [P, 4] int32 out, see above; not written without slots
    states_ptr,  # [3, P] int32 out: 0; see Workspace; not written without slots
    block_info_ptr,  # [blocks] int32 out: expert * 256 + rows
    h_counter_ptr,  # [blocks] int32 out: 0; see Workspace
    num_pairs,
    expert_offset,
    num_blocks,
    pair_programs,
    # Of the copy of x that a base product reads, None without one: see weights/rows.
    source_ptr,
    base_ptr,
    base_scales_ptr,
    source_columns,
    source_stride,
    base_stride,
    base_programs,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DENSE: tl.constexpr,  # one program sees all pairs: BLOCK_I >= P
    HAS_SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,  # 0 = no copy of x; else the first base_programs programs make it
    EIGHTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of the file."""
    launch_next(PDL)
    launch_wait(PDL)
    pid = tl.program_id(0)
    if GROUPS:
        if pid < base_programs:
            write_rows(
                pid, source_ptr, base_ptr, base_scales_ptr, source_columns, source_stride,
                base_stride, GROUPS, EIGHTS,
            )  # fmt: skip
            return
        pid -= base_programs
    if pid >= pair_programs:
        _write_blocks(
            pid - pair_programs, topk_ids_ptr, slots_ptr, block_info_ptr, h_counter_ptr, num_pairs,
            expert_offset, num_blocks, TOP_K, NUM_EXPERTS, BLOCK_M, BLOCK_J, BLOCK_E,
        )  # fmt: skip
        return
    i = pid * BLOCK_I + tl.arange(0, BLOCK_I)
    expert, slot = _load_keys(
        topk_ids_ptr, slots_ptr, i, num_pairs, expert_offset, TOP_K, NUM_EXPERTS, HAS_SLOTS
    )
    local = expert < NUM_EXPERTS
    key = expert * 65536 + slot + 1
    # Two counts in one int32 each: a batch has fewer than 2**15 pairs.
    low_high = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)  # earlier experts, earlier keys
    upto_first = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)  # keys up to mine, pairs before mine
    for j0 in range(0, num_pairs, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        j_expert, j_slot = _load_keys(
            topk_ids_ptr, slots_ptr, j, num_pairs, expert_offset, TOP_K, NUM_EXPERTS, HAS_SLOTS
        )
        j_key = (j_expert * 65536 + j_slot + 1)[None, :]
        less = j_key < key[:, None]
        equal = j_key == key[:, None]
        first = less | (equal & (j[None, :] < i[:, None]))
        low_high += (j_expert[None, :] < expert[:, None]).to(tl.int32) + less.to(tl.int32) * 65536
        upto_first += (less | equal).to(tl.int32) + first.to(tl.int32) * 65536
    low_high = tl.sum(low_high, 1)
    upto_first = tl.sum(upto_first, 1)
    earlier = low_high % 65536  # pairs of earlier experts
    group_start = low_high // 65536 - earlier  # pairs of the same expert with an earlier slot
    group_end = upto_first % 65536 - earlier
    before = upto_first // 65536 - earlier  # pairs of the same expert that come first
    block_in_expert = before // BLOCK_M
    row_in_block = before % BLOCK_M
    if DENSE:
        # Dense numbers: count the first rows of blocks that come before, by key.
        opens = (local & (row_in_block == 0)).to(tl.int32)
        order = tl.where(local, expert * 65536 + before, 2147483647)
        firsts = tl.where(opens != 0, order, 2147483647)
        block = tl.sum((firsts[None, :] <= order[:, None]).to(tl.int32), 1) - 1
        b = tl.arange(0, BLOCK_I)
        count = tl.sum(opens, 0)
        tl.store(block_info_ptr + b, 0, mask=(b >= count) & (b < num_blocks))
        tl.store(h_counter_ptr + b, 0, mask=b < num_blocks)
        same = tl.sum((expert[None, :] == expert[:, None]).to(tl.int32), 1)
        info = expert * 256 + tl.minimum(same - block_in_expert * BLOCK_M, BLOCK_M)
        tl.store(block_info_ptr + block, info, mask=opens != 0)
    else:
        block = earlier // BLOCK_M + expert + block_in_expert
    row = block * BLOCK_M + row_in_block
    tl.store(row_pair_ptr + row, i, mask=local)
    tl.store(pair_row_ptr + i, tl.where(local, row, -1), mask=i < num_pairs)
    if HAS_SLOTS:
        low = tl.maximum(group_start - block_in_expert * BLOCK_M, 0)
        high = tl.minimum(group_end - block_in_expert * BLOCK_M, BLOCK_M)
        is_head = local & (row_in_block == low) & (slot >= 0)
        segment = segments_ptr + upto_first // 65536 * 4
        in_range = i < num_pairs
        tl.store(segment, tl.where(is_head, row, -1), mask=in_range)
        tl.store(segment + 1, row - row_in_block + high, mask=in_range)
        tl.store(segment + 2, slot, mask=in_range)
        tl.store(segment + 3, expert, mask=in_range)
        for side in tl.static_range(3):
            tl.store(states_ptr + side * num_pairs + i, 0, mask=in_range)


@triton.jit
def _write_blocks(
    pid, topk_ids_ptr, slots_ptr, block_info_ptr, h_counter_ptr, num_pairs, expert_offset,
    num_blocks, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the sparse block numbers of BLOCK_E experts.

    Expert NUM_EXPERTS stands for the numbers behind the last expert's.
    """
    e = pid * BLOCK_E + tl.arange(0, BLOCK_E)
    count = tl.zeros([BLOCK_E], tl.int32)
    earlier = tl.zeros([BLOCK_E], tl.int32)
    for j0 in range(0, num_pairs, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        j_expert, _ = _load_keys(
            topk_ids_ptr, slots_ptr, j, num_pairs, expert_offset, TOP_K, NUM_EXPERTS, False
        )
        in_range = (j < num_pairs)[None, :]
        count += tl.sum(((j_expert[None, :] == e[:, None]) & in_range).to(tl.int32), 1)
        earlier += tl.sum(((j_expert[None, :] < e[:, None]) & in_range).to(tl.int32), 1)
    first = earlier // BLOCK_M + e
    last = tl.where(e < NUM_EXPERTS, (earlier + count) // BLOCK_M + e + 1, num_blocks)
    last = tl.where(e <= NUM_EXPERTS, tl.minimum(last, num_blocks), first)
    most = tl.max(last - first, 0)
    for c in range(0, most):
        rows = tl.minimum(tl.maximum(count - c * BLOCK_M, 0), BLOCK_M)
        rows = tl.where(e < NUM_EXPERTS, rows, 0)
        mask = first + c < last
        tl.store(block_info_ptr + first + c, e * 256 + rows, mask=mask)
        tl.store(h_counter_ptr + first + c, 0, mask=mask)
