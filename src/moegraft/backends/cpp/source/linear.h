// LoRA of a dense linear in one call: out[t] += scale * B[slot_t] (A[slot_t] x[t]).
#pragma once

#include "layer.h"

constexpr int64_t LINEAR_BLOCK = 512;  // columns of a task

template <class X>
struct Linear {
    const LinearArguments& a;
    const std::vector<int32_t>& tokens;  // sorted by slot
    const X* x;
    int64_t x_stride;
    float* ranks;
    int64_t max_rank;

    void shrink(const Segment& s) const {
        Factors f = factors_of(a.table, 0, s.slot, 0);
        for (int64_t n = s.begin, m; n < s.end; n += m) {
            m = tile_rows(s.end - n);
            const X* rows[TILE];
            for (int64_t j = 0; j < m; j++) rows[j] = x + tokens[n + j] * x_stride;
            float* out = ranks + n * max_rank;
            rows_by_columns(
                rows, m, f.a, a.table.dtype, f.a_stride, f.rank, a.in_features, out, max_rank,
                n == s.begin ? f.a : nullptr);
            for (int64_t j = 0; j < m; j++)
                for (int64_t r = 0; r < f.rank; r++) out[j * max_rank + r] *= f.scale;
        }
    }

    void expand_block(const Segment& s, int64_t first, int64_t columns) const {
        alignas(64) float tile[TILE * LINEAR_BLOCK];
        Factors f = factors_of(a.table, 0, s.slot, 0);
        int64_t size = size_of(a.out_dtype);
        for (int64_t n = s.begin, m; n < s.end; n += m) {
            m = tile_rows(s.end - n);
            char* rows[TILE];
            for (int64_t j = 0; j < m; j++) {
                rows[j] = a.out + (tokens[n + j] * a.out_stride + first) * size;
                convert(rows[j], a.out_dtype, tile + j * LINEAR_BLOCK, columns);
            }
            expand(
                ranks + n * max_rank, max_rank, m, f, a.table.dtype, first, columns, tile,
                LINEAR_BLOCK);
            for (int64_t j = 0; j < m; j++)
                round_to(tile + j * LINEAR_BLOCK, rows[j], a.out_dtype, columns);
        }
    }
};

template <class X>
inline void run_linear(
    const Linear<X>& linear, const std::vector<Segment>& pieces, int64_t threads) {
    int64_t out = linear.a.out_features, blocks = (out + LINEAR_BLOCK - 1) / LINEAR_BLOCK;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < pieces.size(); i++) linear.shrink(pieces[i]);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < pieces.size() * blocks; i++) {
            int64_t first = int64_t(i) % blocks * LINEAR_BLOCK;
            linear.expand_block(pieces[i / blocks], first, std::min(LINEAR_BLOCK, out - first));
        }
    }
}

inline void run_linear_lora(const LinearArguments& a) {
    static thread_local Scratch scratch(KEPT_BYTES);
    static thread_local std::vector<int32_t> tokens;
    static thread_local std::vector<Segment> pieces;
    tokens.clear();
    pieces.clear();
    for (int64_t t = 0; t < a.num_tokens; t++)
        if (factors_of(a.table, 0, a.slots[t], 0).rank) tokens.push_back(int32_t(t));
    if (tokens.empty()) return;
    std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t s, int32_t t) {
        return a.slots[s] < a.slots[t];
    });
    int64_t n = int64_t(tokens.size()), max_rank = 0, bytes = 0, size = size_of(a.table.dtype);
    int64_t widths = a.in_features + a.out_features;
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = a.slots[tokens[i]];
        bool more = pieces.empty() || pieces.back().slot != slot ||
                    i - pieces.back().begin >= PIECE_ROWS;
        if (more) {
            int64_t rank = factors_of(a.table, 0, slot, 0).rank;
            max_rank = std::max(max_rank, rank);
            bytes += rank * widths * size;
            pieces.push_back({i, i, 0, slot});
        }
        pieces.back().end = i + 1;
    }
    bool native = HAS_BF16 && a.x_dtype == BF16 && a.table.dtype == BF16;
    bool widened = !native && a.x_dtype != F32;
    int64_t ranks_bytes = round_up(n * max_rank * 4, 64);
    char* memory = scratch.at_least(
        ranks_bytes + (widened ? a.num_tokens * a.in_features * 4 : 0) + 64);
    float* ranks = reinterpret_cast<float*>(memory);
    int64_t threads = useful_threads(bytes, n * max_rank * widths, a.threads);
    if (native) {
        const bf16* x = reinterpret_cast<const bf16*>(a.x);
        run_linear(Linear<bf16>{a, tokens, x, a.x_stride, ranks, max_rank}, pieces, threads);
    } else {
        const float* x = reinterpret_cast<const float*>(a.x);
        int64_t stride = a.x_stride;
        if (widened) {
            float* wide = reinterpret_cast<float*>(memory + ranks_bytes);
            stride = a.in_features;
            for (int32_t t : tokens)
                convert(a.x + t * a.x_stride * 2, a.x_dtype, wide + t * stride, stride);
            x = wide;
        }
        run_linear(Linear<float>{a, tokens, x, stride, ranks, max_rank}, pieces, threads);
    }
    scratch.trim();
}
