// S = scale * A x for all rows of all blocks, of gate and up at once or of down: see block_groups.py.
//
// A block's rows are sorted by segment. Up to 64 rows of one segment and up to four groups of 16 rank
// rows are a part: so nothing is multiplied that is not wanted. Two parts at a time are a turn, one
// for each of two warp groups that multiply; two others load, rows by their tokens and A by its
// groups, and run ahead into later turns. Programs are persistent, one block after the other.
//
// Macros: BLOCK_M, STAGES, GATHER (x by token, else by row), SIDES (2: gate and up), TOP_K.
#include "hopper.h"
#include "product.h"

struct Arguments {
    const char *x;           // [T, K] by token, or [blocks * BLOCK_M, K]; rows on 16 bytes
    char *s;                 // [blocks * BLOCK_M, SIDES * rank rows] out
    const u16 *arena;
    const int *row_pair;     // [blocks * BLOCK_M]
    const int *block_info;   // [blocks] expert * 256 + rows
    const int *live_blocks;  // [1]
    const int *row_segment;  // [blocks * BLOCK_M]
    const int *group_count;  // [blocks]
    const i64 *a_groups;     // [SIDES, blocks, max_groups, 4]
    const i64 *b_groups;     // the same
    int *ready;              // [blocks] S_PARTS are added when a block is written, if it has groups
    i64 x_stride;            // bytes
    i64 s_stride;            // bytes
    i64 group_stride;        // words between two sides
    int side_bytes;          // of S, between two sides
    int max_groups;
    int size_k;
};

constexpr int PART_ROWS = 64, SLOTS = 4, PART_BYTES = 64 * 128;
// Rows of two parts, and the rank rows of both.
constexpr int STAGE_BYTES = 4 * PART_BYTES;
// Of a block: where each row of x is, its segment; of a segment: its rows, its groups.
constexpr int TOKENS_AT = STAGES * STAGE_BYTES, SEGMENTS_AT = TOKENS_AT + BLOCK_M * 4;
constexpr int ROWS_AT = SEGMENTS_AT + BLOCK_M * 4, GROUPS_AT = ROWS_AT + BLOCK_M * 8;
// What those who multiply need to know of a turn: 0, 1 for the last of its block, 2 behind all; which
// block; and for each part first row, rows, slots, and of each slot scale, live ranks and bytes from the start of a row.
constexpr int RECORDS = 4, RECORD_BYTES = 128, RECORDS_AT = GROUPS_AT + BLOCK_M * 8;
constexpr int BARRIERS_AT = RECORDS_AT + RECORDS * RECORD_BYTES;
constexpr int LOADERS = 256, TURN_GROUPS = SLOTS / SIDES;

struct Stage : Ring<STAGES> {
    using Ring::Ring;
    DEVICE u32 full() const { return base + BARRIERS_AT + 8 * index; }
    DEVICE u32 empty() const { return base + BARRIERS_AT + 8 * (STAGES + index); }
    DEVICE u32 rows(int part) const { return base + index * STAGE_BYTES + part * PART_BYTES; }
    DEVICE u32 ranks(int part) const { return rows(part) + 2 * PART_BYTES; }
};

DEVICE u32 record_at(u32 base, u32 turn) {
    return base + RECORDS_AT + turn % RECORDS * RECORD_BYTES;
}
DEVICE u32 part_at(u32 record, int part) { return record + 8 + part * 60; }

struct Part {
    int first = 0, rows = 0, group = 0, groups = 0;
};

// The parts of a block, segment by segment.
struct Parts {
    u32 base;
    int segments, segment = 0, row = 0, group = 0;

    DEVICE Part next() {
        Part found;
        for (; segment < segments; ++segment, row = group = 0) {
            int first = load_shared_u32(base + ROWS_AT + segment * 8);
            int rows = load_shared_u32(base + ROWS_AT + segment * 8 + 4) - first;
            int g0 = load_shared_u32(base + GROUPS_AT + segment * 8);
            int groups = load_shared_u32(base + GROUPS_AT + segment * 8 + 4) - g0;
            if (row >= rows || group >= groups) continue;
            found.first = first + row;
            found.rows = min(PART_ROWS, rows - row);
            found.group = g0 + group;
            found.groups = min(TURN_GROUPS, groups - group);
            group += TURN_GROUPS;
            if (group >= groups) {
                group = 0;
                row += PART_ROWS;
            }
            return found;
        }
        return found;
    }
};

// ---- loading ----

