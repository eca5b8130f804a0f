// The functions of decode.h and of the language, for one CUDA program at a time on a CPU: each of its
// threads is a fiber that runs until it meets a barrier or a product of its warp. Copies happen as late
// as a wait allows, or (EARLY) at once, so that what waits too little, or writes too soon, shows.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
using std::min;
#define DEVICE inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)

constexpr int MAX_THREADS = THREAD_COUNT;
char memory[232448];

struct Copy { u32 to; char bytes[16]; const char *from; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    int waits = 0, group_waits = 0, products = 0;  // barriers and products so far
    bool done = false;
    u32 operands[2][6];
};
struct Index { int x; };
std::vector<Fiber> fibers(MAX_THREADS);
ucontext_t scheduler;
int running;
Index blockIdx, gridDim;
#define threadIdx (Index{running})

inline void fail(const char *what) { fprintf(stderr, "cuda_on_cpu: %s\n", what); abort(); }
inline void yield() { swapcontext(&fibers[running].context, &scheduler); }
inline Fiber &me() { return fibers[running]; }

inline void __syncthreads() {
    int mine = ++me().waits;
    for (;;) {
        bool all = true;
        for (auto &f : fibers) {
            if (f.done && f.waits < mine) fail("a thread ended before a barrier of others");
            all = all && f.waits >= mine;
        }
        if (all) return;
        yield();
    }
}

// Of the 128 threads around this one, which all name the same barrier.
inline void group_sync(u32 number) {
    if ((int)number != 1 + running / 128) fail("a barrier of another group");
    int mine = ++me().group_waits, first = running & ~127;
    for (bool all = false; !all;) {
        all = true;
        for (int i = 0; i < 128; ++i) all = all && fibers[first + i].group_waits >= mine;
        if (!all) yield();
    }
}

// ---- memory ----
inline u32 __cvta_generic_to_shared(const void *p) { return (const char *)p - memory; }
inline char *shared(u32 at, u32 bytes) {
    if (at + bytes > SHARED_BYTES || at % bytes) fail("shared memory outside or not aligned");
    return memory + at;
}
template <class T> inline T load_as(u32 at) { T v; memcpy(&v, shared(at, sizeof v), sizeof v); return v; }
inline uint4 load_shared_16(u32 at) { return load_as<uint4>(at); }
inline float4 load_shared_float4(u32 at) { return load_as<float4>(at); }
inline u32 load_shared_u32(u32 at) { return load_as<u32>(at); }
inline u32 load_shared_u16(u32 at) { return load_as<u16>(at); }
inline u32 load_shared_u8(u32 at) { return load_as<unsigned char>(at); }
inline void store_shared_u32(u32 at, u32 v) { memcpy(shared(at, 4), &v, 4); }
inline void store_shared_float(u32 at, float v) { memcpy(shared(at, 4), &v, 4); }
inline int load_past_l1(const int *p) { return *p; }
inline int load_acquire(const int *p) { return *p; }
inline uint4 load_past_l1_16(const void *p) {
    if ((uintptr_t)p % 16) fail("a load that is not aligned");
    uint4 v; memcpy(&v, p, 16); return v;
}
inline void store_16(void *to, u32 a, u32 b, u32 c, u32 d) {
    if ((uintptr_t)to % 16) fail("a store that is not aligned");
    uint4 v{a, b, c, d}; memcpy(to, &v, 16);
}
inline void signal(int *counter) { ++*counter; }
inline void launch_wait() {}
inline void launch_next() {}

inline void copy_16(u32 to, const void *from, u32 bytes) {
    if ((uintptr_t)from % 16) fail("a copy that is not aligned");
    Copy c{to, {}, (const char *)from};
    memcpy(c.bytes, from, bytes);
    if (EARLY) memcpy(shared(to, 16), c.bytes, 16);
    else me().open.push_back(c);
}
inline void copies_commit() { me().groups.push_back(me().open); me().open.clear(); }
template <int LEFT> inline void copies_wait() {
    auto &groups = me().groups;
    while ((int)groups.size() > LEFT) {
        for (auto &c : groups[0]) memcpy(shared(c.to, 16), c.bytes, 16);
        groups.erase(groups.begin());
    }
}

// ---- arithmetic ----
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float of_bf16(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 to_bf16(double v) {  // to nearest, ties to even; subnormals too
    if (std::isnan(v)) return 0x7FC0;
    if (v == 0 || std::isinf(v)) { float f = v; u32 b; memcpy(&b, &f, 4); return b >> 16; }
    double unit = ldexp(1.0, std::max(ilogb(v) - 7, -133));
    float f = nearbyint(v / unit) * unit;  // exact, or infinite
    u32 b; memcpy(&b, &f, 4);
    return b >> 16;
}
inline u32 pair_of(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline u32 multiply_pairs(u32 a, u32 b) {
    u32 low = to_bf16((double)of_bf16(a & 0xFFFF) * of_bf16(b & 0xFFFF));
    return low | to_bf16((double)of_bf16(a >> 16) * of_bf16(b >> 16)) << 16;
}
inline u32 multiply_by_half(u32 a, u32 b, bool second) {
    u32 half = second ? b >> 16 : b & 0xFFFF;
    return multiply_pairs(a, half | half << 16);
}
inline u32 bytes_of(u32 a, u32 b, u32 selector) {
    u64 all = a | (u64)b << 32;
    u32 v = 0;
    for (int i = 0; i < 4; ++i) v |= (u32)(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return v;
}
inline u32 select_bits(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }
inline float float_of_half(u16) { fail("half precision is not done here"); return 0; }

// By the manual: a0 row r, columns 2c and 2c + 1; a1 row r + 8; a2, a3 columns 8 more; b alike.
inline void warp_product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Fiber &f = me();
    int turn = f.products & 1, first = running & ~31, lane = running & 31;
    u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(f.operands[turn], mine, sizeof mine);
    int now = ++f.products;
    for (bool all = false; !all;) {
        all = true;
        for (int i = 0; i < 32; ++i) all = all && fibers[first + i].products >= now;
        if (!all) yield();
    }
    auto half = [](u32 v, int i) { return of_bf16(i ? v >> 16 : v & 0xFFFF); };
    for (int i = 0; i < 4; ++i) {
        int row = (lane >> 2) + (i >> 1) * 8, column = (lane & 3) * 2 + (i & 1);
        float sum = d[i];
        for (int k = 0; k < 16; ++k) {
            u32 *left = fibers[first + (row & 7) * 4 + (k % 8) / 2].operands[turn];
            u32 *right = fibers[first + column * 4 + (k % 8) / 2].operands[turn];
            sum += half(left[row / 8 + (k / 8) * 2], k & 1) * half(right[4 + k / 8], k & 1);
        }
        d[i] = sum;
    }
}

// ---- running ----
void (*body)();
inline void enter() { body(); me().done = true; for (;;) yield(); }

inline void run_program(int block, int programs) {
    blockIdx.x = block, gridDim.x = programs;
    memset(memory, 0xFF, sizeof memory);
    for (running = 0; running < MAX_THREADS; ++running) {
        Fiber &f = me();
        f.stack.resize(1 << 16);
        f.groups.clear(), f.open.clear();
        f.waits = f.group_waits = f.products = 0, f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = &scheduler;
        makecontext(&f.context, enter, 0);
    }
    long long turns = 0;
    for (bool all = false; !all;) {
        all = true;
        for (running = 0; running < MAX_THREADS; ++running)
            if (!me().done) swapcontext(&scheduler, &me().context), all = false;
        if (++turns > 1000000) fail("the program hangs");
    }
}
