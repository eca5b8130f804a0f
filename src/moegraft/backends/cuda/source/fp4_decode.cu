// gate_up + activation, or down, over 4-bit weights where experts have few rows: as the kernels
// gate_up_activation and grouped_gemm of backends/triton, whose workspace and order it keeps.
//
// Weights are the left operand of mma.sync, widened in the registers that it reads. Each thread copies
// the words that it will need itself, as deep ahead as there are stages; rows are the right operand,
// copied by all threads. A program has one tile of columns of one block of rows; its K loop is the same
// with adapters and without. Where there are few programs, their groups of warps share the K loop.
#include "fp4_decode_layout.h"
#include "fp4_decode_output.h"

// The place of 8 columns of a row within a stage: columns 8 (4 c + i) of row r, so that neither those who
// copy (r alike) nor those who read (i alike) meet a bank twice.
DEVICE u32 x_place(int r, int c, int i) {
    u32 line = ((r >> 3) * 4 + i) * 4 + ((r & 7) >> 1);
    return W_BYTES + line * 128 + ((r ^ c) & 1) * 64 + ((c ^ i) & 3) * 16;
}

// The first row of an expert's weights that a product of a warp has, and of the tile's scales. Both sides
// are one distance apart in all programs.
DEVICE int weight_row(int first, int warp, int product) {
    if (!GATED) return first + warp * 32 + product * 16;
    return (product ? UP_START : GATE_START) + (first + warp * 16) * COLUMN_STEP;
}

DEVICE int scale_row(int warp, int product) {
    if (!GATED) return warp * 32 + product * 16;
    if (COLUMN_STEP == 1) return product * COLUMNS + warp * 16;
    return (product ? UP_START : GATE_START) + warp * 32;
}

// Bytes from a thread's first row to its others, two of each product; of weights and of scales.
DEVICE int weight_bytes(int i) {
    return (weight_row(0, 0, i >> 1) - weight_row(0, 0, 0) + (i & 1) * 8 * COLUMN_STEP) * (SIZE_K / 2);
}

DEVICE int scale_bytes(int i) {
    return (scale_row(0, i >> 1) - scale_row(0, 0) + (i & 1) * 8 * COLUMN_STEP) * PITCH;
}

// Copy the scales of up to MOST rows of an expert, from row `from` on, to the tile's rows from `to` on.
template <int MOST>
DEVICE void copy_scales(u32 base, const char *scales, int from, int rows, int to, int t) {
    const char *source = scales + (i64)from * ACROSS;
    u32 target = base + SCALES_AT + to * PITCH;
#pragma unroll
    for (int turn = 0; turn < (MOST * ACROSS / 16 + THREADS - 1) / THREADS; ++turn) {
        int i = turn * THREADS + t;
        int pad = ACROSS % 16 ? 0 : i / (ACROSS / 16 ? ACROSS / 16 : 1) * (PITCH - ACROSS);
        if (i * 16 < rows * ACROSS) copy_16(target + i * 16 + pad, source + i * 16, 16);
    }
}

template <int TILES>
struct Program {
    const Arguments &p;
    u32 base, ring;
    // Of all threads; of those of its group.
    int block, first, expert, rows, thread, t, warp, lane, first_step, last_step;
    const char *w, *x[TILES];
    u32 x_bytes[TILES], x_to, x_from[4], scales_from;
    float sums[2][TILES][4];

    DEVICE Program(const Arguments &p_, u32 base_, int block_, int first_, int info)
        : p(p_), base(base_), block(block_), first(first_), expert(info >> 8), rows(info & 255),
          thread(threadIdx.x), t(PARTS == 1 ? thread : thread & (GROUP - 1)), warp(t >> 5), lane(t & 31) {
        const int part = part_of(thread);
        ring = base + part * STAGES * STAGE_BYTES;
        first_step = part * PART_STEPS, last_step = min(first_step + PART_STEPS, STEPS);
    }

