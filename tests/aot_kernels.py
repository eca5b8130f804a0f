"""Compile the GPU kernels for a target without a GPU; run as a script by test_triton_aot.py."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moegraft.backends.triton.block_sums import block_sums_kernel
from moegraft.backends.triton.combine import add_down_delta_kernel, combine_kernel
from moegraft.backends.triton.copy_factors import CopyKind, copy_factors_kernel, launch_options
from moegraft.backends.triton.expert_choice import choose_kernel
from moegraft.backends.triton.finalize import finalize_kernel
from moegraft.backends.triton.gate_up_activation import gate_up_activation_kernel
from moegraft.backends.triton.grouped_gemm import grouped_gemm_kernel
from moegraft.backends.triton.linear_lora import linear_lora_kernel
from moegraft.backends.triton.linear_split import linear_split_kernel
from moegraft.backends.triton.lora_expand import lora_expand_kernel
from moegraft.backends.triton.lora_shrink import lora_shrink_kernel
from moegraft.backends.triton.lora_shrink_expand import lora_shrink_expand_kernel
from moegraft.backends.triton.pair_activation import add_delta_kernel, pair_activation_kernel
from moegraft.backends.triton.pairs import number_rows_kernel, unpack_kernel
from moegraft.backends.triton.prefill.block_groups import block_groups_kernel
from moegraft.backends.triton.prefill.down import prefill_down_kernel
from moegraft.backends.triton.prefill.gate_up import prefill_gate_up_kernel
from moegraft.backends.triton.prefill.group_shrink import group_shrink_kernel
from moegraft.backends.triton.prefill.route import (
    route_count_kernel,
    route_place_kernel,
    route_scan_kernel,
)
from moegraft.backends.triton.prefill.token_order import token_order_kernel
from moegraft.backends.triton.route import route_kernel
from moegraft.backends.triton.token_segments import token_segments_kernel
from moegraft.backends.triton.weights.rows import base_rows_kernel

POINTERS = {
    "delta_ptr": "*fp32",
    "gate_up_ptr": "*fp32",
    "s_ptr": "*fp32",
    "y_ptr": "*fp32",
    "topk_weights_ptr": "*fp32",
    "rows_ptr": "*bf16",
    "weights_ptr": "*bf16",
    "records_ptr": "*i64",
    "places_ptr": "*i64",
    "groups_ptr": "*i64",
    "a_groups_ptr": "*i64",
    "b_groups_ptr": "*i64",
    **{f"records{i}_ptr": "*i64" for i in range(4)},
}
BF16 = ("x_ptr", "weight_ptr", "bias_ptr", "h_ptr", "arena_ptr", "out_ptr")
BF16 += tuple(f"out{i}_ptr" for i in range(4))
CONSTANTS: dict[str, Any] = {
    "TOP_K": 8, "GATE_START": 0, "UP_START": 768, "COLUMN_STEP": 1, "GATED": True,
    "HAS_BIAS": False, "KIND": "silu", "ALPHA": 1.0, "HAS_LIMIT": False, "LIMIT": 0.0,
    "UP_SHIFT": 0.0, "UNIT": 8, "EVEN_K": True, "X_BY_TOKEN": True,
    "EVEN_N": True, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_R": 16, "BLOCK_H": 256,
    "BLOCK_I": 8, "BLOCK_J": 512, "BLOCK_E": 8, "CHOICES": 8, "NUM_EXPERTS": 128,
    "AFTER_H": True, "DOWN": False, "BLOCK_ROWS": 16,
    "WEIGHTED": True, "SWAP": False, "UNITS": False, "SPLITS": 1, "DELTA_EVEN_K": True,
    "DELTA_EVEN_N": True, "DELTA_M": 16, "DELTA_R": 16, "DELTA_K": 128, "DELTA_N": 128,
    "DELTA_STAGES": 4, "STAGES": 4,
    "SIDES": 2, "DELTA": "some", "DENSE": False, "HAS_SLOTS": True, "PDL": True,
    "weight_stride_k": 1, "NUM_PROJECTIONS": 3, "MANY_RANKS": False, "ROWS": 16, "BLOCK_S": 32,
    "BLOCK_G": 128, "BY_TOKEN": True, "IN_PLACE": True, "LOCAL_ONLY": True, "HAS_DELTA": True,
    "BY_PAIR": False, "BLOCK": 256, "EARLY": True, "STEPS": 1, "SHARES": 4, "PROJECTIONS": 3,
    "BY_ROW": False, "BINS": 256, "CHUNK": 1024, "HAS_ORDER": True, "BLOCK_C": 64,
    "FORMAT": "unquantized", "WORD_UNIT": 4, "OUT_PARTS": 1, "GATE_SCALES": 0, "UP_SCALES": 6,
    "GATE_GLOBAL": 0, "UP_GLOBAL": 1, "STORE_H": True, "STORE_ROWS": False, "GROUPS": 0,
    "EIGHTS": False,
    # Only there with quantised weights.
    **dict.fromkeys(("base_ptr", "base_scales_ptr", "scales_ptr", "globals_ptr", "h_base_ptr")),
    **dict.fromkeys(("base_stride", "scale_stride_e", "scale_stride_n", "scale_stride_k")),
    **dict.fromkeys(("global_stride", "h_base_scales_ptr", "h_base_stride", "source_ptr")),
    **dict.fromkeys(("source_columns", "source_stride", "base_programs")),
}  # fmt: skip


def compile_kernel(kernel: Any, capability: int, **changes: Any) -> dict[str, Any]:
    """Compile one kernel; return its artefacts by name.

    ``changes`` are constants, or the types of pointers.
    """
    constants = {k: v for k, v in {**CONSTANTS, **changes}.items() if k in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr") and name in changes:
            signature[name] = constants.pop(name)
        elif name in constants:
            signature[name] = "constexpr"
        elif name == "weight_desc":
            shape = f"{constants['BLOCK_N']},{constants['BLOCK_K']}"
            signature[name] = f"tensordesc<bf16[{shape}]>"
        elif name in BF16:
            signature[name] = "*bf16"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*i32")
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": changes.get("num_warps", 4), "num_stages": 3}
    return triton.compile(source, target=target, options=options).asm


def main(capability: int) -> None:
    """Compile every kernel, with and without adapters, and print its name."""
    for delta in ("none", "some", "all"):
        for swap in (False, True):
            compile_kernel(gate_up_activation_kernel, capability, DELTA=delta, SWAP=swap)
        print(f"gate_up_activation delta={delta}")
    for with_delta in (False, True):
        for swap in (False, True):
            compile_kernel(grouped_gemm_kernel, capability, HAS_DELTA=with_delta, SWAP=swap)
    compile_kernel(gate_up_activation_kernel, capability, UNITS=True, SPLITS=4)
    compile_kernel(grouped_gemm_kernel, capability, HAS_DELTA=False, UNITS=True, SPLITS=4)
    compile_kernel(grouped_gemm_kernel, capability, HAS_DELTA=False, AFTER_H=False)
    print("grouped_gemm")
    copies(capability)
    compile_kernel(
        block_sums_kernel, capability, words_ptr="*i64", weights_ptr="*i64", blocks_ptr="*i64",
        sums_ptr="*i64", BLOCK=32768, STEP=1024,
    )  # fmt: skip
    print("block_sums")
    compile_kernel(gate_up_activation_kernel, capability, DELTA="all", delta_ptr="*bf16")
    for dense in (True, False):
        compile_kernel(route_kernel, capability, DENSE=dense)
        compile_kernel(route_kernel, capability, DENSE=dense, topk_ids_ptr="*i64")
    for block_r, down in ((16, False), (64, True)):
        compile_kernel(lora_shrink_expand_kernel, capability, BLOCK_R=block_r, DOWN=down)
    for with_delta in (True, False):
        compile_kernel(finalize_kernel, capability, DELTA=with_delta, BY_ROW=not with_delta)
    print("route, lora_shrink_expand, finalize")
    for by_token in (True, False):
        compile_kernel(lora_shrink_kernel, capability, BY_TOKEN=by_token, BLOCK_R=64)
        compile_kernel(lora_expand_kernel, capability, IN_PLACE=by_token, out_ptr="*fp32")
    compile_kernel(pair_activation_kernel, capability, DELTA="none", LOCAL_ONLY=False)
    compile_kernel(pair_activation_kernel, capability, GATED=False, KIND="relu2")
    compile_kernel(add_delta_kernel, capability, out_ptr="*fp32")
    compile_kernel(combine_kernel, capability, HAS_DELTA=False, BY_PAIR=True, out_ptr="*fp32")
    print("lora_shrink, lora_expand, pair_activation, add_delta, combine")
    for ids, delta_type in (("*i32", "*bf16"), ("*i64", "*fp32")):
        types = {"topk_ids_ptr": ids, "pair_to_row_ptr": ids, "delta_ptr": delta_type}
        compile_kernel(combine_kernel, capability, **types)
        compile_kernel(add_down_delta_kernel, capability, HAS_IDS=True, **types)
        compile_kernel(pair_activation_kernel, capability, DELTA="all", **types)
    compile_kernel(number_rows_kernel, capability)
    compile_kernel(unpack_kernel, capability, weights_ptr="*fp32")
    choose = {"logits_ptr": "*bf16", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "BLOCK_K": 8}
    choose |= {"RENORMALISE": True, "TOP2": True, "HAS_BIAS": True, "num_warps": 1}
    for groups, packed in ((8, True), (1, False)):
        choose |= {"NUM_GROUPS": groups, "TOP_GROUPS": (groups + 1) // 2, "PACKED": packed}
        choose |= {"BLOCK_G": groups, "BLOCK_M": 256 // groups, "SIGMOID": packed}
        compile_kernel(choose_kernel, capability, **choose)
    print("combine, add_down_delta, pair_activation, number_rows, unpack")
    compile_kernel(token_segments_kernel, capability, BLOCK_I=16, BLOCK_J=64)
    compile_kernel(linear_lora_kernel, capability)
    compile_kernel(linear_lora_kernel, capability, NUM_PROJECTIONS=1, EVEN_K=False)
    compile_kernel(linear_lora_kernel, capability, NUM_PROJECTIONS=4, MANY_RANKS=True)
    compile_kernel(linear_lora_kernel, capability, BLOCK_M=64)
    compile_kernel(linear_split_kernel, capability, BLOCK_K=256, SPLITS=8)
    compile_kernel(linear_split_kernel, capability, BLOCK_R=128, STEPS=2, SPLITS=8, EARLY=False)
    fp32 = {"x_ptr": "*fp32", **{f"out{i}_ptr": "*fp32" for i in range(4)}}
    compile_kernel(linear_split_kernel, capability, STEPS=4, SPLITS=8, EVEN_K=False, **fp32)
    print("token_segments, linear_lora")
    quantised(capability)
    prefill(capability)


def copies(capability: int) -> None:
    """Compile the copies of updates; aligned ones read and write 16 bytes at once."""
    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    forms = ((False, 1), (False, 9), (True, 4), (True, 8), (True, 16), (True, 64))
    for given, target, (columns, rows) in product(dtypes, dtypes, forms):
        for unit in (1, min(rows, 16 // given.itemsize) if columns else 16 // given.itemsize):
            options = launch_options(CopyKind.of(given, columns, unit, rows), unit, target)
            integer = "*i16" if target.itemsize == 2 else "*i32"
            ptx = compile_kernel(
                copy_factors_kernel, capability, addresses_ptr="*i64", tiles_ptr="*i64",
                target_ptr=integer if given == target else types[target], **options,
            )["ptx"]  # fmt: skip
            assert "st.global.v4" in ptx, f"narrow stores: {options}"
            if unit * given.itemsize == 16:
                assert "ld.global.v4" in ptx, f"narrow loads: {options}"
    print("copy_factors")


def quantised(capability: int) -> None:
    """Compile the GEMMs over quantised weights, and what makes their activations."""
    strides = {"scale_stride_e": 192, "scale_stride_n": 16, "scale_stride_k": 1}
    rows = {"base_stride": 2048, "h_base_stride": 768, "STORE_ROWS": True}
    types = {"weight_ptr": "*fp8e4nv", "base_ptr": "*fp8e4nv", "base_scales_ptr": "*fp32"}
    types |= {"scales_ptr": "*fp32", "h_base_ptr": "*fp8e4nv", "h_base_scales_ptr": "*fp32"}
    forms: list[dict[str, Any]] = [{**types, **rows, "FORMAT": "fp8-block", "SWAP": True}]
    types = {"weight_ptr": "*i32", "base_ptr": "*bf16", "scales_ptr": "*u8"}
    types |= {"h_base_ptr": "*bf16"}
    forms.append({**types, **rows, "FORMAT": "mxfp4", "SWAP": True})
    types |= {"globals_ptr": "*fp32", "global_stride": 2}  # type: ignore[dict-item]
    forms.append({**types, **rows, "FORMAT": "nvfp4", "SWAP": True})
    types = {"weight_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    for name in ("fp8-block-w8a16", "fp8-channel", "fp8-tensor"):
        forms.append({**types, "FORMAT": name})
    for form in forms:
        swap = form.get("SWAP", False)
        options = {**form, **strides, "BLOCK_N": 128 if swap else 64, "BLOCK_K": 128}
        compile_kernel(gate_up_activation_kernel, capability, **options)
        odd = {"EVEN_K": False, "GATED": False, "BLOCK_M": 64 if swap else 32}
        compile_kernel(grouped_gemm_kernel, capability, **options, **odd, HAS_DELTA=False)
    copy = {"source_ptr": "*bf16", "source_columns": 2048, "source_stride": 2048, "GROUPS": 16}
    copy |= {"base_ptr": "*fp8e4nv", "base_scales_ptr": "*fp32", "base_stride": 2048}
    compile_kernel(route_kernel, capability, **copy, base_programs=8)
    compile_kernel(base_rows_kernel, capability, **copy)
    del copy["base_scales_ptr"]
    for eights in (False, True):
        compile_kernel(base_rows_kernel, capability, **{**copy, "base_ptr": "*bf16"}, EIGHTS=eights)
    print("quantised: gate_up_activation, grouped_gemm, route, base_rows")


def prefill(capability: int) -> None:
    """Compile the kernels for many rows per expert, with their real tiles and warps."""
    tile = {"BLOCK_M": 128, "TAIL_M": 64, "BLOCK_N": 128, "h_ptr": "*bf16", "s_ptr": "*bf16"}
    for lora in (False, True):
        options = {**tile, "LORA": lora, "num_warps": 8}
        compile_kernel(prefill_gate_up_kernel, capability, **options)
        compile_kernel(
            prefill_down_kernel, capability, **{**options, "BLOCK_N": 256}, y_ptr="*bf16"
        )
    for sides in (1, 2):
        compile_kernel(
            group_shrink_kernel, capability, SIDES=sides, BLOCK_ROWS=128, s_ptr="*bf16",
            BLOCK_M=64, BLOCK_K=128, PASS=4 // sides, SHARES=2, GROUPS=8, BY_TOKEN=sides == 2,
        )  # fmt: skip
    compile_kernel(
        group_shrink_kernel, capability, SIDES=1, BLOCK_ROWS=128, s_ptr="*bf16", BLOCK_M=64,
        BLOCK_K=64, PASS=8, SHARES=2, GROUPS=2048, BY_TOKEN=True, EVEN_K=False,
    )  # fmt: skip
    for slots in (1, 8, 128):
        for block_m, padded in ((128, 128), (192, 256)):
            compile_kernel(
                block_groups_kernel, capability, SLOTS=slots, BLOCK_M=block_m, ROWS=padded,
                num_warps=1,
            )  # fmt: skip
    compile_kernel(token_order_kernel, capability, BINS=16)
    for ids in ("*i32", "*i64"):
        options = {"topk_ids_ptr": ids, "order_ptr": "*i64"}
        compile_kernel(route_count_kernel, capability, **options)
        for block_m, step in ((128, 128), (192, 16)):
            compile_kernel(
                route_place_kernel, capability, BLOCK_M=block_m, ROW_STEP=step, **options
            )
    compile_kernel(route_scan_kernel, capability)
    print("prefill: gate_up, down, group_shrink, block_groups, token_order, route")


if __name__ == "__main__":
    main(int(sys.argv[1]))
