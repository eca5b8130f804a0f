// Products of few rows with a matrix, for both ways a matrix can lie in memory.
//
// rows_by_columns: every column is contiguous ([out, in] weights, LoRA's A). A tile of up to TILE
// rows and 4 columns is kept in registers while the inner dimension runs.
// rows_by_lines: every line of the inner dimension is contiguous ([in, out] weights, LoRA's B).
//
// A value's sum takes the same order in every tile: results don't depend on how rows are grouped.
#pragma once

#include <type_traits>
#include <vector>

#include "vectors.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int TILE = 3;  // 16 registers: 12 sums, 3 rows, 1 column
#else
constexpr int TILE = 6;  // 32 registers: 24 sums, 6 rows, 1 column
#endif
constexpr int COLUMNS = 4;
// Narrow vectors are short of registers: 16-bit weights that meet many rows are widened into memory
// once, not in registers for every tile.
constexpr bool WIDENED_FIRST = V < 16;

#if defined(__AVX512BF16__)
constexpr bool HAS_BF16 = true;
#else
constexpr bool HAS_BF16 = false;
#endif

// Four sums over all lanes of a, b, c, d, written to out[0..3].
INLINE void sum_lanes(F a, F b, F c, F d, float* out) {
#if defined(__AVX512F__)
    __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, w = (__m512)d;
    __m512 xy = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    __m512 zw = _mm512_add_ps(_mm512_unpacklo_ps(z, w), _mm512_unpackhi_ps(z, w));
    __m512 all = _mm512_add_ps(
        (__m512)_mm512_unpacklo_pd((__m512d)xy, (__m512d)zw),
        (__m512)_mm512_unpackhi_pd((__m512d)xy, (__m512d)zw));
    __m256 half = _mm256_add_ps(
        _mm512_castps512_ps256(all), (__m256)_mm512_extractf64x4_pd((__m512d)all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
    __m256 xy = _mm256_hadd_ps((__m256)a, (__m256)b), zw = _mm256_hadd_ps((__m256)c, (__m256)d);
    __m256 all = _mm256_hadd_ps(xy, zw);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    F sums[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        float sum = 0;
        for (int lane = 0; lane < V; lane++) sum += sums[i][lane];
        out[i] = sum;
    }
#endif
}

// Every loop over a tile is unrolled: only then do its sums stay in registers.
#define UNROLL _Pragma("GCC unroll 8")

// Columns that are needed soon.
template <class W>
struct Ahead {
    const W* start;
    int64_t stride;
};

#if defined(__AVX512BF16__)
// A step of 32 products: sums of pairs. `mask` = which of them there are.
template <int M, int AHEAD>
INLINE void bf16_step(
    const bf16* const* x, const bf16* const* column, int64_t i, const Ahead<bf16>& next,
    __mmask32 mask,
    F (&sum)[M][COLUMNS]) {
    __m512bh rows[M];
    UNROLL for (int m = 0; m < M; m++)
        rows[m] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x[m] + i);
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        __m512bh weights = (__m512bh)_mm512_maskz_loadu_epi16(mask, column[c] + i);
        if (c < AHEAD) __builtin_prefetch(next.start + c * next.stride + i);
        UNROLL for (int m = 0; m < M; m++)
            sum[m][c] = (F)_mm512_dpbf16_ps((__m512)sum[m][c], rows[m], weights);
    }
}
#endif

