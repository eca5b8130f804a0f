// A whole MoE layer in one call.
//
// A task's weights are read from memory once and stay in the cache while its rows pass; gate and up
// meet LoRA and the activation in a small tile, and only h and y are written.
#pragma once

#include "activation.h"
#include "rows.h"

// out[m][c] = sum_k x[m][k] W[expert][first + c * step][k], in whatever order W lies.
template <class X>
inline void product(
    const Weights& w, const Task& t, int64_t first, int64_t step, const X* const* x, int64_t rows,
    int64_t k, float* out, int64_t stride, const char* next) {
    const char* start = w.expert(t.expert) + first * w.out_stride * size_of(w.dtype);
    if (w.in_stride == 1) {
        rows_by_columns(
            x, rows, start, w.dtype, step * w.out_stride, t.columns, k, out, stride, next);
        return;
    }
    if constexpr (std::is_same_v<X, float>) {
        if (w.out_stride == 1 && step == 1) {
            for (int64_t m = 0; m < rows; m++)
                std::memset(out + m * stride, 0, t.columns * sizeof(float));
            rows_by_lines(
                x, rows, start, w.dtype, w.in_stride, t.columns, k, out, stride);
            return;
        }
        std::vector<float> column(k);
        for (int64_t c = 0; c < t.columns; c++) {
            for (int64_t i = 0; i < k; i++)
                column[i] = load_one(start, w.dtype, c * step * w.out_stride + i * w.in_stride);
            rows_by_columns(
                x, rows, reinterpret_cast<const char*>(column.data()), F32, k, 1, k, out + c,
                stride, nullptr);
        }
    }
}

// What a call works on besides its arguments. X is what rows are multiplied as.
template <class X>
struct Layer {
    const LayerArguments& a;
    const Rows& order;
    const X* x;        // [T, H]
    int64_t x_stride;
    X* h;              // [N, I]
    float* ranks[2];   // [N, max_rank] of gate and up; of down
    float* y;          // [N, H]

    void rows_of_x(int64_t begin, int64_t rows, const X** found) const {
        for (int64_t m = 0; m < rows; m++)
            found[m] = x + (order.pair[begin + m] / a.top_k) * x_stride;
    }
    void rows_of_h(int64_t begin, int64_t rows, const X** found) const {
        for (int64_t m = 0; m < rows; m++) found[m] = h + (begin + m) * a.intermediate;
    }

