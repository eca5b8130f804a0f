// Instructions that only FP8 needs; see hopper.h.
#pragma once
#include "hopper.h"

// 4 bytes.
DEVICE void copy_4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Neighbouring bytes, a multiple of 16, by the copy engine.
DEVICE void load_bytes(u32 to, const void *from, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
}

// Of both warp groups that multiply.
DEVICE void pair_sync(u32 number) { asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory"); }

// The larger one in each half, of bfloat16.
DEVICE u32 larger_pair(u32 a, u32 b) {
    u32 both;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

// Two floats as e4m3; what is too large becomes the largest.
DEVICE u32 bytes_of(float low, float high) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// 1 / (1 + exp(-x)): three instructions fewer than as a division: subnormals count as 0.
DEVICE float sigmoid(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
}

// [64, 32] of weights by [32, N] of rows, both e4m3: `set` d, or `add` to it. 32 columns more are 2
// more. A thread's values are those of Product.
template <int N>
struct ProductFp8;