    DEVICE void copy_weights(u32 stage, int step) {
        u32 bytes = SIZE_K % STEP && step * STEP + (lane & 3) * 32 >= SIZE_K ? 0 : 16;
        const char *from = w + step * (STEP / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            copy_16(ring + stage + (i * GROUP + t) * 16, from + weight_bytes(i), bytes);
    }

    DEVICE void copy_rows(u32 stage, int step) {
        bool none = SIZE_K % STEP && step * STEP + (t & 15) * 8 >= SIZE_K;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
            copy_16(x_to + stage + j * 2048, x[j] + step * (STEP * 2), none ? 0 : x_bytes[j]);
    }

    // Ask for what the first steps need: weights first, since rows wait for their numbers, or for h.
    DEVICE void begin() {
        int pairs[TILES];
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            int row = j * 8 + (t >> 4);
            pairs[j] = load_past_l1(p.row_pair + block * BLOCK_M + (row < rows ? row : 0));
        }
        int own = thread < rows ? load_past_l1(p.row_pair + block * BLOCK_M + thread) : 0;
        // A warp whose columns are not there has the first ones instead, and nobody stores them.
        bool there = first + warp * (COLUMNS / 4) < p.size_n;
        int row = weight_row(there ? first : 0, there ? warp : 0, 0) + (lane >> 2) * COLUMN_STEP;
        w = p.weight + expert * p.weight_stride_e + (i64)row * (SIZE_K / 2) + (lane & 3) * 16;
        const char *scales = p.scales + expert * p.scale_stride_e;
        int live = min(COLUMNS, p.size_n - first);
        if (GATED && COLUMN_STEP == 1) {
            copy_scales<COLUMNS>(base, scales, GATE_START + first, live, 0, thread);
            copy_scales<COLUMNS>(base, scales, UP_START + first, live, COLUMNS, thread);
        } else {
            copy_scales<TILE_ROWS>(base, scales, first * SIDES, live * SIDES, 0, thread);
        }
        x_to = ring + x_place(t >> 4, (t >> 2) & 3, t & 3);
#pragma unroll
        for (int i = 0; i < 4; ++i) x_from[i] = ring + x_place(lane >> 2, lane & 3, i);
        scales_from = base + SCALES_AT + (scale_row(warp, 0) + (lane >> 2) * COLUMN_STEP) * PITCH +
                      (lane & 3) * (32 / WIDTH);
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            x_bytes[j] = j * 8 + (t >> 4) < rows ? 16 : 0;
            x[j] = p.x + (DOWN ? pairs[j] : pairs[j] / TOP_K) * p.x_stride + (t & 15) * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][j][i] = sums[1][j][i] = 0.0f;
        }
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (first_step + s < last_step) {
                copy_weights(s * STAGE_BYTES, first_step + s);
                if (!DOWN) copy_rows(s * STAGE_BYTES, first_step + s);
            }
            if (!DOWN) copies_commit();
        }
        if (thread < rows) {
            store_shared_u32(base + PAIRS_AT + t * 4, own);
            if (DOWN) store_shared_float(base + ROW_DATA_AT + t * 4, as_float(p.topk_weights, own, WEIGHT));
        }
        if (DOWN) {
            if (thread == 0)
                while (load_acquire(p.h_counter + block) < p.h_tiles) {}
            __syncthreads();
#pragma unroll
            for (int s = 0; s < STAGES - 1; ++s)
                if (first_step + s < last_step) copy_rows(s * STAGE_BYTES, first_step + s);
            copies_commit();
            copies_wait<0>();
        }
    }

    DEVICE void multiply() {
        u32 now = 0, next = (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
        for (int step = first_step; step < last_step; ++step) {
            copies_wait<STAGES - 2>();
            // All copies of this step are there, and all have read what the next ones come over. The scales
            // are everyone's.
            if (PARTS == 1 || step == first_step)
                __syncthreads();
            else
                group_sync(1 + part_of(thread));
            if (step + STAGES - 1 < last_step) {
                copy_weights(next, step + STAGES - 1);
                copy_rows(next, step + STAGES - 1);
            }
            copies_commit();
            multiply_step(now, step);
            next = now;
            now = now == (STAGES - 1) * STAGE_BYTES ? 0 : now + STAGE_BYTES;
        }
        copies_wait<0>();
        if (PARTS > 1 && first_step >= last_step) __syncthreads();  // the first one of the others
    }

    DEVICE void multiply_step(u32 stage, int step) {
        uint4 words[4];
        u32 scales[4];
        u32 at = scales_from + step * (STEP / WIDTH);
        if (SIZE_K % STEP && step * STEP + (lane & 3) * 32 >= SIZE_K) at -= (lane & 3) * (32 / WIDTH);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = load_shared_16(ring + stage + (i * GROUP + t) * 16);
            scales[i] = widen_scales(load_scales(at + scale_bytes(i)));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 right[TILES];
#pragma unroll
            for (int j = 0; j < TILES; ++j) right[j] = load_shared_16(x_from[i] + stage + j * 2048);
#pragma unroll
            for (int product = 0; product < 2; ++product) {
                u32 upper[4], lower[4];
                widen(word_of(words[2 * product], i), scales[2 * product], i > 1, upper);
                widen(word_of(words[2 * product + 1], i), scales[2 * product + 1], i > 1, lower);
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    float(&d)[4] = sums[product][j];
                    warp_product(d, upper[0], lower[0], upper[1], lower[1], right[j].x, right[j].y);
                    warp_product(d, upper[2], lower[2], upper[3], lower[3], right[j].z, right[j].w);
                }
            }
        }
    }

    static DEVICE u32 word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

    static DEVICE int part_of(int thread) { return PARTS == 1 ? 0 : thread / GROUP; }

    // Sums to shared memory, [parts, rows of x, rows of the tile]; the first side's 64 rows first.
    DEVICE void put_sums() {
        u32 to = base + part_of(thread) * SUM_BYTES;
#pragma unroll
        for (int product = 0; product < 2; ++product)
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int local = (lane >> 2) + (i >> 1) * 8, row = j * 8 + (lane & 3) * 2 + (i & 1);
                    int column = GATED ? product * COLUMNS + warp * 16 + local : warp * 32 + product * 16 + local;
                    store_shared_float(to + row * SUM_PITCH + column * 4, sums[product][j][i]);
                }
    }

    DEVICE void run() {
        begin();
        int slot = -1;
        if (LORA && thread < rows) slot = p.slots[(int)load_shared_u32(base + PAIRS_AT + t * 4) / TOP_K];
        multiply();
        if (LORA && thread < rows) wait_for_delta(p, base, t, slot);
        __syncthreads();
        put_sums();
        __syncthreads();
        put_rows(p, base, expert, first, rows, thread);
        if (!DOWN) {
            __syncthreads();
            if (thread == 0) signal(p.h_counter + block);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
    fp4_decode(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(16) char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory);
    if (!DOWN && !LORA) launch_wait();
    launch_next();
    int block = blockIdx.x / p.num_tiles, first = blockIdx.x % p.num_tiles * COLUMNS;
    int info = load_past_l1(p.block_info + block), rows = info & 255;
    if (rows > 32 && BLOCK_M > 32)
        Program<BLOCK_M / 8 < 8 ? 1 : 8>(p, base, block, first, info).run();
    else if (rows > 16 && BLOCK_M > 16)
        Program<BLOCK_M / 8 < 4 ? 1 : 4>(p, base, block, first, info).run();
    else if (rows > 8 && BLOCK_M > 8)
        Program<BLOCK_M / 8 < 2 ? 1 : 2>(p, base, block, first, info).run();
    else if (rows > 0)
        Program<1>(p, base, block, first, info).run();
    // The last program ends after all launches before this one, so that the launch does.
    if (blockIdx.x == gridDim.x - 1) launch_wait();
}