    // ranks = scale * A x of a piece of a segment, for `count` projections that read the same rows.
    void shrink(const Segment& s, int64_t projection, int64_t count) const {
        int64_t stride = order.max_rank, n = s.end - s.begin, k = a.hidden;
        int64_t columns = a.intermediate;
        Factors f[2] = {};
        for (int64_t i = 0; i < count; i++)
            f[i] = factors_of(a.table, projection + i, s.slot, s.expert);
        bool shared = count == 2 && f[1].shares_a && f[0].rank == f[1].rank && f[0].a == f[1].a;
        const X* rows[PIECE_ROWS];
        if (projection == down_projection(a))
            rows_of_h(s.begin, n, rows), std::swap(k, columns);
        else
            rows_of_x(s.begin, n, rows);
        for (int64_t i = 0; i < count; i++) {
            float* out = ranks[i] + s.begin * stride;
            const char* next = i + 1 < count && f[1].rank ? f[1].a : f[i].a;
            if (i && shared)
                std::memcpy(out, ranks[0] + s.begin * stride, n * stride * sizeof(float));
            else if (f[i].rank)
                rows_by_columns(
                    rows, n, f[i].a, a.table.dtype, f[i].a_stride, f[i].rank, k, out, stride, next);
        }
        for (int64_t i = 0; i < count; i++) ask_for_b(f[i], a.table.dtype, 0, columns);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < n; j++)
                for (int64_t r = 0; r < f[i].rank; r++)
                    ranks[i][(s.begin + j) * stride + r] *= f[i].scale;
    }

    // Rows that a block of weights meets next: several tiles while it comes from memory.
    static int64_t next_rows(int64_t left, bool cold) {
        return cold || WIDENED_FIRST ? std::min(left, PIECE_ROWS) : tile_rows(left);
    }

    // h of one block of columns, for all rows of its expert.
    void gate_up(const Task& t) const {
        alignas(64) float tile[2][PIECE_ROWS * MAX_BLOCK], out[MAX_BLOCK];
        int64_t sides = a.order == NO_GATE ? 1 : 2, step = a.order == INTERLEAVED ? 2 : 1;
        int64_t first[2] = {t.first, t.first};  // of gate and up among the packed columns
        if (a.order == INTERLEAVED) first[0] = 2 * t.first, first[1] = 2 * t.first + 1;
        if (a.order == GATE_FIRST) first[1] += a.intermediate;
        if (a.order == UP_FIRST) first[0] += a.intermediate;
        int64_t begin = order.first[t.expert], end = order.first[t.expert + 1];
        for (int64_t n = begin, m; n < end; n += m) {
            bool cold = n == begin;
            m = next_rows(end - n, cold);
            const X* rows[PIECE_ROWS];
            rows_of_x(n, m, rows);
            for (int64_t i = 0; i < sides; i++) ask_for_factors(t, i, n, m);
            bool packed = step == 2 && a.gate_up.in_stride != 1 && a.gate_up.out_stride == 1;
            if (packed) interleaved_lines(t, rows, m, tile[0], tile[1]);
            for (int64_t i = 0; i < sides; i++) {
                const char* next = cold ? column(a.gate_up, t, first[sides - 1]) : nullptr;
                if (!packed)
                    product(
                        a.gate_up, t, first[i], step, rows, m, a.hidden, tile[i], MAX_BLOCK, next);
                add_to_tile(a.gate_up, t, i, first[i], step, ranks[i], n, m, tile[i]);
            }
            for (int64_t j = 0; j < m; j++) {
                const float* up = tile[sides - 1] + j * MAX_BLOCK;
                activate(a, sides == 2 ? tile[0] + j * MAX_BLOCK : nullptr, up, out, t.columns);
                keep(out, h + (n + j) * a.intermediate + t.first, t.columns);
            }
        }
    }

    // y of one block of columns, for all rows of its expert.
    void down(const Task& t) const {
        alignas(64) float tile[PIECE_ROWS * MAX_BLOCK];
        int64_t begin = order.first[t.expert], end = order.first[t.expert + 1];
        for (int64_t n = begin, m; n < end; n += m) {
            bool cold = n == begin;
            m = next_rows(end - n, cold);
            const X* rows[PIECE_ROWS];
            rows_of_h(n, m, rows);
            ask_for_factors(t, down_projection(a), n, m);
            const char* next = cold ? column(a.down, t, t.first) : nullptr;
            product(a.down, t, t.first, 1, rows, m, a.intermediate, tile, MAX_BLOCK, next);
            add_to_tile(a.down, t, down_projection(a), t.first, 1, ranks[0], n, m, tile);
            for (int64_t j = 0; j < m; j++)
                std::memcpy(
                    y + (n + j) * a.hidden + t.first, tile + j * MAX_BLOCK,
                    t.columns * sizeof(float));
        }
    }

    // The weighted sum of one token's rows, columns [first, first + columns).
    void finalize(int64_t token, int64_t first, int64_t columns) const {
        alignas(64) float sum[FINAL_COLUMNS] = {};
        for (int64_t k = 0; k < a.top_k; k++) {
            int64_t row = order.row_of_pair[token * a.top_k + k];
            if (row < 0) continue;
            float weight = a.topk_weights[token * a.top_k + k];
            const float* values = y + row * a.hidden + first;
            for (int64_t c = 0; c < columns; c++) sum[c] += weight * values[c];
        }
        float scale = float(a.scale);
        for (int64_t c = 0; c < columns; c++) sum[c] *= scale;
        char* out = a.out + (token * a.out_stride + first) * size_of(a.x_dtype);
        round_to(sum, out, a.x_dtype, columns);
    }

  private:
    // Calls `use` with each run of rows [begin, begin + rows) that has factors, and these.
    template <class Use>
    void for_each_run(
        const Task& t, int64_t projection, int64_t begin, int64_t rows, Use use) const {
        for (int64_t m = 0, end; order.max_rank && m < rows; m = end) {
            const Segment& s = order.segments[order.segment_of[begin + m]];
            end = std::min(s.end - begin, rows);
            Factors f = factors_of(a.table, projection, s.slot, t.expert);
            if (f.rank) use(m, end - m, f);
        }
    }

    void ask_for_factors(const Task& t, int64_t projection, int64_t begin, int64_t rows) const {
        for_each_run(t, projection, begin, rows, [&](int64_t, int64_t, const Factors& f) {
            ask_for_b(f, a.table.dtype, t.first, t.columns);
        });
    }

    // Gate and up of [in, out] weights whose columns take turns: multiplied as one, then parted.
    void interleaved_lines(
        const Task& t, const X* const* rows, int64_t n, float* gate, float* up) const {
        if constexpr (std::is_same_v<X, float>) {
            alignas(64) float both[TILE * 2 * MAX_BLOCK];
            const char* w = column(a.gate_up, t, 2 * t.first);
            for (int64_t begin = 0, m; begin < n; begin += m) {
                m = tile_rows(n - begin);
                std::memset(both, 0, sizeof both);
                rows_by_lines(
                    rows + begin, m, w, a.gate_up.dtype, a.gate_up.in_stride, 2 * t.columns,
                    a.hidden, both, 2 * MAX_BLOCK);
                for (int64_t j = 0; j < m; j++)
                    for (int64_t c = 0; c < t.columns; c++) {
                        gate[(begin + j) * MAX_BLOCK + c] = both[j * 2 * MAX_BLOCK + 2 * c];
                        up[(begin + j) * MAX_BLOCK + c] = both[j * 2 * MAX_BLOCK + 2 * c + 1];
                    }
            }
        }
    }

    // Adds bias and LoRA to a tile of rows [begin, begin + rows) of a task's columns, which are
    // `first`, `first + step`, .. among those of the weights.
    void add_to_tile(
        const Weights& w, const Task& t, int64_t projection, int64_t first, int64_t step,
        const float* s, int64_t begin, int64_t rows, float* tile) const {
        for (int64_t c = 0; w.bias && c < t.columns; c++) {
            float bias = w.bias_of(t.expert, first + c * step);
            for (int64_t m = 0; m < rows; m++) tile[m * MAX_BLOCK + c] += bias;
        }
        int64_t stride = order.max_rank;
        for_each_run(t, projection, begin, rows, [&](int64_t m, int64_t n, const Factors& f) {
            expand(
                s + (begin + m) * stride, stride, n, f, a.table.dtype, t.first, t.columns,
                tile + m * MAX_BLOCK, MAX_BLOCK);
        });
    }

    const char* column(const Weights& w, const Task& t, int64_t c) const {
        return w.expert(t.expert) + c * w.out_stride * size_of(w.dtype);
    }

    // Rounds h to x's dtype, whatever it is multiplied as.
    void keep(float* values, X* to, int64_t n) const {
        if constexpr (std::is_same_v<X, bf16>) {
            round_to(values, to, BF16, n);
        } else {
            alignas(64) uint16_t rounded[MAX_BLOCK];
            if (a.x_dtype != F32) {
                round_to(values, rounded, a.x_dtype, n);
                convert(rounded, a.x_dtype, to, n);
            } else {
                std::memcpy(to, values, n * sizeof(float));
            }
        }
    }
};

