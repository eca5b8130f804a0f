// From sums to rows of the output: scales of whole matrices, biases, deltas, the activation.
#pragma once
#include "fp4_decode_layout.h"

DEVICE float pointwise(float x) {
    if (KIND == 0) return __fdividef(x, 1.0f + __expf(-ALPHA * x));
    if (KIND == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (KIND == 2) {
        float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return __fdividef(x, 1.0f + __expf(-2.0f * inner));
    }
    float positive = x < 0.0f ? 0.0f : x;
    return KIND == 3 ? positive : positive * positive;
}

// NaN stays NaN.
DEVICE float activated(float gate, float up) {
    if (!GATED) return pointwise(up);
    if (HAS_LIMIT) {
        gate = gate > LIMIT ? LIMIT : gate;
        up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
    }
    return pointwise(gate) * (up + UP_SHIFT);
}

// Wait until all parts of a row's deltas are there, and leave which sides have one: bit 0 the first.
DEVICE void wait_for_delta(const Arguments &p, u32 base, int row, int slot) {
    u32 has = 0;
    if (slot >= 0) {
        int pair = load_shared_u32(base + PAIRS_AT + row * 4);
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            int state;
            do {
                state = load_acquire(p.states + side * p.num_pairs + pair);
            } while ((state & 255) < p.splits);
            if (state >= 256) has |= 1u << side;
        }
    }
    store_shared_u32(base + ROW_DATA_AT + row * 4, has);
}

// The sum of all parts.
DEVICE void load_sums(u32 at, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        float4 a = load_shared_float4(at + part * SUM_BYTES), b = load_shared_float4(at + part * SUM_BYTES + 16);
        v[0] += a.x, v[1] += a.y, v[2] += a.z, v[3] += a.w;
        v[4] += b.x, v[5] += b.y, v[6] += b.z, v[7] += b.w;
    }
}

DEVICE void add_delta(float (&v)[8], const char *delta, i64 at) {
    if (DELTA == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 d = load_past_l1_16(delta + (at + half * 4) * 4);
            v[half * 4] += __uint_as_float(d.x), v[half * 4 + 1] += __uint_as_float(d.y);
            v[half * 4 + 2] += __uint_as_float(d.z), v[half * 4 + 3] += __uint_as_float(d.w);
        }
    } else {
        uint4 d = load_past_l1_16(delta + at * 2);
        const u32 pairs[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] += __uint_as_float(pairs[i] << 16);
            v[2 * i + 1] += __uint_as_float(pairs[i] & 0xFFFF0000);
        }
    }
}

// The sums of 8 columns of one side, scaled, with bias; `side` 0 is gate where there is one.
DEVICE void finish(const Arguments &p, float (&v)[8], float factor, int expert, int side, int column) {
    int start = !GATED ? 0 : side ? UP_START : GATE_START;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        v[i] *= factor;
        if (BIAS)
            v[i] += as_float(p.bias, (i64)expert * p.bias_stride + start + (column + i) * COLUMN_STEP, BIAS);
    }
}

DEVICE float factor_of(const Arguments &p, int expert, int index) {
    return NV ? LEFT_OUT * p.globals[(i64)expert * p.global_stride + index] : LEFT_OUT;
}

DEVICE void put_rows(const Arguments &p, u32 base, int expert, int first, int rows, int t) {
    const float factor = factor_of(p, expert, GATED ? GATE_GLOBAL : UP_GLOBAL);
    const float up_factor = GATED ? factor_of(p, expert, UP_GLOBAL) : factor;
    for (int item = t; item < rows * (COLUMNS / 8); item += THREADS) {
        int row = item / (COLUMNS / 8), at = item % (COLUMNS / 8) * 8, column = first + at;
        if (column >= p.size_n) continue;
        i64 pair = (int)load_shared_u32(base + PAIRS_AT + row * 4);
        u32 data = DOWN || LORA ? load_shared_u32(base + ROW_DATA_AT + row * 4) : 0;
        float v[8], up[8];
        load_sums(base + row * SUM_PITCH + at * 4, v);
        finish(p, v, factor, expert, 0, column);
        if (LORA && data & 1) add_delta(v, p.delta, pair * SIDES * p.size_n + column);
        if (GATED) {
            load_sums(base + row * SUM_PITCH + (COLUMNS + at) * 4, up);
            finish(p, up, up_factor, expert, 1, column);
            if (LORA && data & 2) add_delta(up, p.delta, (pair * SIDES + 1) * p.size_n + column);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = DOWN ? v[i] * __uint_as_float(data) : GATED ? activated(v[i], up[i]) : pointwise(v[i]);
        char *out = p.out + pair * p.out_stride + column * 2;
        u32 a = pair_of(v[0], v[1]), b = pair_of(v[2], v[3]), c = pair_of(v[4], v[5]), d = pair_of(v[6], v[7]);
        if (DOWN) {
            store_16(out, a, b, c, d);
        } else {
            if (p.h) store_16(p.h + (pair * p.size_n + column) * 2, a, b, c, d);
            store_16(out, bytes_of(a, c, 0x5410), bytes_of(a, c, 0x7632), bytes_of(b, d, 0x5410), bytes_of(b, d, 0x7632));
        }
    }
}
