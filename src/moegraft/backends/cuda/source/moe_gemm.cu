// One GEMM of a MoE layer with many rows per expert: gate_up + lora_expand + activation, or
// down + lora_expand + routing weight.
//
// Weights are the left operand, 256 of their rows (output columns) per tile; the right one are the
// rows of one block: up to BLOCK_M rows of one expert, in steps of 16, so that an expert's last
// block costs what its rows cost. Two warp groups multiply, each 2 x 64 of the tile's columns; a
// third one loads: weights and h by tensor map, rows of x by their tokens. What adapters add is
// S B, further steps of the same product. Programs are persistent.
//
// Macros, given by the host: BLOCK_M, STAGES; GATHER (x by token, else h by tensor map), GATED,
// KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT; WEIGHTED; BIAS (type of the bias; 0 = none), WEIGHT
// (type of the routing weights): 1 fp32, 2 bf16, 3 fp16; LORA; TOP_K; START0, START1 (first rows of
// the two halves of a tile).
#include "hopper.h"
#include "product.h"

struct Arguments {
    const char *x;           // [T, K] by token, 16 byte rows
    const void *bias;        // [E, rows of the weights of an expert]
    const void *topk_weights;// [P]
    const int *row_pair;     // [blocks * BLOCK_M]
    const int *block_info;   // [blocks] expert * 256 + rows
    const int *live_blocks;  // [1]
    const char *s;           // [blocks * BLOCK_M, sides * rank rows]
    const int *row_segment;  // [blocks * BLOCK_M]
    const int *group_count;  // [blocks]
    const i64 *groups;       // [sides, blocks, max_groups, 4]: see block_groups.py
    const u16 *arena;
    i64 x_stride;            // bytes
    i64 s_stride;            // bytes
    i64 group_stride;        // words between two sides
    int side_bytes;          // of S, between two sides
    int max_groups;
    int size_k;
    int size_n;              // columns of the output
    int weight_rows;         // of an expert
    int bias_stride;
    int num_tiles;           // per block
};

constexpr int W_BYTES = 256 * 128, X_BYTES = BLOCK_M * 128, STAGE_BYTES = W_BYTES + X_BYTES;
// Half of a block's rows at a time are on their way out.
constexpr int PART_BYTES = (BLOCK_M / 16 + 1) / 2 * 16 * 128, OUT_BYTES = 2 * PART_BYTES;
// Routing weights of the last few blocks: those who load are never further ahead.
constexpr int SCALES = 4;
constexpr int OUT_AT = STAGES * STAGE_BYTES, SCALES_AT = OUT_AT + 2 * OUT_BYTES;
constexpr int MARKS_AT = SCALES_AT + SCALES * BLOCK_M * 4;
// What an item needs to know of its block, copied one item ahead: pairs, segments, a few groups.
constexpr int META_GROUPS = 8, SEGMENTS_AT = BLOCK_M * 4, WORDS_AT = 2 * BLOCK_M * 4;
constexpr int META_BYTES = WORDS_AT + 2 * META_GROUPS * 32;
constexpr int META_AT = MARKS_AT + 2 * BLOCK_M * 4, BARRIERS_AT = META_AT + 2 * META_BYTES;
constexpr int SIDES = GATED ? 2 : 1;
constexpr int TILE_COLUMNS = GATED ? 128 : 256;
// Groups of 16 rank rows in one stage.
constexpr int STAGE_GROUPS = 4 / SIDES;
constexpr int LOADERS = 128;

