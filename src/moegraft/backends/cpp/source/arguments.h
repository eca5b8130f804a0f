// What the library's functions get: the structures of library.py, every field 8 bytes.
#pragma once

#include "vectors.h"

// Expert weights, [E, out, in] by strides in elements, and their bias (null = none), [E, out].
struct Weights {
    const char* data;
    int64_t dtype, expert_stride, out_stride, in_stride;
    const void* bias;
    int64_t bias_dtype, bias_expert_stride, bias_stride;

    const char* expert(int64_t e) const { return data + e * expert_stride * size_of(dtype); }
    float bias_of(int64_t e, int64_t column) const {
        return load_one(bias, bias_dtype, e * bias_expert_stride + column * bias_stride);
    }
};

// A site's factors, as moegraft.factors describes them; records null = no adapters.
struct Table {
    const int64_t* records;
    int64_t slot_words;          // int64 words between two slots' records
    const int32_t* expert_map;   // null = entry 0 (linears)
    int64_t map_stride;          // int32 words between two slots' maps
    const char* arena;
    int64_t dtype;
};

struct LayerArguments {
    const char* x;
    int64_t x_dtype, x_stride;
    const void* topk_ids;
    int64_t wide_ids;  // 1 = int64, 0 = int32
    const float* topk_weights;
    const int32_t* slots;  // null = base only
    char* out;
    int64_t out_stride;  // of x's dtype
    int64_t num_tokens, top_k, num_experts, hidden, intermediate, expert_offset;
    Weights gate_up, down;
    int64_t order, activation, limited;
    double limit, alpha, up_shift, scale;
    Table table;
    int64_t threads;
};

struct LinearArguments {
    const char* x;
    int64_t x_dtype, x_stride;
    char* out;
    int64_t out_dtype, out_stride;
    const int32_t* slots;
    int64_t num_tokens, in_features, out_features;
    Table table;
    int64_t threads;
};

// The numbers of library.py.
enum Order : int64_t { GATE_FIRST = 0, UP_FIRST = 1, INTERLEAVED = 2, NO_GATE = 3 };
enum Kind : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };
