"""Both GEMMs of a layer with many rows, for Hopper: persistent programs of three warp groups.

The runs gate_up + lora_expand + activation, and down + lora_expand + routing weight. One warp group
loads: weights and rows of h by tensor map, rows of x by their tokens. The two others multiply, each
64 rows of a tile of 128, and need not keep step: while one applies the activation and stores, the
other has the matrix units. What adapters add is ``S B``, further steps of the same product, whose
operands the loading warp group puts together (:mod:`.factor_tiles`).

Tiles are 128 rows by 256 columns of the weights: 128 of gate and the same 128 of up, or 256
neighbours; K and N are multiples of 128. ``wgmma`` exists on Hopper only; elsewhere :mod:`.gate_up`
and :mod:`.down` run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moegraft.backends.triton.activation import gated, pointwise
from moegraft.backends.triton.prefill.factor_tiles import (
    b_words,
    copy_s,
    load_b,
    mend,
    not_finite,
    places,
    store_b,
)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """Return the stage behind ``stage``, and the parity of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _tokens(info, row_pair_ptr, block, TOP_K: gl.constexpr):
    """Return the tokens of a block's rows, and which rows are live."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    live = m < info % 256
    pairs = gl.load(row_pair_ptr + block.to(gl.int64) * 128 + m, mask=live, other=0)
    return pairs // TOP_K, live


@gluon.jit
def _load_k(
    a_bufs, w_bufs, full, empty, stage, phase, x_ptrs, mask, h_desc, weight_desc, row, first, k0,
    GATHER: gl.constexpr, START0: gl.constexpr, START1: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Fill a stage of the base product; return the next one."""
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    w_halves = w_bufs._reinterpret(w_bufs.dtype, [2 * STAGES, 128, 64], half)
    a_tile = a_bufs.index(stage)
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(ready, 256 * 64 * 2 if GATHER else (256 + 128) * 64 * 2)
    tma.async_copy_global_to_shared(
        weight_desc, [first + START0, k0], ready, w_halves.index(2 * stage)
    )
    tma.async_copy_global_to_shared(
        weight_desc, [first + START1, k0], ready, w_halves.index(2 * stage + 1)
    )
    if GATHER:
        async_copy.async_copy_global_to_shared(a_tile, x_ptrs + k0, mask=mask)
        async_copy.mbarrier_arrive(ready, increment_count=False)
    else:
        tma.async_copy_global_to_shared(h_desc, [row, k0], ready, a_tile)
    return _next(stage, phase, STAGES)


@gluon.jit
def _load_step(
    a_bufs, w_bufs, flags, full, empty, stage, phase, s_ptr, s_stride, row_segment, segment, r0, b,
    c, is_broken, ARRIVALS: gl.constexpr, BOTH: gl.constexpr, STAGES: gl.constexpr,
    INF: gl.constexpr,
):  # fmt: skip
    """Fill a stage with S of four groups, and their B, with BOTH also ``c``; return the next."""
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    b_tiles = w_bufs._reinterpret(w_bufs.dtype, [2 * STAGES, 64, 128], half)
    a_tile = a_bufs.index(stage)
    b_tile = b_tiles.index(2 * stage)
    c_tile = b_tiles.index(2 * stage + 1)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    copy_s(s_ptr, s_stride, row_segment, segment, r0, a_tile)
    store_b(b, b_tile)
    if BOTH:
        store_b(c, c_tile)
    if is_broken:
        mend(row_segment, segment, a_tile, b_tile, flags, INF)
        if BOTH:
            mend(row_segment, segment, a_tile, c_tile, flags, INF)
    async_copy.mbarrier_arrive(full.index(stage))
    # No fence here, it would wait for all copies that are under way; those who multiply have one.
    gl.thread_barrier()
    mbarrier.arrive(full.index(stage), count=ARRIVALS)
    return _next(stage, phase, STAGES)


