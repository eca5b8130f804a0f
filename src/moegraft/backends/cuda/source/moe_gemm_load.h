// The warp group of moe_gemm that loads; see moe_gemm.cu.
#pragma once
#include "hopper_fp8.h"
#include "moe_gemm_layout.h"

// The items of a program, and where a thread of the loading warp group copies 16 bytes of a row of
// 128, of neighbouring rows with its neighbours.
struct Loader {
    const Arguments &p;
    u32 base;
    int t, chunk, row;
    u32 to;
    int item = 0, end;
    u32 turn = 0;

    DEVICE Loader(const Arguments &p_, u32 base_, int thread)
        : p(p_), base(base_), t(thread), chunk(thread & 7), row(thread >> 3) {
        to = row * 128 + ((chunk ^ (row & 7)) << 4);
        end = *p.live_blocks * p.num_tiles;
    }

    // Thread 0 takes an item; all know it when they share it, one turn at a time.
    DEVICE int take() const { return atomicAdd(p.ticket, 1); }
    DEVICE int share(int taken) const {
        if (t == 0) store_shared_u32(record() + 12, taken);
        loaders_sync(3, LOADERS);
        return load_shared_u32(record() + 12);
    }
    DEVICE u32 record() const { return base + RECORDS_AT + turn % RECORDS * 16; }

    DEVICE int block() const { return item / p.num_tiles; }
    DEVICE int column() const { return item % p.num_tiles * TILE_COLUMNS; }
    DEVICE u32 meta(u32 which) const { return base + META_AT + (which & 1) * META_BYTES; }
    DEVICE u32 meta_there(u32 which) const {
        return base + BARRIERS_AT + 16 * STAGES + (which & 1) * 8;
    }

    // Ask for what item number `which`, of this block, needs to know.
    DEVICE void ask(u32 which, int block) const {
        constexpr int CHUNKS = BLOCK_M / 4;
        u32 at = meta(which);
        i64 first = (i64)block * BLOCK_M;
        if (t < CHUNKS) copy_16(at + t * 16, p.row_pair + first + t * 4, 16);
        if (LORA) {
            int c = t - CHUNKS, g = t - 2 * CHUNKS;
            if (c >= 0 && c < CHUNKS)
                copy_16(at + SEGMENTS_AT + c * 16, p.row_segment + first + c * 4, 16);
            int side = g / (2 * META_GROUPS), word = g % (2 * META_GROUPS) * 2;
            if (g >= 0 && side < SIDES && word < p.max_groups * 4)
                copy_16(at + WORDS_AT + g * 16,
                        p.groups + side * p.group_stride + (i64)block * p.max_groups * 4 + word, 16);
        }
        copies_arrive(meta_there(which));
    }

    // A word of a group of this item's block.
    DEVICE i64 word(int side, int group, int which) const {
        if (group < META_GROUPS)
            return load_shared_i64(meta(turn) + WORDS_AT +
                                   ((side * META_GROUPS + group) * 4 + which) * 8);
        return p.groups[side * p.group_stride + ((i64)block() * p.max_groups + group) * 4 + which];
    }
};
static_assert(2 * BLOCK_M / 4 + SIDES * 2 * META_GROUPS <= LOADERS, "a thread asks once");

// Of 16 rows of a stage that no thread copies.
constexpr int ROWS_BYTES = 2048 + (FP8 ? 64 : 0);
static_assert(!FP8 || BLOCK_M <= LOADERS, "a thread has the scale of a row");

// A stage of S and B: STAGE_GROUPS groups, of gate and then of up; zeros for groups that are not there.
DEVICE void load_delta(const Loader &me, Stage &stage, int rows, int group, int count) {
    const Arguments &p = me.p;
    barrier_wait(stage.empty(), stage.parity ^ 1);
    // B first, it comes from farther away: a warp has one group, [16, columns]; 64 columns are 8 KB
    // of [64, 128 bytes].
    constexpr int CHUNKS = TILE_COLUMNS / 8;
    int slot = me.t >> 5, side = GATED ? slot >> 1 : 0, own = group + (GATED ? slot & 1 : slot);
    i64 offset = 0, stride = 0;
    int live = 0, column = me.column(), chunk = me.t % CHUNKS, r0 = (me.t & 31) / CHUNKS;
    if (own < count) {
        offset = me.word(side, own, 0), stride = me.word(side, own, 1);
        live = column + chunk * 8 < p.size_n ? (int)me.word(side, own, 2) : 0;
    }
    u32 to = stage.weights() + (chunk >> 3) * 8192 + slot * 2048;
    const u16 *from = p.arena + offset + r0 * stride + column + chunk * 8;
#pragma unroll 4
    for (int i = 0; i < 16; i += 32 / CHUNKS) {
        int r = r0 + i;
        copy_16(to + r * 128 + (((chunk & 7) ^ (r & 7)) << 4), r < live ? from : p.arena,
                r < live ? 16 : 0);
        from += 32 / CHUNKS * stride;
    }
    // S: this thread's chunk is one half of one group's 16 values.
    slot = me.chunk >> 1;
    side = GATED ? slot >> 1 : 0;
    own = group + (GATED ? slot & 1 : slot);
    i64 place = own < count ? me.word(side, own, 3) : 0;
    int segment = own < count ? (int)place : -2;
    const char *s = p.s + side * p.side_bytes + ((int)(place >> 32) + (me.chunk & 1) * 8) * 2 +
                    ((i64)me.block() * BLOCK_M + me.row) * p.s_stride;
    u32 segments = me.meta(me.turn) + SEGMENTS_AT + me.row * 4;
    to = stage.rows() + me.to;
#pragma unroll 4
    for (int r = me.row; r < rows; r += 16) {
        bool mine = (int)load_shared_u32(segments) == segment;
        copy_16(to, s, mine ? 16 : 0);
        segments += 64;
        to += 2048;
        s += 16 * p.s_stride;
    }
    copies_arrive(stage.full());
    if (me.t == 0) barrier_arrive(stage.full());
    stage.next();
}

