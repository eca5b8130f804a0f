"""The base product of one tile, whatever the weights' format: what the GEMM kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from moegraft.backends.triton.weights.fp4 import fp4_product
from moegraft.backends.triton.weights.fp8_block import fp8_block_product
from moegraft.backends.triton.weights.fp8_wide import fp8_wide_product
from moegraft.backends.triton.weights.plain import plain_product


@triton.jit
def base_product(
    x_ptr, x_stride, base_ptr, base_stride, base_scales_ptr, x_rows, row_mask, weight_ptr,
    weight_stride_e, weight_stride_n, weight_stride_k, scales_ptr, scale_stride_e, scale_stride_n,
    scale_stride_k, globals_ptr, global_stride, expert, first_column, columns, column_mask, size_k,
    counter_ptr, seen, amount, FORMAT: tl.constexpr, WORD_UNIT: tl.constexpr,
    GATE_START: tl.constexpr, UP_START: tl.constexpr, COLUMN_STEP: tl.constexpr,
    GATE_SCALES: tl.constexpr, UP_SCALES: tl.constexpr, GATE_GLOBAL: tl.constexpr,
    UP_GLOBAL: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WAIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Return ``x W[start + columns * step]`` of gate and of up, fp32 ``[BLOCK_M, BLOCK_N]`` each.

    Gate is meaningless unless GATED.
    """
    if FORMAT == "unquantized":
        gate, up = plain_product(
            x_ptr, x_stride, x_rows, row_mask, weight_ptr, weight_stride_e, weight_stride_n,
            weight_stride_k, expert, columns, column_mask, size_k, counter_ptr, seen, amount,
            GATE_START, UP_START, COLUMN_STEP, GATED, EVEN_K, EVEN_N, SWAP, BLOCK_M, BLOCK_N,
            BLOCK_K, WAIT, PDL,
        )  # fmt: skip
    elif FORMAT == "nvfp4" or FORMAT == "mxfp4":
        tl.static_assert(SWAP, "4-bit weights are the left operand")
        gate, up = fp4_product(
            base_ptr, base_stride, x_rows, row_mask, weight_ptr, weight_stride_e, weight_stride_n,
            scales_ptr, scale_stride_e, scale_stride_n, scale_stride_k, globals_ptr, global_stride,
            expert, columns, column_mask, size_k, counter_ptr, seen, amount, FORMAT == "nvfp4",
            WORD_UNIT, GATE_START, UP_START, COLUMN_STEP, GATE_SCALES, UP_SCALES, GATE_GLOBAL,
            UP_GLOBAL, GATED, EVEN_K, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K, WAIT, PDL,
        )  # fmt: skip
    elif FORMAT == "fp8-block":
        tl.static_assert(SWAP, "FP8 weights are the left operand of FP8 activations")
        gate, up = fp8_block_product(
            base_ptr, base_stride, base_scales_ptr, x_rows, row_mask, weight_ptr, weight_stride_e,
            weight_stride_n, weight_stride_k, scales_ptr, scale_stride_e, scale_stride_n,
            scale_stride_k, expert, first_column, columns, column_mask, size_k, counter_ptr, seen,
            amount, GATE_START, UP_START, GATE_SCALES, UP_SCALES, GATED, EVEN_K, EVEN_N,
            BLOCK_M, BLOCK_N, BLOCK_K, WAIT, PDL,
        )  # fmt: skip
    else:
        tl.static_assert(not SWAP, "weights that are widened are the right operand")
        scales: tl.constexpr = (
            "block"
            if FORMAT == "fp8-block-w8a16"
            else "row"
            if FORMAT == "fp8-channel"
            else "matrix"
        )
        tl.static_assert(scales != "matrix" or FORMAT == "fp8-tensor", "no such format")
        gate, up = fp8_wide_product(
            x_ptr, x_stride, x_rows, row_mask, weight_ptr, weight_stride_e, weight_stride_n,
            weight_stride_k, scales_ptr, scale_stride_e, scale_stride_n, scale_stride_k, expert,
            first_column, columns, column_mask, size_k, counter_ptr, seen, amount, scales,
            GATE_START, UP_START, COLUMN_STEP, GATE_SCALES, UP_SCALES, GATED, EVEN_K, EVEN_N,
            BLOCK_M, BLOCK_N, BLOCK_K, WAIT, PDL,
        )  # fmt: skip
    return gate, up
