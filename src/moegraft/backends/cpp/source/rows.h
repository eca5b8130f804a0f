// The rows of a layer's call in the order they are worked on, and the tasks that threads take.
//
// Pairs (token, expert) are sorted by expert, then by slot. A task is a block of columns of one
// expert, for all of its rows.
#pragma once

#include "segments.h"

constexpr int64_t WEIGHT_BLOCK_BYTES = 256 * 1024;  // of a task: a part of a core's own cache
constexpr int64_t MAX_PAIRS = 8192;                 // at once: bounds the rows of h and y
constexpr int64_t MAX_BLOCK = 128;                  // columns of a task
constexpr int64_t PIECE_ROWS = 48;                  // that meet weights while they are fetched
constexpr int64_t SERIAL_WORK = 96 * 1024;          // bytes; less is not worth another thread
constexpr int64_t FINAL_COLUMNS = 1024;             // of a task
constexpr int64_t KEPT_BYTES = 128 << 20;           // of work memory, between calls

INLINE int64_t down_projection(const LayerArguments& a) { return a.order == NO_GATE ? 1 : 2; }

struct Task {
    int64_t expert, first, columns;
};

// The rows of a call; see the top of segments.h.
struct Rows {
    std::vector<int32_t> pair, row_of_pair, segment_of;
    std::vector<int64_t> first;  // [E + 1]
    std::vector<Segment> segments, pieces;
    std::vector<Task> up, down;
    int64_t max_rank, touched;

    int64_t count() const { return int64_t(pair.size()); }
    void sort(const LayerArguments& a);
    void cut(const LayerArguments& a);
};

inline void Rows::sort(const LayerArguments& a) {
    int64_t pairs = a.num_tokens * a.top_k;
    auto expert_of = [&](int64_t p) {
        int64_t id = a.wide_ids ? static_cast<const int64_t*>(a.topk_ids)[p]
                                : static_cast<const int32_t*>(a.topk_ids)[p];
        id -= a.expert_offset;
        return id >= 0 && id < a.num_experts ? id : int64_t(-1);
    };
    first.assign(a.num_experts + 1, 0);
    for (int64_t p = 0; p < pairs; p++)
        if (int64_t e = expert_of(p); e >= 0) first[e + 1]++;
    touched = 0;
    for (int64_t e = 0; e < a.num_experts; e++) {
        touched += first[e + 1] > 0;
        first[e + 1] += first[e];
    }
    pair.resize(first[a.num_experts]);
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t p = 0; p < pairs; p++)
        if (int64_t e = expert_of(p); e >= 0) pair[next[e]++] = int32_t(p);
    auto slot_of = [&](int32_t p) {
        return a.slots ? std::max(a.slots[p / a.top_k], int32_t(-1)) : -1;
    };
    segments.clear();
    segment_of.resize(pair.size());
    for (int64_t e = 0; e < a.num_experts; e++) {
        if (a.slots)
            std::stable_sort(
                pair.begin() + first[e], pair.begin() + first[e + 1],
                [&](int32_t p, int32_t q) { return slot_of(p) < slot_of(q); });
        for (int64_t n = first[e]; n < first[e + 1]; n++) {
            int64_t slot = slot_of(pair[n]);
            if (n == first[e] || segments.back().slot != slot)
                segments.push_back({n, n, e, slot});
            segments.back().end = n + 1;
            segment_of[n] = int32_t(segments.size()) - 1;
        }
    }
    row_of_pair.assign(pairs, -1);
    for (int64_t n = 0; n < count(); n++) row_of_pair[pair[n]] = int32_t(n);
}

// Columns of a task: what fits a core's cache if rows come back to it, more if they all fit one
// piece, fewer if threads would have nothing to do.
inline int64_t block_columns(
    int64_t rows, int64_t bytes, int64_t columns, int64_t touched, int64_t threads) {
    int64_t fit = rows <= PIECE_ROWS ? MAX_BLOCK : WEIGHT_BLOCK_BYTES / bytes / 32 * 32;
    int64_t share = columns * touched / (8 * threads) / 32 * 32;
    return std::clamp(std::min(fit, share), int64_t(32), MAX_BLOCK);
}

inline void Rows::cut(const LayerArguments& a) {
    pieces.clear();
    up.clear();
    down.clear();
    max_rank = 0;
    int64_t projections = a.order == NO_GATE ? 2 : 3;
    for (const Segment& s : segments) {
        int64_t rank = 0;
        for (int64_t i = 0; i < projections; i++)
            rank = std::max(rank, factors_of(a.table, i, s.slot, s.expert).rank);
        max_rank = std::max(max_rank, rank);
        for (int64_t n = s.begin; rank && n < s.end; n += PIECE_ROWS)
            pieces.push_back({n, std::min(n + PIECE_ROWS, s.end), s.expert, s.slot});
    }
    auto blocks = [&](std::vector<Task>& tasks, int64_t columns, int64_t bytes) {
        for (int64_t e = 0; e < a.num_experts; e++) {
            int64_t rows = first[e + 1] - first[e];
            if (!rows) continue;
            int64_t width = block_columns(rows, bytes, columns, touched, a.threads);
            for (int64_t c = 0; c < columns; c += width)
                tasks.push_back({e, c, std::min(width, columns - c)});
        }
    };
    int64_t size = size_of(a.gate_up.dtype), sides = a.order == NO_GATE ? 1 : 2;
    blocks(up, a.intermediate, a.hidden * size * sides);
    blocks(down, a.hidden, a.intermediate * size);
}