@gluon.jit
def _load(
    a_bufs, w_bufs, flags, full, empty, x_ptr, h_desc, weight_desc, row_pair_ptr, block_info_ptr,
    s_ptr, row_segment_ptr, group_count_ptr, groups_ptr, groups_i32_ptr, arena_ptr, items,
    num_tiles, size_k, size_n, x_stride, s_stride, side_stride, max_groups, group_stride,
    GATHER: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr, START0: gl.constexpr,
    START1: gl.constexpr, LORA: gl.constexpr, STAGES: gl.constexpr,
    INF: gl.constexpr,
):  # fmt: skip
    """Fill the stages, in the order in which both multiplying warp groups read them.

    Nothing here may wait for memory while stages run dry: of the first four groups, where B lies is
    asked for ahead of an item, and B itself a few stages later.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sides: gl.constexpr = 2 if GATED else 1
    columns: gl.constexpr = 128 if GATED else 256
    arrivals: gl.constexpr = 129 if GATHER else 1
    second: gl.constexpr = 0 if GATED else 128
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    item = gl.program_id(0)
    info = gl.load(block_info_ptr + item // num_tiles, mask=item < items, other=0)
    tokens, live = _tokens(info, row_pair_ptr, item // num_tiles, TOP_K)
    while item < items:
        block = item // num_tiles
        tile = item % num_tiles
        expert = info // 256
        later = item + gl.num_programs(0)
        info = gl.load(block_info_ptr + later // num_tiles, mask=later < items, other=0)
        head = gl.minimum(size_k, STAGES * 64)
        if LORA:
            count = gl.load(group_count_ptr + block)
            row_segment = gl.load(row_segment_ptr + block.to(gl.int64) * 128 + m)
            at = block.to(gl.int64) * (max_groups * 4)
            second_at = group_stride if GATED else 0
            segment, r0 = places(groups_i32_ptr + at * 2)
            words = b_words(groups_ptr + at)
            more_words = b_words(groups_ptr + at + second_at) if GATED else words
        first = expert * (sides * size_n) + tile * columns
        x_ptrs = x_ptr + (tokens.to(gl.int64) * x_stride)[:, None] + k[None, :]
        mask = live[:, None] & (k < 64)[None, :]
        if GATHER:
            tokens, live = _tokens(info, row_pair_ptr, later // num_tiles, TOP_K)
        for k0 in range(0, head, 64):
            stage, phase = _load_k(
                a_bufs, w_bufs, full, empty, stage, phase, x_ptrs, mask, h_desc, weight_desc,
                block * 128, first, k0, GATHER, START0, START1, STAGES,
            )  # fmt: skip
        if LORA:
            column = tile * columns
            left = gl.where(count > 0, size_n - column, 0)
            b = load_b(arena_ptr + column, words, left)
            c = load_b(arena_ptr + column + second, more_words, left - second)
        for k0 in range(head, size_k, 64):
            stage, phase = _load_k(
                a_bufs, w_bufs, full, empty, stage, phase, x_ptrs, mask, h_desc, weight_desc,
                block * 128, first, k0, GATHER, START0, START1, STAGES,
            )  # fmt: skip
        if LORA:
            block_s_ptr = s_ptr + block.to(gl.int64) * 128 * s_stride
            for group in range(0, count, 4):
                zeros = not_finite(b) + not_finite(c)
                is_broken = gl.max(gl.max((zeros != zeros).to(gl.int32), 1), 0) > 0
                stage, phase = _load_step(
                    a_bufs, w_bufs, flags, full, empty, stage, phase, block_s_ptr, s_stride,
                    row_segment, segment, r0, b, c, is_broken, arrivals, not GATED, STAGES, INF,
                )  # fmt: skip
                if GATED:
                    stage, phase = _load_step(
                        a_bufs, w_bufs, flags, full, empty, stage, phase,
                        block_s_ptr + side_stride, s_stride, row_segment, segment, r0, c, c,
                        is_broken, arrivals, False, STAGES, INF,
                    )  # fmt: skip
                if group + 4 < count:
                    step_at = at + group * 4 + 16
                    segment, r0 = places(groups_i32_ptr + step_at * 2)
                    words = b_words(groups_ptr + step_at)
                    more_words = b_words(groups_ptr + step_at + second_at) if GATED else words
                    b = load_b(arena_ptr + column, words, left)
                    c = load_b(arena_ptr + column + second, more_words, left - second)
        item = later


@gluon.jit
def _store(value, out_desc, row, column, c_tile):
    """Round a tile and let the copy engine write it, once the last one has left."""
    tma.store_wait(0)
    gl.thread_barrier()
    c_tile.store(value.to(c_tile.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [row, column], c_tile)


@gluon.jit
def _multiply(
    a_bufs, w_bufs, c_bufs, full, empty, out_desc, bias_ptr, topk_weights_ptr, row_pair_ptr,
    block_info_ptr, group_count_ptr, items, num_tiles, size_k, size_n, bias_stride,
    GROUP: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    START0: gl.constexpr, START1: gl.constexpr, HAS_BIAS: gl.constexpr, KIND: gl.constexpr,
    ALPHA: gl.constexpr, HAS_LIMIT: gl.constexpr, LIMIT: gl.constexpr, UP_SHIFT: gl.constexpr,
    LORA: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of each tile, apply what follows, and write them."""
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    split: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    b_tiles = w_bufs._reinterpret(w_bufs.dtype, [2 * STAGES, 64, 128], half)
    sides: gl.constexpr = 2 if GATED else 1
    columns: gl.constexpr = 128 if GATED else 256
    first: gl.constexpr = GROUP * 64
    c_tile = c_bufs.index(GROUP)
    m = first + gl.arange(0, 64, layout=gl.SliceLayout(1, split))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, split))
    steps = size_k // 64
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    item = gl.program_id(0)
    info = gl.load(block_info_ptr + item // num_tiles, mask=item < items, other=0)
    while item < items:
        block = item // num_tiles
        tile = item % num_tiles
        live_rows = info % 256
        expert = info // 256
        later = item + gl.num_programs(0)
        info = gl.load(block_info_ptr + later // num_tiles, mask=later < items, other=0)
        lora_steps = gl.to_tensor(0)
        if LORA:
            lora_steps = (gl.load(group_count_ptr + block) + 3) // 4
        if live_rows > first:
            if WEIGHTED:
                row_mask = m < live_rows
                pairs = gl.load(row_pair_ptr + block.to(gl.int64) * 128 + m, mask=row_mask, other=0)
                weight = gl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0).to(gl.float32)
            acc = gl.zeros([64, 256], gl.float32, whole)
            # Not the same value as `stage`: the compiler would take it for one that stays as it is.
            before = stage + 0
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                if GATHER:
                    fence_async_shared()
                a = a_bufs.index(stage).slice(first, 64)
                acc = warpgroup_mma(
                    a, w_bufs.index(stage).permute((1, 0)), acc, use_acc=step > 0, is_async=True
                )
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                # The product before this one is done with its stage.
                mbarrier.arrive(empty.index(before), pred=step > 0)
                before = stage
                stage, phase = _next(stage, phase, STAGES)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index(before))
            left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, 128]), (0, 2, 1)))
            left = gl.convert_layout(left, split)
            right = gl.convert_layout(right, split)
            for _ in range(lora_steps):
                for side in gl.static_range(sides):
                    mbarrier.wait(full.index(stage), phase)
                    fence_async_shared()
                    a = a_bufs.index(stage).slice(first, 64)
                    if side == 0:
                        left = warpgroup_mma(a, b_tiles.index(2 * stage), left)
                    if not GATED:
                        right = warpgroup_mma(a, b_tiles.index(2 * stage + 1), right)
                    elif side == 1:
                        right = warpgroup_mma(a, b_tiles.index(2 * stage), right)
                    mbarrier.arrive(empty.index(stage))
                    stage, phase = _next(stage, phase, STAGES)
            column = tile * columns
            row = block * 128 + first
            if HAS_BIAS:
                bias = bias_ptr + expert * bias_stride + column + n
                second: gl.constexpr = 0 if GATED else 128
                more = gl.load(bias + START0, mask=n < size_n - column, other=0.0)
                left += more.to(gl.float32)[None, :]
                more = gl.load(bias + START1, mask=n < size_n - column - second, other=0.0)
                right += more.to(gl.float32)[None, :]
            if GATED:
                value = gated(left, right, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
                _store(value, out_desc, row, column, c_tile)
            else:
                if WEIGHTED:
                    left = left * weight[:, None]
                    right = right * weight[:, None]
                else:
                    left = pointwise(left, KIND, ALPHA)
                    right = pointwise(right, KIND, ALPHA)
                _store(left, out_desc, row, column, c_tile)
                _store(right, out_desc, row, column + 128, c_tile)
        else:
            for _ in range(steps + sides * lora_steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = _next(stage, phase, STAGES)
        item = later
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_gemm_kernel(
    x_ptr,  # [T, K], rows by token; unused without GATHER
    h_desc,  # [blocks * 128, K], tiles of [128, 64]; unused with GATHER
    weight_desc,  # [E * N, K] or [E * 2N, K], tiles of [128, 64]
    bias_ptr,  # [E, N or 2N] or unused
    topk_weights_ptr,  # [P], with WEIGHTED
    out_desc,  # [blocks * 128, N], tiles of [64, 128]
    s_ptr,  # [blocks * 128, s_stride] or unused
    row_pair_ptr,
    block_info_ptr,
    live_blocks_ptr,
    row_segment_ptr,  # this and the next two: see block_groups
    group_count_ptr,
    groups_ptr,
    groups_i32_ptr,
    arena_ptr,
    size_k,
    size_n,
    x_stride,
    bias_stride,
    num_tiles,
    s_stride,
    side_stride,
    max_groups,
    group_stride,
    GATHER: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    WEIGHTED: gl.constexpr,
    START0: gl.constexpr,
    START1: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr,
    ALPHA: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_SHIFT: gl.constexpr,
    LORA: gl.constexpr,
    STAGES: gl.constexpr,
    INF: gl.constexpr,
):
    """See the top of the file."""
    dtype: gl.constexpr = weight_desc.dtype
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], half)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, 256, 64], half)
    c_bufs = gl.allocate_shared_memory(dtype, [2, 64, 128], half)
    flags = gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    items = gl.load(live_blocks_ptr) * num_tiles
    gl.warp_specialize(
        [
            (_load, (
                a_bufs, w_bufs, flags, full, empty, x_ptr, h_desc, weight_desc, row_pair_ptr,
                block_info_ptr, s_ptr, row_segment_ptr, group_count_ptr, groups_ptr,
                groups_i32_ptr, arena_ptr, items, num_tiles, size_k, size_n, x_stride, s_stride,
                side_stride, max_groups, group_stride, GATHER, TOP_K, GATED, START0, START1, LORA,
                STAGES, INF,
            )),
            (_multiply, (
                a_bufs, w_bufs, c_bufs, full, empty, out_desc, bias_ptr, topk_weights_ptr,
                row_pair_ptr, block_info_ptr, group_count_ptr, items, num_tiles, size_k, size_n,
                bias_stride, 0, GATHER, GATED, WEIGHTED, START0, START1, HAS_BIAS, KIND, ALPHA,
                HAS_LIMIT, LIMIT, UP_SHIFT, LORA, STAGES,
            )),
            (_multiply, (
                a_bufs, w_bufs, c_bufs, full, empty, out_desc, bias_ptr, topk_weights_ptr,
                row_pair_ptr, block_info_ptr, group_count_ptr, items, num_tiles, size_k, size_n,
                bias_stride, 1, GATHER, GATED, WEIGHTED, START0, START1, HAS_BIAS, KIND, ALPHA,
                HAS_LIMIT, LIMIT, UP_SHIFT, LORA, STAGES,
            )),
        ],
        [4, 4],
        [168, 168],  # a third each: the most that the compiler gives a thread of 384 anyway
    )  # fmt: skip