// out[m][0..columns) = sum_k x[m][k] w[c * w_stride + k], columns <= COLUMNS. Meanwhile the first
// AHEAD columns of `next` are asked for.
template <int M, int AHEAD, class X, class W>
INLINE void columns_tile(
    const X* const* x, const W* w, int64_t w_stride, int columns, int64_t k, float* out,
    int64_t out_stride, const Ahead<W>& next) {
    const W* column[COLUMNS];
    UNROLL for (int c = 0; c < COLUMNS; c++)
        column[c] = w + w_stride * (c < columns ? c : columns - 1);
    F sum[M][COLUMNS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sum[m][c] = F{};
    int64_t i = 0;
    if constexpr (HAS_BF16 && std::is_same_v<X, bf16> && std::is_same_v<W, bf16>) {
#if defined(__AVX512BF16__)
        for (; i + 32 <= k; i += 32)
            bf16_step<M, AHEAD>(x, column, i, next, 0xffffffffu, sum);
        if (i < k) bf16_step<M, AHEAD>(x, column, i, next, (1u << (k - i)) - 1, sum);
#endif
    } else {
        for (; i + V <= k; i += V) {
            F rows[M];
            UNROLL for (int m = 0; m < M; m++) rows[m] = load(x[m] + i);
            UNROLL for (int c = 0; c < COLUMNS; c++) {
                F weights = load(column[c] + i);
                if (c < AHEAD) __builtin_prefetch(next.start + c * next.stride + i);
                UNROLL for (int m = 0; m < M; m++) sum[m][c] += rows[m] * weights;
            }
        }
        if (i < k) {
            F rows[M];
            UNROLL for (int m = 0; m < M; m++) rows[m] = load_first(x[m] + i, k - i);
            UNROLL for (int c = 0; c < COLUMNS; c++) {
                F weights = load_first(column[c] + i, k - i);
                UNROLL for (int m = 0; m < M; m++) sum[m][c] += rows[m] * weights;
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        if (columns == COLUMNS) {
            sum_lanes(sum[m][0], sum[m][1], sum[m][2], sum[m][3], out + m * out_stride);
        } else {
            float sums[COLUMNS];
            sum_lanes(sum[m][0], sum[m][1], sum[m][2], sum[m][3], sums);
            std::memcpy(out + m * out_stride, sums, columns * sizeof(float));
        }
    }
}

template <int M, class X, class W>
__attribute__((noinline)) void columns_tile_ahead(
    const X* const* x, const W* w, int64_t w_stride, int columns, int64_t k, float* out,
    int64_t out_stride, const Ahead<W>& next, int ahead) {
    if (ahead == 4)
        columns_tile<M, 4>(x, w, w_stride, columns, k, out, out_stride, next);
    else if (ahead == 2)
        columns_tile<M, 2>(x, w, w_stride, columns, k, out, out_stride, next);
    else if (ahead == 1)
        columns_tile<M, 1>(x, w, w_stride, columns, k, out, out_stride, next);
    else
        columns_tile<M, 0>(x, w, w_stride, columns, k, out, out_stride, next);
}

// out[m][0..N * V) += sum_k x[m][k] w[k * w_stride + ..].
template <int M, int N, class W>
INLINE void lines_tile(
    const float* const* x, const W* w, int64_t w_stride, int64_t k, float* out,
    int64_t out_stride) {
    F sum[M][N];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < N; j++) sum[m][j] = load(out + m * out_stride + j * V);
    for (int64_t i = 0; i < k; i++) {
        F value[M];
        UNROLL for (int m = 0; m < M; m++) value[m] = broadcast(x[m][i]);
        UNROLL for (int j = 0; j < N; j++) {
            F weights = load(w + i * w_stride + j * V);
            UNROLL for (int m = 0; m < M; m++) sum[m][j] += value[m] * weights;
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < N; j++) store(out + m * out_stride + j * V, sum[m][j]);
}

// out[m][c] += sum_k x[m][k] w[k * w_stride + c] for m < M and any number of columns. The fewer the
// rows, the longer the part of a line that is read at once.
template <int M, class W>
__attribute__((noinline)) void rows_by_lines_of(
    const float* const* x, const W* w, int64_t w_stride, int64_t columns, int64_t k, float* out,
    int64_t out_stride) {
    constexpr int LONG = M == 1 ? 8 : M == 2 || V == 16 ? 4 : 2;
    int64_t c = 0;
    for (; c + LONG * V <= columns; c += LONG * V)
        lines_tile<M, LONG>(x, w + c, w_stride, k, out + c, out_stride);
    for (; c + 2 * V <= columns; c += 2 * V)
        lines_tile<M, 2>(x, w + c, w_stride, k, out + c, out_stride);
    for (; c + V <= columns; c += V)
        lines_tile<M, 1>(x, w + c, w_stride, k, out + c, out_stride);
    int64_t width = columns - c;
    if (!width) return;
    F sum[M];
    UNROLL for (int m = 0; m < M; m++) sum[m] = load_first(out + m * out_stride + c, width);
    for (int64_t i = 0; i < k; i++) {
        F weights = load_first(w + i * w_stride + c, width);
        UNROLL for (int m = 0; m < M; m++) sum[m] += broadcast(x[m][i]) * weights;
    }
    UNROLL for (int m = 0; m < M; m++) store_first(out + m * out_stride + c, sum[m], width);
}

// Rows of the next tile, so that `left` rows make tiles of nearly equal sizes.
INLINE int64_t tile_rows(int64_t left) {
    int64_t tiles = (left + TILE - 1) / TILE;
    return (left + tiles - 1) / tiles;
}

// Columns go round outside, tiles of rows inside: while the tiles use some columns, each asks for a
// part of the next ones, so that memory and arithmetic overlap. `next` = the weights to ask for at
// the end; null = w is in a cache, nothing is asked for.
template <class X, class W>
inline void rows_by_columns_in(
    const X* const* x, int64_t rows, const W* w, int64_t w_stride, int64_t columns, int64_t k,
    float* out, int64_t out_stride, const W* next) {
    if constexpr (WIDENED_FIRST && !std::is_same_v<W, float> && std::is_same_v<X, float>) {
        if (rows > 2 * TILE) {
            static thread_local std::vector<float> wide;
            wide.resize(COLUMNS * k);
            for (int64_t c = 0; c < columns; c += COLUMNS) {
                int64_t width = columns - c < COLUMNS ? columns - c : COLUMNS;
                for (int64_t j = 0; j < width; j++)
                    convert(w + (c + j) * w_stride, wide.data() + j * k, k);
                rows_by_columns_in<X, float>(
                    x, rows, wide.data(), k, width, k, out + c, out_stride, nullptr);
            }
            return;
        }
    }
    int64_t tiles = (rows + TILE - 1) / TILE;
    int ahead = !next ? 0 : tiles == 1 ? 4 : tiles < 4 ? 2 : 1;
    for (int64_t c = 0; c < columns; c += COLUMNS) {
        const W* start = w + c * w_stride;
        const W* then = c + COLUMNS < columns ? start + COLUMNS * w_stride : next;
        int width = int(columns - c < COLUMNS ? columns - c : COLUMNS);
        int asked = 0;
        for (int64_t n = 0, m; n < rows; n += m, asked += ahead) {
            m = tile_rows(rows - n);
            int now = asked < COLUMNS ? ahead : 0;
            Ahead<W> soon = {then + asked * w_stride, w_stride};
            float* to = out + n * out_stride + c;
#define MOEGRAFT_ROWS(M)                                                                 \
    case M:                                                                              \
        columns_tile_ahead<M>(x + n, start, w_stride, width, k, to, out_stride, soon, now); \
        break;
            switch (m) {
                MOEGRAFT_ROWS(1)
                MOEGRAFT_ROWS(2)
                MOEGRAFT_ROWS(3)
#if !defined(__AVX2__) || defined(__AVX512F__)
                MOEGRAFT_ROWS(4)
                MOEGRAFT_ROWS(5)
                MOEGRAFT_ROWS(6)
#endif
            }
#undef MOEGRAFT_ROWS
        }
    }
}

template <class W>
inline void rows_by_lines_in(
    const float* const* x, int64_t rows, const W* w, int64_t w_stride, int64_t columns,
    int64_t k, float* out, int64_t out_stride) {
#define MOEGRAFT_ROWS(M) \
    case M: return rows_by_lines_of<M>(x, w, w_stride, columns, k, out, out_stride);
    switch (rows) {
        MOEGRAFT_ROWS(1)
        MOEGRAFT_ROWS(2)
        MOEGRAFT_ROWS(3)
#if !defined(__AVX2__) || defined(__AVX512F__)
        MOEGRAFT_ROWS(4)
        MOEGRAFT_ROWS(5)
        MOEGRAFT_ROWS(6)
#endif
    }
#undef MOEGRAFT_ROWS
}

// out[m][c] = sum_k x[m][k] w[c][k]. `next`: see rows_by_columns_in.
template <class X>
inline void rows_by_columns(
    const X* const* x, int64_t rows, const char* w, int64_t dtype, int64_t w_stride,
    int64_t columns, int64_t k, float* out, int64_t out_stride, const char* next) {
    auto run = [&](auto* typed) {
        using W = std::remove_pointer_t<decltype(typed)>;
        rows_by_columns_in(
            x, rows, typed, w_stride, columns, k, out, out_stride,
            reinterpret_cast<W*>(next));
    };
    if (dtype == F32)
        run(reinterpret_cast<const float*>(w));
    else if (dtype == BF16)
        run(reinterpret_cast<const bf16*>(w));
    else
        run(reinterpret_cast<const f16*>(w));
}

// out[m][c] += sum_k x[m][k] w[k][c].
inline void rows_by_lines(
    const float* const* x, int64_t rows, const char* w, int64_t dtype, int64_t w_stride,
    int64_t columns, int64_t k, float* out, int64_t out_stride) {
    auto run = [&](auto* typed) {
        for (int64_t n = 0, m; n < rows; n += m) {
            m = tile_rows(rows - n);
            rows_by_lines_in(
                x + n, m, typed, w_stride, columns, k, out + n * out_stride, out_stride);
        }
    };
    if (dtype == F32)
        run(reinterpret_cast<const float*>(w));
    else if (dtype == BF16)
        run(reinterpret_cast<const bf16*>(w));
    else
        run(reinterpret_cast<const f16*>(w));
}