DEVICE void load_all(const Arguments &p, const TensorMap *w_map, const TensorMap *h_map, u32 base,
                     int thread) {
    constexpr int STEPS = BLOCK_M / 16, SHARE = (BLOCK_M + LOADERS - 1) / LOADERS;
    Loader me(p, base, thread);
    Stage stage{base};
    const u32 x_units = (u32)(p.x_stride >> 4);
    // Of the next item; it is taken while this one is loaded.
    const int share_at = min(max(p.size_k / STEP - 2, 0), 4) * STEP;
    int info = 0, count = 0;
    auto look = [&](int item) {
        if (item >= me.end) return;
        int block = item / p.num_tiles;
        info = load_global(p.block_info + block);
        if (LORA) count = load_global(p.group_count + block);
    };
    me.item = me.share(thread == 0 ? me.take() : 0);
    look(me.item);
    if (me.item < me.end) me.ask(0, me.block());
    for (int later = 0; me.item < me.end; me.item = later, ++me.turn) {
        const int expert = info >> 8, rows = info & 255, sixteens = (rows + 15) >> 4;
        const int groups = count, first = me.block() * BLOCK_M;
        if (me.t == 0) {
            store_shared_u32(me.record(), me.item);
            store_shared_u32(me.record() + 4, info);
            store_shared_u32(me.record() + 8, groups);
        }
        barrier_wait(me.meta_there(me.turn), me.turn >> 1 & 1);
        int taken = me.t == 0 ? me.take() : 0;
        bool s_there = !LORA;
        u32 pairs = me.meta(me.turn);
        u32 x_rows[STEPS];
        if (GATHER) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                int r = i * 16 + me.row;
                u32 pair = r < rows ? load_shared_u32(pairs + r * 4) : 0;
                x_rows[i] = pair / TOP_K * x_units;
            }
        }
        float scales[SHARE];
        if (WEIGHTED) {
#pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                int r = me.t + i * LOADERS;
                if (r < rows)
                    scales[i] = as_float(p.topk_weights, load_shared_u32(pairs + r * 4), WEIGHT);
            }
        }
        int row = expert * p.weight_rows + me.column();
        const char *x = p.x + me.chunk * 16;
#if FP8
        const float *x_scales = p.x_scales;
        if (!GATHER)
            x_scales += first;
        else if (me.t < rows)
            x_scales += (i64)(load_shared_u32(pairs + me.t * 4) / TOP_K) * (p.size_k / STEP);
#endif
        for (int k = 0; k < p.size_k; k += STEP) {
            barrier_wait(stage.empty(), stage.parity ^ 1);
            if (me.t == 0) {
                barrier_expect(stage.full(), W_BYTES + (GATHER ? 0 : sixteens * ROWS_BYTES));
                load_tile(stage.weights(), w_map, stage.full(), k, row + START0);
                load_tile(stage.weights() + W_BYTES / 2, w_map, stage.full(), k, row + START1);
                if (!GATHER) {
                    for (int i = 0; i < sixteens; ++i)
                        load_tile(stage.rows() + i * 2048, h_map, stage.full(), k, first + i * 16);
#if FP8
                    load_bytes(stage.row_scales(), x_scales, sixteens * 64, stage.full());
                    x_scales += p.scale_rows;
#endif
                }
            }
            if (GATHER) {
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    if (i * 16 + me.row < rows)
                        copy_16(stage.rows() + me.to + i * 2048, x + (u64)x_rows[i] * 16 + k * WIDTH, 16);
                }
#if FP8
                if (me.t < rows) copy_4(stage.row_scales() + me.t * 4, x_scales + k / STEP);
#endif
                copies_arrive(stage.full());
            } else if (WEIGHTED && k + STEP == p.size_k) {
#pragma unroll
                for (int i = 0; i < SHARE; ++i) {
                    int r = me.t + i * LOADERS;
                    if (r < rows)
                        store_shared_float(
                            base + SCALES_AT + (me.turn % SCALES * BLOCK_M + r) * 4, scales[i]);
                }
                barrier_arrive(stage.full());  // of each, behind its routing weights
            } else if (me.t == 0) {
                barrier_arrive(stage.full(), LOADERS);
            }
            stage.next();
            if (k == share_at) {
                later = me.share(taken);  // nobody needs any more what the item before had
                look(later);
                if (LORA) s_there = !groups || load_acquire(p.s_ready + me.block()) >= S_PARTS;
                if (later < me.end) me.ask(me.turn + 1, later / p.num_tiles);
            }
        }
        while (!s_there) s_there = load_acquire(p.s_ready + me.block()) >= S_PARTS;
        for (int group = 0; group < groups; group += STAGE_GROUPS)
            load_delta(me, stage, rows, group, groups);
    }
    if (me.t) return;
    barrier_wait(stage.empty(), stage.parity ^ 1);
    store_shared_u32(me.record(), 0xFFFFFFFF);
    barrier_arrive(stage.full(), LOADERS + 1);
}
