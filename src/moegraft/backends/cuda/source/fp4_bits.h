// Words of eight 4-bit values and the scales of their blocks -> pairs of bfloat16.
//
// The bits of e2m1 (sign, two of exponent, one of mantissa) moved to the sign, the last two bits of the
// exponent and the first of the mantissa of bfloat16 are the value times 2^-126, its subnormal 0.5 too.
// A scale makes up for that, but for a factor that the sums get: values times scales are exact.
//
// Each half of a word has four values. One selection puts two of them side by side, at a distance of 4
// bits, so that a pair costs one mask, and every other one a shift; the units for logic and for integer
// products have half of the rate of the others, so that their instructions count most.
#pragma once
#include "decode.h"

// Columns of one scale, and how many a word's four have: 32 columns are a thread's part of a step.
constexpr int WIDTH = NV ? 16 : 32;
// What the products are too small by.
constexpr float LEFT_OUT = NV ? 128.0f : 9223372036854775808.0f;

constexpr u32 PAIR_BITS = 0x81C081C0, SIGNS = 0x88008800;

// Values 0 and 4, 1 and 5, 2 and 6, 3 and 7 of a word, times one of two scales.
DEVICE void widen(u32 word, u32 scales, bool second, u32 (&pairs)[4]) {
    u32 high = select_bits(word, word >> 6, SIGNS);
    u32 low = select_bits(word << 8, word << 2, SIGNS);
    pairs[0] = multiply_by_half((low << 4) & PAIR_BITS, scales, second);
    pairs[1] = multiply_by_half(low & PAIR_BITS, scales, second);
    pairs[2] = multiply_by_half((high << 4) & PAIR_BITS, scales, second);
    pairs[3] = multiply_by_half(high & PAIR_BITS, scales, second);
}

// The scales of 32 columns of a row as they are stored: two e4m3 or one e8m0.
DEVICE u32 load_scales(u32 at) { return NV ? load_shared_u16(at) : load_shared_u8(at); }

// Those of the first and of the second 16 columns in bfloat16. e4m3: 2^119 times the scale, whose bits
// moved are it times 2^-120; in two steps, for no bfloat16 is that large. e8m0: 2^63 times it, twice
// the same one; infinite from 2^65 on.
DEVICE u32 widen_scales(u32 stored) {
    if (!NV) return min(stored, 192u) * 0x00800080u + 0x1F801F80u;
    u32 both = bytes_of(stored, 0, 0x4140) << 4;
    return multiply_pairs(multiply_pairs(both, 0x7B807B80), 0x7B007B00);
}