DEVICE float as_float(const void *values, i64 i, int type) {
    if (type == 1) return ((const float *)values)[i];
    u16 half = ((const u16 *)values)[i];
    if (type == 2) return __uint_as_float((u32)half << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// Stages go round; the parity of their barriers changes with each round.
struct Stage {
    u32 base;
    int index = 0;
    u32 parity = 0;
    DEVICE u32 full() const { return base + BARRIERS_AT + 8 * index; }
    DEVICE u32 empty() const { return base + BARRIERS_AT + 8 * (STAGES + index); }
    DEVICE u32 weights() const { return base + index * STAGE_BYTES; }
    DEVICE u32 rows() const { return weights() + W_BYTES; }
    DEVICE void next() {
        if (++index == STAGES) {
            index = 0;
            parity ^= 1;
        }
    }
};

// ---- loading ----

// The items of a program, and where a thread of the loading warp group copies 16 bytes of a row of
// 128, of neighbouring rows with its neighbours.
struct Loader {
    const Arguments &p;
    u32 base;
    int t, chunk, row;
    u32 to;
    int item, end;
    u32 turn = 0;

    DEVICE Loader(const Arguments &p_, u32 base_, int thread)
        : p(p_), base(base_), t(thread), chunk(thread & 7), row(thread >> 3), item(blockIdx.x) {
        to = row * 128 + ((chunk ^ (row & 7)) << 4);
        end = *p.live_blocks * p.num_tiles;
    }

    DEVICE int block() const { return item / p.num_tiles; }
    DEVICE int column() const { return item % p.num_tiles * TILE_COLUMNS; }
    DEVICE int later() const { return item + gridDim.x; }
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

// A stage of S and B: STAGE_GROUPS groups, of gate and then of up.
DEVICE void load_delta(const Loader &me, Stage &stage, int rows, int group, int count) {
    const Arguments &p = me.p;
    barrier_wait(stage.empty(), stage.parity ^ 1);
    // B first, it comes from farther away: a warp has one group, [16, columns]; 64 columns are 8 KB
    // of [64, 128 bytes].
    int slot = me.t >> 5, side = GATED ? slot >> 1 : 0, own = group + (GATED ? slot & 1 : slot);
    if (own < count) {
        constexpr int CHUNKS = TILE_COLUMNS / 8;
        i64 offset = me.word(side, own, 0), stride = me.word(side, own, 1);
        int live = (int)me.word(side, own, 2), column = me.column();
        int chunk = me.t % CHUNKS, r0 = (me.t & 31) / CHUNKS;
        bool inside = column + chunk * 8 < p.size_n;
        u32 to = stage.weights() + (chunk >> 3) * 8192 + slot * 2048;
        const u16 *from = p.arena + offset + r0 * stride + column + chunk * 8;
#pragma unroll 4
        for (int i = 0; i < 16; i += 32 / CHUNKS) {
            int r = r0 + i;
            bool there = inside && r < live;
            copy_16(to + r * 128 + (((chunk & 7) ^ (r & 7)) << 4), there ? from : p.arena,
                    there ? 16 : 0);
            from += 32 / CHUNKS * stride;
        }
    }
    // S: this thread's chunk is one half of one group's 16 values.
    slot = me.chunk >> 1;
    side = GATED ? slot >> 1 : 0;
    own = group + (GATED ? slot & 1 : slot);
    if (own < count) {
        i64 place = me.word(side, own, 3);
        int segment = (int)place, r0 = (int)(place >> 32);
        const char *s = p.s + side * p.side_bytes + (r0 + (me.chunk & 1) * 8) * 2 +
                        ((i64)me.block() * BLOCK_M + me.row) * p.s_stride;
        u32 segments = me.meta(me.turn) + SEGMENTS_AT + me.row * 4, to = stage.rows() + me.to;
#pragma unroll 4
        for (int r = me.row; r < rows; r += 16) {
            bool mine = (int)load_shared_u32(segments) == segment;
            copy_16(to, s, mine ? 16 : 0);
            segments += 64;
            to += 2048;
            s += 16 * p.s_stride;
        }
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
    int info = 0;
    if (me.item < me.end) {
        info = p.block_info[me.block()];
        me.ask(0, me.block());
    }
    for (; me.item < me.end; me.item = me.later(), ++me.turn) {
        int expert = info >> 8, rows = info & 255, sixteens = (rows + 15) >> 4;
        int later = me.later(), first = me.block() * BLOCK_M;
        barrier_wait(me.meta_there(me.turn), me.turn >> 1 & 1);
        loaders_sync(3, LOADERS);  // nobody reads any more what the item before had to know
        if (later < me.end) {
            info = load_global(p.block_info + later / p.num_tiles);
            me.ask(me.turn + 1, later / p.num_tiles);
        }
        int count = LORA ? load_global(p.group_count + me.block()) : 0;
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
        for (int k = 0; k < p.size_k; k += 64) {
            barrier_wait(stage.empty(), stage.parity ^ 1);
            if (me.t == 0) {
                barrier_expect(stage.full(), W_BYTES + (GATHER ? 0 : sixteens * 2048));
                load_tile(stage.weights(), w_map, stage.full(), k, row + START0);
                load_tile(stage.weights() + W_BYTES / 2, w_map, stage.full(), k, row + START1);
                if (!GATHER) {
                    for (int i = 0; i < sixteens; ++i)
                        load_tile(stage.rows() + i * 2048, h_map, stage.full(), k, first + i * 16);
                }
            }
            if (GATHER) {
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    if (i * 16 + me.row < rows)
                        copy_16(stage.rows() + me.to + i * 2048, x + (u64)x_rows[i] * 16 + k * 2, 16);
                }
                copies_arrive(stage.full());
            } else if (WEIGHTED && k + 64 == p.size_k) {
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
        }
        for (int group = 0; group < count; group += STAGE_GROUPS)
            load_delta(me, stage, rows, group, count);
    }
}

// ---- multiplying ----

DEVICE float pointwise(float x) {
    if (KIND == 0) return __fdividef(x, 1.0f + __expf(-ALPHA * x));
    if (KIND == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (KIND == 2) {
        float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return __fdividef(x, 1.0f + __expf(-2.0f * inner));
    }
    float positive = fmaxf(x, 0.0f);
    if (x != x) positive = x;
    return KIND == 3 ? positive : positive * positive;
}

// min and max that give NaN for NaN.
DEVICE float below(float x, float most) { return x > most ? most : x; }
DEVICE float above(float x, float least) { return x < least ? least : x; }

DEVICE float gated(float gate, float up) {
    if (HAS_LIMIT) {
        gate = below(gate, LIMIT);
        up = above(below(up, LIMIT), -LIMIT);
    }
    return pointwise(gate) * (up + UP_SHIFT);
}

DEVICE u32 pair_of(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// One of the two warp groups that multiply.
struct Multiplier {
    u32 base, out;
    int group, t, warp, lane;
    u32 part = 0;  // of `out`, that is written next

    DEVICE Multiplier(u32 base_, int group_, int thread)
        : base(base_), group(group_), t(thread), warp(thread >> 5), lane(thread & 31) {
        out = base + OUT_AT + group * OUT_BYTES;
    }

    // Wait until the next part of `out` may be written: all stores but those of the other have left.
    DEVICE void begin_store() {
        part ^= 1;
        if (t == 0) stores_read();
        group_sync(1 + group);
    }

    // Where this lane writes its row of a matrix: 16 rows of the block, 16 columns of the warp.
    DEVICE u32 store_at() const {
        int q = lane >> 3, i = lane & 7;
        return out + part * PART_BYTES + (8 * (q >> 1) + i) * 128 + (((warp * 2 + (q & 1)) ^ i) << 4);
    }

    // Let the copy engine write rows, in steps of 16, of 64 columns.
    DEVICE void end_store(const TensorMap *out_map, int column, int row, int rows) const {
        proxy_fence();
        group_sync(1 + group);
        if (t == 0) {
            for (int i = 0; i < rows; i += 16)
                store_tile(out + part * PART_BYTES + i * 128, out_map, column, row + i);
            stores_commit();
        }
    }
};

// Bit q: the B of slot q of a stage has values that are not finite, in the columns of a warp group.
DEVICE u32 broken_groups(const Multiplier &me, const Stage &stage) {
    u32 found = 0;
#pragma unroll
    for (int half = 0; half < 2 / SIDES; ++half) {
        u32 tile = stage.weights() + (half * 2 + me.group) * 8192;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            uint4 v = load_shared_16(tile + q * 2048 + me.t * 16);
            // An exponent of ones, and one more, carries into the sign.
            const u32 ones = 0x7F807F80u, one = 0x00800080u, sign = 0x80008000u;
            u32 any = ((v.x & ones) + one) | ((v.y & ones) + one) | ((v.z & ones) + one) |
                      ((v.w & ones) + one);
            found |= (any & sign) ? 1u << q : 0u;
        }
    }
    return found;
}

// Take broken groups out of a stage, and mark the rows of their segments, which become NaN at the
// end: in the product, 0 times what is not finite would reach all rows of the block.
DEVICE void mend(const Arguments &p, const Multiplier &me, const Stage &stage, u32 broken, int block,
                 int group, int live, bool is_first) {
    u32 marks = me.base + MARKS_AT + me.group * BLOCK_M * 4;
    const i64 first = (i64)block * BLOCK_M;
    for (int r = me.t; r < BLOCK_M && is_first; r += 128) store_shared_float(marks + r * 4, 0.0f);
    for (int q = 0; q < 4; ++q) {
        if (!group_any(1 + me.group, broken >> q & 1)) continue;
        for (int half = 0; half < 2 / SIDES; ++half)
            store_shared_16(stage.weights() + (half * 2 + me.group) * 8192 + q * 2048 + me.t * 16, 0);
        int own = group + (GATED ? q & 1 : q);
        int segment = (int)p.groups[((i64)block * p.max_groups + own) * 4 + 3];
        for (int r = me.t; r < BLOCK_M; r += 128)
            if (p.row_segment[first + r] == segment)
                store_shared_float(marks + r * 4, __int_as_float(0x7FC00000));
    }
}

template <int N>
DEVICE void run_item(const Arguments &p, const TensorMap *out_map, Multiplier &me,
                     Stage &stage, int block, int tile, int expert, int count, int turn) {
    // Zeros, not `add` = 0 for the first: what is never written would count as alive all the time.
    float left[N / 2], right[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) left[i] = right[i] = 0.0f;
    u32 before = 0;
    bool is_marked = false;
    for (int k = 0; k < p.size_k; k += 64) {
        barrier_wait(stage.full(), stage.parity);
        if (GATHER) proxy_fence();
        u64 w0 = tile_at(stage.weights() + me.group * 8192), x = tile_at(stage.rows());
        u64 w1 = w0 + (W_BYTES / 2 >> 4);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Product<N, 0>::run(left, w0 + 2 * i, x + 2 * i);
            Product<N, 0>::run(right, w1 + 2 * i, x + 2 * i);
        }
        products_commit();
        products_wait<1>();
        if (k && me.t == 0) barrier_arrive(before);  // the products before are done with it
        before = stage.empty();
        stage.next();
    }
    products_wait<0>();
    if (me.t == 0) barrier_arrive(before);
    settle(left);
    settle(right);
    if (LORA) {
        for (int group = 0; group < count; group += STAGE_GROUPS) {
            barrier_wait(stage.full(), stage.parity);
            u32 live = (1u << min(count - group, STAGE_GROUPS)) - 1;
            if (GATED) live |= live << 2;
            u32 broken = broken_groups(me, stage) & live;
            if (group_any(1 + me.group, broken != 0)) {
                mend(p, me, stage, broken, block, group, count, !is_marked);
                is_marked = true;
            }
            proxy_fence();
            u64 b0 = tile_at(stage.weights() + me.group * 8192), s = tile_at(stage.rows());
#pragma unroll
            for (int q = 0; q < STAGE_GROUPS; ++q) {
                if (group + q >= count) break;
                products_begin();
                Product<N, 1>::run(left, b0 + q * 128, s + 2 * q);
                if (GATED)
                    Product<N, 1>::run(right, b0 + q * 128 + 256, s + 2 * q + 4);
                else
                    Product<N, 1>::run(right, b0 + q * 128 + 1024, s + 2 * q);
            }
            products_commit();
            products_wait<0>();
            settle(left);
            settle(right);
            if (me.t == 0) barrier_arrive(stage.empty());
            stage.next();
        }
    }

    int column = tile * TILE_COLUMNS + me.group * 64, row = block * BLOCK_M;
    if (BIAS) {
        i64 at = (i64)expert * p.bias_stride + column + me.warp * 16 + (me.lane >> 2);
        bool inside = GATED || column + 128 < p.size_n;
        float l0 = as_float(p.bias, at + START0, BIAS), l1 = as_float(p.bias, at + START0 + 8, BIAS);
        float r0 = inside ? as_float(p.bias, at + START1, BIAS) : 0.0f;
        float r1 = inside ? as_float(p.bias, at + START1 + 8, BIAS) : 0.0f;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            left[i] += i & 2 ? l1 : l0;
            right[i] += i & 2 ? r1 : r0;
        }
    }
    if (LORA && is_marked) {
        u32 marks = me.base + MARKS_AT + (me.group * BLOCK_M + 2 * (me.lane & 3)) * 4;
        group_sync(1 + me.group);
#pragma unroll
        for (int i = 0; i < N / 2; i += 2) {
            float2 mark = load_shared_float2(marks + (i >> 2) * 32);
            left[i] += mark.x;
            right[i] += mark.x;
            left[i + 1] += mark.y;
            right[i + 1] += mark.y;
        }
    }
    // Two parts of the rows in turn: one is written while the copy engine reads the other.
    constexpr int PART = (N / 16 + 1) / 2 * 16;
    u32 scales = me.base + SCALES_AT + (turn % SCALES * BLOCK_M + 2 * (me.lane & 3)) * 4;
#pragma unroll
    for (int half = 0; half < 2 / SIDES; ++half) {
#pragma unroll
        for (int part = 0; part < (N > 16 ? 2 : 1); ++part) {
            const int first = part * PART, last = part || N == 16 ? N : PART;
            me.begin_store();
            u32 to = me.store_at();
#pragma unroll
            for (int n = first; n < last; n += 16) {
                u32 v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int at = n / 2 + 2 * i;
                    float a = half ? right[at] : left[at], b = half ? right[at + 1] : left[at + 1];
                    if (GATED) {
                        a = gated(a, right[at]);
                        b = gated(b, right[at + 1]);
                    } else if (WEIGHTED) {
                        float2 scale = load_shared_float2(scales + (n + (i >> 1) * 8) * 4);
                        a *= scale.x;
                        b *= scale.y;
                    } else {
                        a = pointwise(a);
                        b = pointwise(b);
                    }
                    v[i] = pair_of(a, b);
                }
                store_transposed(to + (n - first) * 128, v[0], v[1], v[2], v[3]);
            }
            me.end_store(out_map, column + half * 128, row + first, last - first);
        }
    }
}

DEVICE void multiply_all(const Arguments &p, const TensorMap *out_map, u32 base, int group,
                         int thread) {
    Multiplier me(base, group, thread);
    Stage stage{base};
    int items = *p.live_blocks * p.num_tiles, turn = 0;
    int item = blockIdx.x;
    int info = item < items ? p.block_info[item / p.num_tiles] : 0;
    while (item < items) {
        int block = item / p.num_tiles, tile = item % p.num_tiles;
        int expert = info >> 8, sixteens = ((info & 255) + 15) >> 4;
        int later = item + gridDim.x;
        info = later < items ? p.block_info[later / p.num_tiles] : 0;
        int count = 0;
        if (LORA) count = __shfl_sync(0xFFFFFFFF, load_global(p.group_count + block), 0);
#define CASE(n)                                                                        \
    case n:                                                                            \
        run_item<16 * n>(p, out_map, me, stage, block, tile, expert, count, turn);     \
        break;
        switch (sixteens) {
            CASES
        }
        item = later;
        ++turn;
    }
    if (thread == 0) stores_done();
}

extern "C" __global__ void __launch_bounds__(384, 1)
    moe_gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap h_map,
             const __grid_constant__ TensorMap out_map, const __grid_constant__ Arguments p) {
    extern __shared__ char memory[];
    u32 base = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    int group = __shfl_sync(0xFFFFFFFF, threadIdx.x >> 7, 0);
    int thread = threadIdx.x & 127;
    if (threadIdx.x == 0) {
        Stage stage{base};
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(stage.full(), LOADERS + 1);
            barrier_init(stage.empty(), 2);
            stage.next();
        }
        for (int i = 0; i < 2; ++i) barrier_init(base + BARRIERS_AT + 16 * STAGES + 8 * i, LOADERS);
        proxy_fence();
    }
    __syncthreads();
    // 65,536 registers are 512 per lane of a warp group of each kind.
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        load_all(p, &w_map, &h_map, base, thread);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        multiply_all(p, &out_map, base, group, thread);
    }
}
