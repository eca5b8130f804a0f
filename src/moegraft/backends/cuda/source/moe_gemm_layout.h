// What moe_gemm is given, and how its shared memory is laid out; see moe_gemm.cu.
#pragma once
#include "hopper.h"

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
    const int *s_ready;      // [blocks] S_PARTS when the shrink beside this launch has written a block
    int *ticket;             // [1] items that programs have taken, 0 at the launch
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
#if FP8
    const float *x_scales;   // of x [T, K / 128]; of h [K / 128, blocks * BLOCK_M]
    const float *weight_scales;  // [E, rows of an expert / 128, K / 128]
    char *h_values;          // of gate_up: [blocks * BLOCK_M, I] e4m3, and [I / 128, blocks * BLOCK_M]
    float *h_scales;
    i64 scale_rows;          // blocks * BLOCK_M
#endif
};

// Columns of a step of the K loop, and bytes of a value: a step has rows of 128 bytes.
constexpr int STEP = FP8 ? 128 : 64, WIDTH = 128 / STEP;
constexpr int W_BYTES = 256 * 128, X_BYTES = BLOCK_M * 128, STAGE_BYTES = W_BYTES + X_BYTES;
// Half of a block's rows at a time are on their way out; of FP8 32, so that four stages fit.
constexpr int PART_BYTES = (FP8 ? 32 : (BLOCK_M / 16 + 1) / 2 * 16) * 128, OUT_BYTES = 2 * PART_BYTES;
// Routing weights of the last few blocks: those who load are never further ahead.
constexpr int SCALES = FP8 ? STAGES + 1 : 4;
constexpr int OUT_AT = STAGES * STAGE_BYTES, SCALES_AT = OUT_AT + 2 * OUT_BYTES;
constexpr int MARKS_AT = SCALES_AT + SCALES * BLOCK_M * 4;
// What an item needs to know of its block, copied one item ahead: pairs, segments, a few groups.
constexpr int META_GROUPS = 8, SEGMENTS_AT = BLOCK_M * 4, WORDS_AT = 2 * BLOCK_M * 4;
constexpr int META_BYTES = WORDS_AT + 2 * META_GROUPS * 32;
constexpr int META_AT = MARKS_AT + 2 * BLOCK_M * 4;
// Of the last few items, for those who multiply: item, -1 behind the last one; expert and rows; groups;
// and, known from the last step but one on, the program's next item.
constexpr int RECORDS = SCALES, RECORDS_AT = META_AT + 2 * META_BYTES;
constexpr int BARRIERS_AT = RECORDS_AT + RECORDS * 16;
// Scales of the rows of each stage.
constexpr int ROW_SCALES_AT = BARRIERS_AT + 16 * STAGES + 16;
constexpr int SIDES = GATED ? 2 : 1;
constexpr int TILE_COLUMNS = GATED ? 128 : 256;
// Groups of 16 rank rows in one stage.
constexpr int STAGE_GROUPS = 4 / SIDES;
constexpr int LOADERS = 128;
// A program starts with 168 registers per thread, and has no more to hand out: asking for more would
// wait for ever. FP8 has a product beside its sums.
constexpr int LOAD_REGISTERS = !FP8 ? 56 : LORA && BIAS ? 24 : 40;
constexpr int MULTIPLY_REGISTERS = (3 * 168 - LOAD_REGISTERS) / 2;
static_assert(MULTIPLY_REGISTERS % 8 == 0, "registers are handed out by eight");

DEVICE float as_float(const void *values, i64 i, int type) {
    if (type == 1) return ((const float *)values)[i];
    u16 half = ((const u16 *)values)[i];
    if (type == 2) return __uint_as_float((u32)half << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

struct Stage : Ring<STAGES> {
    using Ring::Ring;
    DEVICE u32 full() const { return base + BARRIERS_AT + 8 * index; }
    DEVICE u32 empty() const { return base + BARRIERS_AT + 8 * (STAGES + index); }
    DEVICE u32 weights() const { return base + index * STAGE_BYTES; }
    DEVICE u32 rows() const { return weights() + W_BYTES; }
    DEVICE u32 row_scales() const { return base + ROW_SCALES_AT + index * BLOCK_M * 4; }
};
