// Rows in the order they are worked on, and what LoRA adds to them.
//
// Rows of one expert follow one another, and within it those of one slot: a segment is a run of
// rows with the same factors, so each factor is read once per segment.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "arguments.h"
#include "products.h"

struct Factors {
    const char *a, *b;
    int64_t a_stride, b_stride, rank;
    float scale;
    bool shares_a;
};

// The factors of a slot and expert at one projection of a site; rank 0 = no delta.
inline Factors factors_of(const Table& table, int64_t projection, int64_t slot, int64_t expert) {
    Factors none = {};
    if (!table.records || slot < 0) return none;
    const int64_t* record = table.records + slot * table.slot_words + projection * 8;
    int32_t flags[2];
    std::memcpy(flags, record + 6, 8);
    int64_t entry = table.expert_map ? table.expert_map[slot * table.map_stride + expert] : 0;
    if (flags[0] <= 0 || entry < 0) return none;
    int64_t size = size_of(table.dtype);
    Factors found;
    found.a = table.arena + record[0] * 16 + entry * record[2] * size;
    found.b = table.arena + record[1] * 16 + entry * record[3] * size;
    found.a_stride = record[4];
    found.b_stride = record[5];
    found.rank = flags[0];
    found.shares_a = flags[1] != 0;
    std::memcpy(&found.scale, record + 7, 4);
    return found;
}

struct Segment {
    int64_t begin, end, expert, slot;
};

// Asks for columns [first, first + columns) of B.
inline void ask_for_b(const Factors& f, int64_t dtype, int64_t first, int64_t columns) {
    int64_t size = size_of(dtype);
    for (int64_t r = 0; r < f.rank; r++)
        for (int64_t c = 0; c < columns * size; c += 64)
            __builtin_prefetch(f.b + (r * f.b_stride + first) * size + c, 0, 2);
}

// out[m][c] += sum_r ranks[m][r] B[r][first + c].
inline void expand(
    const float* ranks, int64_t stride, int64_t rows, const Factors& f, int64_t dtype,
    int64_t first, int64_t columns, float* out, int64_t out_stride) {
    const char* b = f.b + first * size_of(dtype);
    for (int64_t n = 0, m; n < rows; n += m) {
        m = tile_rows(rows - n);
        const float* row[TILE];
        for (int64_t j = 0; j < m; j++) row[j] = ranks + (n + j) * stride;
        rows_by_lines(
            row, m, b, dtype, f.b_stride, columns, f.rank, out + n * out_stride, out_stride);
    }
}

// A buffer that a thread keeps between calls, up to a size.
class Scratch {
  public:
    explicit Scratch(int64_t kept) : kept_(kept) {}
    ~Scratch() { std::free(data_); }
    char* at_least(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            data_ = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return data_;
    }
    void trim() {
        if (size_ <= kept_) return;
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
    }

  private:
    char* data_ = nullptr;
    int64_t size_ = 0, kept_;
};

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