DEVICE void load_all(const Arguments &p, u32 base, int t) {
    const int half = t >> 7, chunk = t & 7, row = t >> 3 & 15;
    const u32 to = row * 128 + ((chunk ^ (row & 7)) << 4), units = (u32)(p.x_stride >> 4);
    const int blocks = *p.live_blocks;
    const u64 keep = keep_policy(), pass = pass_policy();
    Stage stage{base};
    u32 turn = 0;
    int block = blockIdx.x, info = 0, count = 0, segment = -1, pair = 0;
    auto ask = [&](int next) {  // of a block, ahead of time
        if (next >= blocks) return;
        info = load_global(p.block_info + next);
        count = load_global(p.group_count + next);
        if (t < BLOCK_M) segment = load_global(p.row_segment + (i64)next * BLOCK_M + t);
        if (GATHER && t < BLOCK_M) pair = load_global(p.row_pair + (i64)next * BLOCK_M + t);
    };
    ask(block);
    for (; block < blocks; block += gridDim.x) {
        const int rows = info & 255, groups = count;
        const i64 first = (i64)block * BLOCK_M, words = (i64)block * p.max_groups * 4;
        loaders_sync(3, LOADERS);  // the last block's parts are no longer needed
        if (t < BLOCK_M) {
            u32 x_row = GATHER ? (t < rows ? (u32)pair / TOP_K : 0) : (u32)first + t;
            store_shared_u32(base + TOKENS_AT + t * 4, x_row * units);
            store_shared_u32(base + SEGMENTS_AT + t * 4, t < rows ? segment : -1);
            store_shared_u64(base + GROUPS_AT + t * 8, 0);
        }
        loaders_sync(3, LOADERS);
        if (t < rows && segment >= 0) {
            u32 at = base + SEGMENTS_AT + t * 4;
            if (t == 0 || (int)load_shared_u32(at - 4) != segment)
                store_shared_u32(base + ROWS_AT + segment * 8, t);
            if (t == rows - 1 || (int)load_shared_u32(at + 4) != segment)
                store_shared_u32(base + ROWS_AT + segment * 8 + 4, t + 1);
        }
        for (int g = t; g < groups; g += LOADERS) {
            const i64 *place = p.b_groups + words + g * 4 + 3;
            int own = (int)place[0];
            if (g == 0 || (int)place[-4] != own) store_shared_u32(base + GROUPS_AT + own * 8, g);
            if (g == groups - 1 || (int)place[4] != own)
                store_shared_u32(base + GROUPS_AT + own * 8 + 4, g + 1);
        }
        loaders_sync(3, LOADERS);
        ask(block + gridDim.x);
        Parts parts{base, (int)load_shared_u32(base + SEGMENTS_AT + (rows - 1) * 4) + 1};
        Part one;
        if (groups) one = parts.next();
        while (one.groups) {
            const Part two = parts.next(), following = parts.next();
            const Part mine = half ? two : one;
            one = following;
            const int slots = SIDES * mine.groups;
            const u32 record = record_at(base, turn++), part = part_at(record, half);
            const char *ranks[SLOTS];
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) {
                ranks[i] = p.x;
                if (i >= slots) continue;
                int side = i / mine.groups, group = mine.group + i % mine.groups;
                i64 at = side * p.group_stride + words + group * 4;
                int live = (int)p.a_groups[at + 2];
                // Rank rows that are not there are the first again: they are not written.
                ranks[i] = (const char *)(p.arena + p.a_groups[at] +
                                          (row < live ? row : 0) * p.a_groups[at + 1] + chunk * 8);
                if ((t & 127) == i) {
                    int r0 = (int)(p.b_groups[at + 3] >> 32);
                    store_shared_u32(part + 12 + i * 12, (u32)p.a_groups[at + 3]);
                    store_shared_u32(part + 16 + i * 12, live);
                    store_shared_u32(part + 20 + i * 12, side * p.side_bytes + r0 * 2);
                }
            }
            if ((t & 127) == 0) {
                store_shared_u32(part, mine.first);
                store_shared_u32(part + 4, mine.rows);
                store_shared_u32(part + 8, slots);
            }
            if (t == 0) {
                store_shared_u32(record, !following.groups);
                store_shared_u32(record + 4, block);
            }
            const char *x[PART_ROWS / 16];
#pragma unroll
            for (int i = 0; i < PART_ROWS / 16; ++i) {
                int r = mine.first + i * 16 + row;
                u32 unit = load_shared_u32(base + TOKENS_AT + min(r, BLOCK_M - 1) * 4);
                x[i] = p.x + (u64)unit * 16 + chunk * 16;
            }
            loaders_sync(3, LOADERS);  // the record is there before its first stage
            for (int k = 0; k < p.size_k; k += 64) {
                barrier_wait(stage.empty(), stage.parity ^ 1);
                if (t == 0) barrier_arrive(stage.full());
                u32 x_to = stage.rows(half) + to, a_to = stage.ranks(half) + to;
#pragma unroll
                for (int i = 0; i < SLOTS; ++i)
                    if (i < slots) copy_16_hinted(a_to + i * 2048, ranks[i] + k * 2, pass);
#pragma unroll
                for (int i = 0; i < PART_ROWS / 16; ++i)
                    if (i * 16 + row < mine.rows) copy_16_hinted(x_to + i * 2048, x[i] + k * 2, keep);
                copies_arrive(stage.full());
                stage.next();
            }
        }
    }
    if (t == 0) store_shared_u32(record_at(base, turn), 2);
    loaders_sync(3, LOADERS);
    barrier_wait(stage.empty(), stage.parity ^ 1);
    if (t == 0) barrier_arrive(stage.full());
    copies_arrive(stage.full());
}

