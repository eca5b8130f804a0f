// Hopper's instructions as functions: barriers, copy engine, matrix products. sm_90a only.
// The compiler at run time has no headers, so there are none here either.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

#define DEVICE __device__ __forceinline__

// A tensor map, made by the driver on the host.
struct alignas(64) TensorMap {
    u64 words[16];
};

// ---- barriers in shared memory ----

DEVICE void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

DEVICE void barrier_arrive(u32 bar, u32 count = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// Arrive once, and let the barrier also wait for bytes of the copy engine.
DEVICE void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@done bra end;\n"
        "bra again;\n"
        "end:\n"
        "}\n" ::"r"(bar), "r"(parity)
        : "memory");
}

// Stages go round; the parity of their barriers changes with each round.
template <int COUNT>
struct Ring {
    u32 base;
    int index = 0;
    u32 parity = 0;
    DEVICE explicit Ring(u32 base_) : base(base_) {}
    DEVICE void next() {
        if (++index == COUNT) {
            index = 0;
            parity ^= 1;
        }
    }
};

// A stage is full when all who load have arrived, empty when both warp groups that multiply have.
template <int COUNT, class Stage>
DEVICE void init_stages(Stage stage, u32 loaders) {
    for (int i = 0; i < COUNT; ++i) {
        barrier_init(stage.full(), loaders);
        barrier_init(stage.empty(), 2);
        stage.next();
    }
}

// Of the 128 threads of a warp group; numbers from 1 on.
DEVICE void group_sync(u32 number) {
    asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

DEVICE void loaders_sync(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Of a warp group; true in all threads when it holds in one.
DEVICE bool group_any(u32 number, bool mine) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.u32 in, %2, 0;\n"
        "barrier.cta.red.or.pred out, %1, 128, in;\n"
        "selp.u32 %0, 1, 0, out;\n"
        "}\n"
        : "=r"(any)
        : "r"(number), "r"((u32)mine)
        : "memory");
    return any;
}

// Ordinary reads and writes of shared memory before this one, those of copies and products behind it.
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- copies ----

// What the L2 keeps when it is full: rows, which many programs read, not factors, which pass through.
// (For weights it does harm: neighbouring blocks read them again.)
DEVICE u64 keep_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE u64 pass_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void load_tile(u32 to, const TensorMap *map, u32 bar, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(column), "r"(row)
        : "memory");
}

DEVICE void store_tile(u32 from, const TensorMap *map, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(row)
                 : "memory");
}

DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The thread's stores, but for the last group, have left shared memory.
DEVICE void stores_read() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
DEVICE void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// 16 bytes; with bytes = 0 zeros, and nothing is read.
DEVICE void copy_16(u32 to, const void *from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

DEVICE void copy_16_hinted(u32 to, const void *from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "l"(policy)
                 : "memory");
}

// The barrier gets this thread's arrival when its copies so far are there.
DEVICE void copies_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

DEVICE uint4 load_shared_16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

DEVICE u32 load_shared_u32(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

DEVICE i64 load_shared_i64(u32 at) {
    i64 v;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(v) : "r"(at));
    return v;
}

// Now, not where the value is first used.
DEVICE int load_global(const int *from) {
    int v;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

// What other programs wrote before they counted it here.
DEVICE int load_acquire(const int *from) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

// Counts what threads wrote that this one has synchronised with.
DEVICE void add_release(int *to, int value) {
    asm volatile("fence.acq_rel.gpu;\n\tred.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value)
                 : "memory");
}

// The launch behind this one may begin as soon as all programs of this one have called this or ended.
DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until all launches before this one are complete; see triton/sync.py for the rules.
DEVICE void launch_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Warp groups of the shrink that count a block as written.
constexpr int S_PARTS = 2;

DEVICE float2 load_shared_float2(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}

DEVICE void store_shared_u32(u32 at, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

DEVICE void store_shared_u64(u32 at, u64 value) {
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(at), "l"(value) : "memory");
}

DEVICE void store_shared_float(u32 at, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

DEVICE void store_shared_16(u32 at, u32 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(value) : "memory");
}

// Four 8 x 8 matrices of 16 bits, transposed; lane 8 q + i has the address of row i of matrix q.
DEVICE void store_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Two floats, rounded to bfloat16.
DEVICE u32 pair_of(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// ---- products ----

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Behind a wait: no use of these values may move ahead of it.
template <int COUNT>
DEVICE void settle(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A tile with rows of 128 bytes, swizzled; 8 rows after 1,024 bytes. Also of an operand that lies
// transposed, of 64 columns. 16 columns more are 2 more.
DEVICE u64 tile_at(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// [64, 16] of weights by [16, N] of rows, added to d if `add`; TRANSPOSED: the weights lie as
// [16, 64]. The N / 2 values of a thread: of row lane / 4 of its warp's 16 rows, columns
// 8 j + 2 (lane % 4) and the next, then of that row + 8, then the next j.
template <int N, int TRANSPOSED>
struct Product;