// Runs every stage of a layer; one team of threads walks through them.
template <class X>
inline void run_stages(const Layer<X>& layer, int64_t threads) {
    const LayerArguments& a = layer.a;
    const Rows& order = layer.order;
    int64_t sides = a.order == NO_GATE ? 1 : 2;
    int64_t parts = (a.hidden + FINAL_COLUMNS - 1) / FINAL_COLUMNS;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        if (order.max_rank) {
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < order.pieces.size(); i++) layer.shrink(order.pieces[i], 0, sides);
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < order.up.size(); i++) layer.gate_up(order.up[i]);
        if (order.max_rank) {
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < order.pieces.size(); i++)
                layer.shrink(order.pieces[i], down_projection(a), 1);
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < order.down.size(); i++) layer.down(order.down[i]);
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < a.num_tokens * parts; i++) {
            int64_t first = i % parts * FINAL_COLUMNS;
            layer.finalize(i / parts, first, std::min(FINAL_COLUMNS, a.hidden - first));
        }
    }
}

inline int64_t useful_threads(int64_t bytes, int64_t sums, int64_t threads) {
    return std::clamp((bytes + sums / 16) / SERIAL_WORK, int64_t(1), std::max(threads, int64_t(1)));
}

// Runs a call of at most MAX_PAIRS pairs.
inline void run_layer(const LayerArguments& a) {
    static thread_local Scratch scratch(KEPT_BYTES);
    static thread_local Rows order;
    order.sort(a);
    order.cut(a);
    bool native = HAS_BF16 && a.x_dtype == BF16 && a.gate_up.dtype == BF16 &&
                  a.down.dtype == BF16 && a.gate_up.in_stride == 1 && a.down.in_stride == 1;
    int64_t n = order.count(), width = native ? 2 : 4;
    bool widened = !native && a.x_dtype != F32;
    int64_t sizes[5] = {
        widened ? a.num_tokens * a.hidden * 4 : 0, n * a.intermediate * width,
        n * order.max_rank * 4, n * order.max_rank * 4, n * a.hidden * 4};
    int64_t total = 64;
    for (int64_t& size : sizes) total += size = round_up(size, 64);
    char* memory = scratch.at_least(total);
    char* part[5];
    for (int i = 0; i < 5; memory += sizes[i], i++) part[i] = memory;
    int64_t sides = a.order == NO_GATE ? 1 : 2, sums = (sides + 1) * a.hidden * a.intermediate;
    int64_t threads = useful_threads(
        order.touched * sums * size_of(a.gate_up.dtype), n * sums, a.threads);
    float* ranks[2] = {reinterpret_cast<float*>(part[2]), reinterpret_cast<float*>(part[3])};
    float* y = reinterpret_cast<float*>(part[4]);
    if (native) {
        run_stages(
            Layer<bf16>{
                a, order, reinterpret_cast<const bf16*>(a.x), a.x_stride,
                reinterpret_cast<bf16*>(part[1]), {ranks[0], ranks[1]}, y},
            threads);
    } else {
        const float* x = reinterpret_cast<const float*>(widened ? part[0] : a.x);
        if (widened)
            for (int64_t t = 0; t < a.num_tokens; t++)
                convert(
                    a.x + t * a.x_stride * 2, a.x_dtype,
                    reinterpret_cast<float*>(part[0]) + t * a.hidden, a.hidden);
        run_stages(
            Layer<float>{
                a, order, x, widened ? a.hidden : a.x_stride, reinterpret_cast<float*>(part[1]),
                {ranks[0], ranks[1]}, y},
            threads);
    }
    scratch.trim();
}

inline void run_layer_in_parts(const LayerArguments& whole) {
    int64_t most = std::max(MAX_PAIRS / std::max(whole.top_k, int64_t(1)), int64_t(1));
    for (int64_t t = 0; t < whole.num_tokens; t += most) {
        LayerArguments part = whole;
        part.num_tokens = std::min(most, whole.num_tokens - t);
        part.x += t * whole.x_stride * size_of(whole.x_dtype);
        part.out += t * whole.out_stride * size_of(whole.x_dtype);
        part.topk_ids = static_cast<const char*>(whole.topk_ids) +
                        t * whole.top_k * (whole.wide_ids ? 8 : 4);
        part.topk_weights += t * whole.top_k;
        if (whole.slots) part.slots += t;
        run_layer(part);
    }
}
