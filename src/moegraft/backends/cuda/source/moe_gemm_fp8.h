// What the warp groups of moe_gemm that multiply do for FP8 weights: their K loop, and h as the next
// FP8 product reads it; see moe_gemm.cu.
//
// A stage is one group of 128 columns, e4m3 by e4m3: its product joins the sums times one scale of
// the weights' 128 x 128 and one of each row. While a warp group adds, the other's products run.
#pragma once
#include "hopper_fp8.h"
#include "product_fp8.h"

constexpr u32 PAIR_BARRIER = 4;

// ---- K loop ----

// Load the scales of an item's weights, of 32 steps: lane l gets those of step first + l.
DEVICE void ask_scales(const Arguments &p, Multiplier &me, int expert, int tile, int first) {
    const int steps = p.size_k / STEP;
    const int row = (expert * p.weight_rows + tile * TILE_COLUMNS + START0) >> 7;
    // Behind the last column nothing is stored; but what is read must be there.
    const bool inside = GATED || tile * TILE_COLUMNS + 128 < p.size_n;
    const float *from = p.weight_scales + (i64)row * steps + first + me.lane;
    if (first + me.lane < steps) {
        me.left_scale = from[0];
        me.right_scale = from[inside ? ((START1 - START0) >> 7) * steps : 0];
    }
}

// The same for the program's next item, where that is known already.
DEVICE void ask_next_scales(const Arguments &p, Multiplier &me) {
    const int next = __shfl_sync(0xFFFFFFFF, load_shared_u32(me.record + 12), 0);
    if (p.size_k == STEP || next >= me.items) return;
    ask_scales(p, me, p.block_info[next / p.num_tiles] >> 8, next % p.num_tiles, 0);
    me.asked = next;
}

// sums += part times the scale of its rows.
template <int N>
DEVICE void add_scaled(float (&sums)[N / 2], const float (&part)[N / 2], u32 row_scales, float scale) {
#pragma unroll
    for (int i = 0; i < N / 2; i += 4) {
        float2 s = load_shared_float2(row_scales + i * 8);
        s.x *= scale;
        s.y *= scale;
        sums[i] += part[i] * s.x;
        sums[i + 1] += part[i + 1] * s.y;
        sums[i + 2] += part[i + 2] * s.x;
        sums[i + 3] += part[i + 3] * s.y;
    }
}

// The product of 64 columns of the output over one stage.
template <int N>
DEVICE void multiply_stage(float (&part)[N / 2], u64 w, u64 x) {
    products_begin();
    ProductFp8<N>::set(part, w, x);
    ProductFp8<N>::add(part, w + 2, x + 2);
    ProductFp8<N>::add(part, w + 4, x + 4);
    ProductFp8<N>::add(part, w + 6, x + 6);
    products_commit();
    products_wait<0>();
    settle(part);
}

template <int N>
DEVICE void multiply_fp8(const Arguments &p, Multiplier &me, Stage &stage, float (&left)[N / 2],
                         float (&right)[N / 2], int expert, int tile) {
    const int steps = p.size_k / STEP;
    for (int step = 0; step < steps; ++step) {
        if (step && !(step & 31)) ask_scales(p, me, expert, tile, step);
        float of_left = __shfl_sync(0xFFFFFFFF, me.left_scale, step & 31);
        float of_right = __shfl_sync(0xFFFFFFFF, me.right_scale, step & 31);
        u32 row_scales = stage.row_scales() + 8 * (me.lane & 3);
        barrier_wait(stage.full(), stage.parity);
        if (GATHER) proxy_fence();
        u64 w = tile_at(stage.weights() + me.group * 8192), x = tile_at(stage.rows());
        float part[N / 2];
        multiply_stage<N>(part, w, x);
        add_scaled<N>(left, part, row_scales, of_left);
        multiply_stage<N>(part, w + (W_BYTES / 2 >> 4), x);
        add_scaled<N>(right, part, row_scales, of_right);
        group_sync(1 + me.group);  // all four warps have read the scales
        if (me.t == 0) barrier_arrive(stage.empty());
        stage.next();
    }
}