// ---- multiplying ----

// Rows are the left operand here, N rank rows the right one.
template <int N>
DEVICE void run_part(const Arguments &p, Stage &stage, u32 part, int group, int t, int block) {
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
    const int first = load_shared_u32(part), rows = load_shared_u32(part + 4);
    float scale[N / 16];
    int live[N / 16], to[N / 16];
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
        scale[i] = __int_as_float(load_shared_u32(part + 12 + i * 12));
        live[i] = load_shared_u32(part + 16 + i * 12);
        to[i] = load_shared_u32(part + 20 + i * 12);
    }
    for (int k = 0; k < p.size_k; k += 64) {
        barrier_wait(stage.full(), stage.parity);
        proxy_fence();
        u64 x = tile_at(stage.rows(group)), a = tile_at(stage.ranks(group));
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) Product<N, 0>::run(d, x + 2 * i, a + 2 * i);
        products_commit();
        products_wait<0>();
        if (t == 0) barrier_arrive(stage.empty());
        stage.next();
    }
    settle(d);
    const int own = (t >> 5) * 16 + (t >> 2 & 7);
    char *s = p.s + ((i64)block * BLOCK_M + first + own) * p.s_stride;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        int slot = j / 2, rank = (j & 1) * 8 + 2 * (t & 3);
        float low = rank < live[slot] ? scale[slot] : 0.0f;
        float high = rank + 1 < live[slot] ? scale[slot] : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 0 also for what is not finite
            float a = low == 0.0f ? 0.0f : d[4 * j + 2 * i] * low;
            float b = high == 0.0f ? 0.0f : d[4 * j + 2 * i + 1] * high;
            if (own + 8 * i < rows) *(u32 *)(s + 8 * i * p.s_stride + to[slot] + rank * 2) = pair_of(a, b);
        }
    }
}

DEVICE void multiply_all(const Arguments &p, u32 base, int group, int t) {
    Stage stage{base};
    for (u32 turn = 0;; ++turn) {
        barrier_wait(stage.full(), stage.parity);
        u32 record = record_at(base, turn), part = part_at(record, group);
        const u32 kind = load_shared_u32(record);
        if (kind == 2) return;
        int block = load_shared_u32(record + 4);
        switch (__shfl_sync(0xFFFFFFFF, load_shared_u32(part + 8), 0)) {
            case 1: run_part<16>(p, stage, part, group, t, block); break;
            case 2: run_part<32>(p, stage, part, group, t, block); break;
            case 3: run_part<48>(p, stage, part, group, t, block); break;
            case 4: run_part<64>(p, stage, part, group, t, block); break;
            default:  // the block's parts are odd in number
                for (int k = 0; k < p.size_k; k += 64) {
                    barrier_wait(stage.full(), stage.parity);
                    group_sync(1 + group);  // a parity tells no more than two rounds apart
                    if (t == 0) barrier_arrive(stage.empty());
                    stage.next();
                }
        }
        if (kind == 1) {
            group_sync(1 + group);
            if (t == 0) add_release(p.ready + block, 1);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    group_shrink(const __grid_constant__ Arguments p) {
    extern __shared__ char memory[];
    u32 base = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    int group = __shfl_sync(0xFFFFFFFF, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
        init_stages<STAGES>(Stage(base), LOADERS + 1);
        proxy_fence();
    }
    __syncthreads();
    launch_wait();
    launch_next();  // a GEMM, that waits for each block of S
    if (group < 2)
        multiply_all(p, base, group, threadIdx.x & 127);
    else
        load_all(p, base, threadIdx.x - 256);
}
