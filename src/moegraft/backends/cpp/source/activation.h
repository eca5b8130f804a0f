// The activation between gate_up and down, as moegraft.types.Activation says, on fp32 vectors.
#pragma once

#include "arguments.h"

INLINE F least(F a, F b) { return b < a ? b : a; }     // NaN in a stays
INLINE F greatest(F a, F b) { return b > a ? b : a; }  // NaN in a stays

// The error function within 4e-7 of its value; odd, a ratio of polynomials inside of +-4.
INLINE F error_function(F x) {
    F inside = greatest(least(x, broadcast(4.0f)), broadcast(-4.0f));
    F s = inside * inside;
    F p = broadcast(-2.72614225801306e-10f);
    p = p * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    F q = broadcast(-1.45660718464996e-05f);
    q = q * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    return inside * p / q;
}

INLINE F apply(int64_t kind, F x, F alpha) {
    switch (kind) {
        case SILU:
            return x / (1.0f + exponential(-alpha * x));
        case GELU:
            return x * (0.5f + 0.5f * error_function(x * 0.70710678f));
        case GELU_TANH: {
            // 0.5 (1 + tanh(u)) = 1 / (1 + e^-2u)
            F u = 0.79788456f * (x + 0.044715f * x * x * x);
            return x / (1.0f + exponential(-2.0f * u));
        }
        case RELU:
            return greatest(x, F{});
        default: {
            F positive = greatest(x, F{});
            return positive * positive;
        }
    }
}

// h[0..n) from gate (null = none) and up.
inline void activate(
    const LayerArguments& a, const float* gate, const float* up, float* h, int64_t n) {
    F alpha = broadcast(float(a.alpha)), limit = broadcast(float(a.limit));
    F shift = broadcast(float(a.up_shift));
    for (int64_t i = 0; i < n; i += V) {
        int64_t width = n - i < V ? n - i : V;
        F u = load_first_or_all(up + i, width), result;
        if (gate) {
            F g = load_first_or_all(gate + i, width);
            if (a.limited) {
                g = least(g, limit);
                u = greatest(least(u, limit), -limit);
            }
            if (a.up_shift != 0.0) u = u + shift;
            result = apply(a.activation, g, alpha) * u;
        } else {
            result = apply(a.activation, u, alpha);
        }
        store_first(h + i, result, width);
    }
}