// ---- h ----

// 16 neighbouring columns of h in bfloat16, of one of the rows of a part: eight threads have the 128
// columns of a group. Each warp group's 64 columns lie in a buffer of its own. What is rounded has
// exactly the bits of the largest absolute value / 448, and of value / scale.
DEVICE void quantise_row(const Arguments &p, const Multiplier &me, int column_group, i64 first_row,
                         int rows) {
    const int thread = me.group * 128 + me.t, row = thread >> 3, sixteen = thread & 7;
    const bool is_second = sixteen >> 2;
    u32 from = me.base + OUT_AT + is_second * OUT_BYTES + me.part * PART_BYTES + row * 128;
    // The second buffer's threads read their chunks the other way round: no two meet in a bank.
    u32 chunk = 2 * (sixteen & 3) + is_second, swizzle = row & 7;
    uint4 a = load_shared_16(from + ((chunk ^ swizzle) << 4));
    uint4 b = load_shared_16(from + ((chunk ^ 1 ^ swizzle) << 4));
    u32 v[8] = {is_second ? b.x : a.x, is_second ? b.y : a.y, is_second ? b.z : a.z,
                is_second ? b.w : a.w, is_second ? a.x : b.x, is_second ? a.y : b.y,
                is_second ? a.z : b.z, is_second ? a.w : b.w};
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = larger_pair(largest, v[i] & 0x7FFF7FFF);
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2)
        largest = larger_pair(largest, __shfl_xor_sync(0xFFFFFFFF, largest, lanes));
    float most = fmaxf(__uint_as_float(largest << 16), __uint_as_float(largest & 0xFFFF0000));
    float scale = fmaxf(most / 448.0f, 1e-10f), inverse = 1.0f / scale;
    u32 bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 pair = v[2 * i + (j >> 1)];
            float value = __uint_as_float(j & 1 ? pair & 0xFFFF0000 : pair << 16);
            q[j] = value * inverse;
            q[j] = fmaf(fmaf(-q[j], scale, value), inverse, q[j]);
        }
        bytes[i] = bytes_of(q[0], q[1]) | bytes_of(q[2], q[3]) << 16;
    }
    if (row >= rows || column_group * 128 >= p.size_n) return;
    i64 at = (first_row + row) * p.size_n + column_group * 128 + sixteen * 16;
    *(uint4 *)(p.h_values + at) = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
    if (sixteen == 0) p.h_scales[column_group * p.scale_rows + first_row + row] = scale;
}

// h of an item: e4m3 with a scale per row and 128 columns; for adapters in bfloat16 too.
template <int N>
DEVICE void store_h(const Arguments &p, const TensorMap *out_map, Multiplier &me,
                    const float (&left)[N / 2], const float (&right)[N / 2], int block, int tile) {
    const int column = tile * TILE_COLUMNS, row = block * BLOCK_M;
#pragma unroll
    for (int half = 0; half < 2 / SIDES; ++half) {
#pragma unroll
        for (int first = 0; first < N; first += 32) {
            const int last = first + 32 < N ? first + 32 : N;
            if (LORA) me.begin_store();
            else me.part ^= 1;
            u32 to = me.store_at();
#pragma unroll
            for (int n = first; n < last; n += 16) {
                u32 v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int at = n / 2 + 2 * i;
                    float a = half ? right[at] : left[at], b = half ? right[at + 1] : left[at + 1];
                    a = GATED ? gated(a, right[at]) : pointwise(a);
                    b = GATED ? gated(b, right[at + 1]) : pointwise(b);
                    v[i] = pair_of(a, b);
                }
                store_transposed(to + (n - first) * 128, v[0], v[1], v[2], v[3]);
            }
            if (LORA) me.end_store(out_map, column + half * 128 + me.group * 64, row + first, last - first);
            // Whoever is here has read the part before: the next one may be written.
            pair_sync(PAIR_BARRIER);
            quantise_row(p, me, tile * (TILE_COLUMNS / 128) + half, (i64)row + first, last - first);
        }
    }
}
