// What the decode kernels need beside hopper.h: mma.sync, groups of copies, counters.
#pragma once
#include "hopper.h"

// ---- counters; see backends/triton/sync.py for the rules ----

// Once all that the program has stored is visible to it (a barrier before this), count it as there.
DEVICE void signal(int *counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// ---- loads past L1, of what a launch has written that may still run ----

DEVICE int load_past_l1(const int *from) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

DEVICE uint4 load_past_l1_16(const void *from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

DEVICE void store_16(void *to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// ---- shared memory ----

DEVICE u32 load_shared_u16(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

DEVICE u32 load_shared_u8(u32 at) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

DEVICE float4 load_shared_float4(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at));
    return v;
}

// ---- groups of this thread's copies ----

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all of this thread's groups but the last few are there.
template <int LEFT>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- products of a warp ----

// [16, 16] by [16, 8], bf16, added to d. With r = lane / 4 and c = lane % 4: a0 has row r and columns
// 2c, 2c + 1 of the left operand, a1 row r + 8, a2 and a3 the same of columns 8 more; b0 and b1 have
// column r of the right one, rows as the columns of a0 and a2. d: row r, columns 2c, 2c + 1, then row
// r + 8.
DEVICE void warp_product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float float_of_half(u16 half) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
    return v;
}

// ---- pairs of bfloat16 ----

DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// Both halves of a by one half of b, which costs no more.
DEVICE u32 multiply_by_half(u32 a, u32 b, bool second) {
    u32 v;
    if (second)
        asm("{\n.reg .b16 low, high;\n.reg .b32 t;\n"
            "mov.b32 {low, high}, %2;\nmov.b32 t, {high, high};\nmul.rn.bf16x2 %0, %1, t;\n}\n"
            : "=r"(v)
            : "r"(a), "r"(b));
    else
        asm("{\n.reg .b16 low, high;\n.reg .b32 t;\n"
            "mov.b32 {low, high}, %2;\nmov.b32 t, {low, low};\nmul.rn.bf16x2 %0, %1, t;\n}\n"
            : "=r"(v)
            : "r"(a), "r"(b));
    return v;
}

// Bytes of a (0 to 3) and b (4 to 7) by the four digits of a selector.
DEVICE u32 bytes_of(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Bits of a where the mask has 1, of b where it has 0: one instruction, which the compiler would take apart.
DEVICE u32 select_bits(u32 a, u32 b, u32 mask) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(v) : "r"(a), "r"(b), "r"(mask));
    return v;
}
