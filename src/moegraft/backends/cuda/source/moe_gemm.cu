// One GEMM of a MoE layer with many rows per expert: gate_up + lora_expand + activation, or
// down + lora_expand + routing weight.
//
// Weights are the left operand, 256 of their rows (output columns) per tile; the right one are the
// rows of one block: up to BLOCK_M rows of one expert, in steps of 16, so that an expert's last
// block costs what its rows cost. Two warp groups multiply, each 2 x 64 of the tile's columns; a
// third one loads: weights and h by tensor map, rows of x by their tokens. What adapters add is
// S B, further steps of the same product. Programs are persistent.
//
// Macros, given by the host: BLOCK_M, STAGES; GATHER (x by token, else h by tensor map), GATED,
// KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT; WEIGHTED; BIAS (type of the bias; 0 = none), WEIGHT
// (type of the routing weights): 1 fp32, 2 bf16, 3 fp16; LORA; TOP_K; START0, START1 (first rows of
// the two halves of a tile); FP8 (weights and rows are e4m3 with scales).
#include "moe_gemm_load.h"
#include "moe_gemm_multiply.h"

extern "C" __global__ void __launch_bounds__(384, 1)
    moe_gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap h_map,
             const __grid_constant__ TensorMap out_map, const __grid_constant__ Arguments p) {
    extern __shared__ char memory[];
    u32 base = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    int group = __shfl_sync(0xFFFFFFFF, threadIdx.x >> 7, 0);
    int thread = threadIdx.x & 127;
    if (threadIdx.x == 0) {
        init_stages<STAGES>(Stage(base), LOADERS + 1);
        for (int i = 0; i < 2; ++i) barrier_init(base + BARRIERS_AT + 16 * STAGES + 8 * i, LOADERS);
        proxy_fence();
    }
    __syncthreads();
    // With adapters for each block of S: what was before the shrink is there.
    if (!LORA) launch_wait();
    launch_next();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGISTERS));
        load_all(p, &w_map, &h_map, base, thread);
        if (LORA) launch_wait();  // so that who waits for this launch has waited for the shrink
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLY_REGISTERS));
        multiply_all(p, &out_map, base, group, thread);
    }
}
