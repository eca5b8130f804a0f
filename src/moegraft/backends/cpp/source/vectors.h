// Vectors of fp32 as wide as the build's instructions, and loads that widen 16-bit values.
//
// GCC's and clang's vector types serve every processor; only what they can't say is an intrinsic.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int V = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int V = 8;
#else
constexpr int V = 4;
#endif

#define INLINE inline __attribute__((always_inline))

typedef float F __attribute__((vector_size(V * 4)));
typedef int32_t I __attribute__((vector_size(V * 4)));
typedef uint32_t U __attribute__((vector_size(V * 4)));
typedef float UnalignedF __attribute__((vector_size(V * 4), aligned(4), may_alias));
typedef uint16_t H __attribute__((vector_size(V * 2)));
typedef uint16_t UnalignedH __attribute__((vector_size(V * 2), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// The numbers of dtypes in library.py.
enum Dtype : int64_t { F32 = 0, BF16 = 1, F16 = 2 };
INLINE int64_t size_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

// (`F{} + value` would add zeros: -0 is another value.)
INLINE F broadcast(float value) {
#if defined(__AVX512F__)
    return (F)_mm512_set1_ps(value);
#elif defined(__AVX2__)
    return (F)_mm256_set1_ps(value);
#else
    return F{value, value, value, value};
#endif
}
INLINE F load(const float* p) { return *reinterpret_cast<const UnalignedF*>(p); }
INLINE void store(float* p, F value) { *reinterpret_cast<UnalignedF*>(p) = value; }

INLINE F load(const bf16* p) {
    H bits = *reinterpret_cast<const UnalignedH*>(p);
    return reinterpret_cast<F>(__builtin_convertvector(bits, U) << 16);
}

INLINE float widen(float value) { return value; }
INLINE float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
INLINE float widen(f16 value) {
    uint32_t sign = uint32_t(value.bits & 0x8000) << 16, exponent = (value.bits >> 10) & 31;
    uint32_t mantissa = value.bits & 1023, bits;
    if (exponent == 0) {  // zero and subnormal: exact in fp32
        float small = float(mantissa) * 0x1p-24f;
        return sign ? -small : small;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

INLINE F load(const f16* p) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    F result;
    for (int i = 0; i < V; i++) result[i] = widen(p[i]);
    return result;
#endif
}

// The first n values, zeros behind them; n < V.
template <class T>
INLINE F load_first(const T* p, int64_t n) {
    T padded[V] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
INLINE F load_first_or_all(const T* p, int64_t n) {
    return n == V ? load(p) : load_first(p, n);
}
INLINE void store_first(float* p, F value, int64_t n) {
    std::memcpy(p, &value, n * sizeof(float));
}

INLINE float load_one(const void* p, int64_t dtype, int64_t i) {
    if (dtype == F32) return static_cast<const float*>(p)[i];
    if (dtype == BF16) return widen(static_cast<const bf16*>(p)[i]);
    return widen(static_cast<const f16*>(p)[i]);
}

// To the nearest, ties to even; NaN stays NaN.
INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(nan ? (bits >> 16) | 64 : rounded)};
}
INLINE f16 to_f16(float value) {
#if defined(__F16C__)
    return {uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return {uint16_t(sign | 0x7e00)};   // NaN
    if (bits >= 0x477ff000u) return {uint16_t(sign | 0x7c00)};  // 65520 and more: infinity
    if (bits < 0x38800000u) {                                   // subnormal or zero
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return {uint16_t(sign | uint16_t(std::nearbyint(magnitude * 0x1p24f)))};
    }
    uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1) - (112u << 23);
    return {uint16_t(sign | (rounded >> 13))};
#endif
}

// Contiguous conversions of n values.
template <class T>
inline void convert(const T* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + V <= n; i += V) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = widen(from[i]);
}
inline void convert(const void* from, int64_t dtype, float* to, int64_t n) {
    if (dtype == F32)
        std::memcpy(to, from, n * sizeof(float));
    else if (dtype == BF16)
        convert(static_cast<const bf16*>(from), to, n);
    else
        convert(static_cast<const f16*>(from), to, n);
}
inline void round_to(const float* from, void* to, int64_t dtype, int64_t n) {
    if (dtype == F32) {
        std::memcpy(to, from, n * sizeof(float));
    } else if (dtype == BF16) {
        for (int64_t i = 0; i < n; i++) static_cast<bf16*>(to)[i] = to_bf16(from[i]);
    } else {
        for (int64_t i = 0; i < n; i++) static_cast<f16*>(to)[i] = to_f16(from[i]);
    }
}

// e^x to about one unit in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
INLINE F exponential(F x) {
    F low = broadcast(-87.33654f), high = broadcast(88.72283f);
    F inside = x < low ? low : (x > high ? high : x);
    F turns = inside * 1.44269504f;
    F magic = broadcast(12582912.0f);  // adding it leaves the nearest whole number in the low bits
    F n = (turns + magic) - magic;
    F r = inside - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    F p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors: n = 128 has no fp32 power of its own.
    I whole = __builtin_convertvector(n, I), half = whole >> 1;
    F first = reinterpret_cast<F>((half + 127) << 23);
    F second = reinterpret_cast<F>((whole - half + 127) << 23);
    F result = p * first * second;
    result = x < low ? F{} : result;
    result = x > high ? broadcast(INFINITY) : result;
    return x == x ? result : x;
}
