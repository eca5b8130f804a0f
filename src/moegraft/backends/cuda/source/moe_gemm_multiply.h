// The warp groups of moe_gemm that multiply, apply what follows and store; see moe_gemm.cu.
#pragma once
#include "hopper_fp8.h"
#include "moe_gemm_layout.h"
#include "product.h"

DEVICE float pointwise(float x) {
    if (FP8 && KIND == 0) return x * sigmoid(ALPHA * x);
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
    return pointwise(gate) * (FP8 && UP_SHIFT == 0.0f ? up : up + UP_SHIFT);
}

// One of the two warp groups that multiply.
struct Multiplier {
    u32 base, out;
    int group, t, warp, lane;
    u32 part = 0;  // of `out`, that is written next
#if FP8
    float left_scale = 0.0f, right_scale = 0.0f;  // see ask_scales
    u32 record = 0;
    int items = 0, asked = -1;  // asked: the item whose scales are here, or on their way
#endif

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

#if FP8
#include "moe_gemm_fp8.h"
#endif

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

// Wait for a stage with `left` more groups, and look at them.
DEVICE u32 wait_and_look(const Multiplier &me, const Stage &stage, int left) {
    barrier_wait(stage.full(), stage.parity);
    u32 live = (1u << min(left, STAGE_GROUPS)) - 1;
    return broken_groups(me, stage) & (GATED ? live | live << 2 : live);
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
    bool is_marked = false;
    u32 before = 0, broken = 0;
#if FP8
    multiply_fp8<N>(p, me, stage, left, right, expert, tile);
    settle(left);
    settle(right);
    ask_next_scales(p, me);
    if (LORA && count) broken = wait_and_look(me, stage, count);
#else
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
    // What B holds is looked at while the products before are under way.
    if (LORA && count) broken = wait_and_look(me, stage, count);
    products_wait<0>();
    if (me.t == 0) barrier_arrive(before);
    settle(left);
    settle(right);
#endif
    for (int group = 0; LORA && group < count;) {
        if (group_any(1 + me.group, broken != 0)) {
            mend(p, me, stage, broken, block, group, count, !is_marked);
            is_marked = true;
        }
        proxy_fence();
        u64 b0 = tile_at(stage.weights() + me.group * 8192), s = tile_at(stage.rows());
#pragma unroll
        for (int q = 0; q < STAGE_GROUPS; ++q) {
            if (q && group + q >= count) break;
            products_begin();
            Product<N, 1>::run(left, b0 + q * 128, s + 2 * q);
            if (GATED)
                Product<N, 1>::run(right, b0 + q * 128 + 256, s + 2 * q + 4);
            else
                Product<N, 1>::run(right, b0 + q * 128 + 1024, s + 2 * q);
        }
        products_commit();
        before = stage.empty();
        stage.next();
        group += STAGE_GROUPS;
        if (group < count) broken = wait_and_look(me, stage, count - group);
        products_wait<0>();
        if (me.t == 0) barrier_arrive(before);
        settle(left);
        settle(right);
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
#if FP8
    if (!WEIGHTED) return store_h<N>(p, out_map, me, left, right, block, tile);
#endif
    // Parts of the rows in turn: one is written while the copy engine reads another.
    constexpr int PART = FP8 ? 32 : (N / 16 + 1) / 2 * 16;
    u32 scales = me.base + SCALES_AT + (turn % SCALES * BLOCK_M + 2 * (me.lane & 3)) * 4;
#pragma unroll
    for (int half = 0; half < 2 / SIDES; ++half) {
#pragma unroll
        for (int part = 0; part < (N + PART - 1) / PART; ++part) {
            const int first = part * PART, last = first + PART < N ? first + PART : N;
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
#if FP8
    me.items = *p.live_blocks * p.num_tiles;
#endif
    for (u32 turn = 0;; ++turn) {
        barrier_wait(stage.full(), stage.parity);
        const u32 record = base + RECORDS_AT + turn % RECORDS * 16;
        const int item = __shfl_sync(0xFFFFFFFF, load_shared_u32(record), 0);
        if (item < 0) break;
        const int info = __shfl_sync(0xFFFFFFFF, load_shared_u32(record + 4), 0);
        const int count = LORA ? __shfl_sync(0xFFFFFFFF, load_shared_u32(record + 8), 0) : 0;
        const int block = item / p.num_tiles, tile = item % p.num_tiles;
        const int expert = info >> 8, sixteens = ((info & 255) + 15) >> 4;
#if FP8
        me.record = record;
        if (me.asked != item) ask_scales(p, me, expert, tile, 0);
#endif
#define CASE(n)                                                                        \
    case n:                                                                            \
        run_item<16 * n>(p, out_map, me, stage, block, tile, expert, count, turn);     \
        break;
        switch (sixteens) {
            CASES
        }
    }
    if (thread == 0) stores_done();
}
