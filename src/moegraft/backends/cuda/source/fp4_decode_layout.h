// What fp4_decode is given, and how its shared memory is laid out; see fp4_decode.cu.
#pragma once
#include "fp4_bits.h"

struct Arguments {
    const char *x;             // [T, K] by token or [P, K] by pair, columns in the order of `widen`
    const char *weight;        // [E, rows, K / 2]
    const char *scales;        // [E, rows, K / WIDTH]
    const float *globals;      // [E, parts]; only with NV
    const void *bias;          // [E, rows]; only with BIAS
    const void *topk_weights;  // [P]; only DOWN
    const int *row_pair;       // [blocks * BLOCK_M]
    const int *block_info;     // [blocks] expert * 256 + rows
    const int *slots;          // [T]; this and the next two only with LORA
    const int *states;         // [SIDES, P]
    const char *delta;         // [P, SIDES, N]
    int *h_counter;            // [blocks]
    char *h;                   // [P, N], or null
    char *out;                 // [P, N]: y; or h in the order of `widen`
    i64 x_stride, weight_stride_e, scale_stride_e, out_stride;  // bytes
    int global_stride, bias_stride, size_n, num_tiles, num_pairs;
    int h_tiles;               // DOWN: what a block's counter reaches when its rows of x are there
    int splits;                // LORA: parts of a pair's delta
};

// A program has 128 rows of the weights, a warp 32 of them; a step has 128 columns. A thread copies,
// and reads, what its registers hold of them: 32 columns of 4 rows. PARTS groups of four warps have as
// many steps each, and stages of their own.
constexpr int GROUP = 128, THREADS = PARTS * GROUP, TILE_ROWS = 128, STEP = 128;
constexpr int STEPS = (SIZE_K + STEP - 1) / STEP, PART_STEPS = (STEPS + PARTS - 1) / PARTS;
constexpr int SIDES = GATED ? 2 : 1, COLUMNS = TILE_ROWS / SIDES;
constexpr int W_BYTES = TILE_ROWS * STEP / 2, X_BYTES = BLOCK_M * STEP * 2;
constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
// All scales of the rows: K / WIDTH bytes each, 16 bytes more where they would meet the same banks.
constexpr int ACROSS = SIZE_K / WIDTH, PITCH = ACROSS % 16 ? ACROSS : (ACROSS / 16 | 1) * 16;
constexpr int SCALES_AT = PARTS * STAGES * STAGE_BYTES, PAIRS_AT = SCALES_AT + TILE_ROWS * PITCH;
constexpr int ROW_DATA_AT = PAIRS_AT + BLOCK_M * 4, SHARED_END = ROW_DATA_AT + BLOCK_M * 4;
// Sums on their way to rows of the output, where the stages were.
constexpr int SUM_PITCH = TILE_ROWS * 4 + 16, SUM_BYTES = BLOCK_M * SUM_PITCH;
static_assert(SIZE_K % 32 == 0, "rows of the weights in whole 16 bytes");
static_assert(PARTS * SUM_BYTES <= SCALES_AT, "sums take the stages' place");
static_assert(BLOCK_M % 8 == 0 && BLOCK_M <= GROUP, "a thread per row");
static_assert(PAIRS_AT % 16 == 0, "aligned");
static_assert(COLUMN_STEP == 1 || (GATED && COLUMN_STEP == 2), "rows of a side: together, or every other");

// Numbers of dtypes, as in moe_gemm_layout.h.
DEVICE float as_float(const void *values, i64 i, int type) {
    if (type == 1) return ((const float *)values)[i];
    u16 half = ((const u16 *)values)[i];
    if (type == 2) return __uint_as_float((u32)half << 16);
    return float_of_half(half);
}
