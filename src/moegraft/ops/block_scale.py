"""The routed op for quantised weights: the contract of :func:`routed_moe_lora`, and scales.

The deltas are the caller's, computed on unquantised activations: no scale of the base multiplies
them. ``activation_lora_input`` gets h before it is rounded for a W8A8 product.
"""

from __future__ import annotations

from typing import Unpack

import torch

from moegraft.errors import MoegraftError
from moegraft.ops.routed_core import Gemms, RoutedOptions, UnfinalizedRows, run


def fp8_block_scale_routed_moe_lora(
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    *,
    quantise_activations: bool = True,
    **options: Unpack[RoutedOptions],
) -> torch.Tensor | UnfinalizedRows:
    """Run the experts from FP8 weights with a scale per 128 x 128.

    Args:
        topk_ids: as of :func:`routed_moe_lora`.
        hidden_states: ``[T, H]``, bf16, fp16 or fp32, not quantised.
        gemm1_weights: e4m3 ``[E, 2I, H]``, gate first (or ``up_first=True``).
        gemm1_weights_scale: fp32 ``[E, 2 * ceil(I / 128), ceil(H / 128)]``, gate's then up's.
        gemm2_weights: e4m3 ``[E, H, I]``.
        gemm2_weights_scale: fp32 ``[E, ceil(H / 128), ceil(I / 128)]``.
        quantise_activations: what the base products read is rounded to e4m3, per token and 128
            columns (W8A8); False = as it is (W8A16).
        **options: as of :func:`routed_moe_lora`.

    Returns:
        As :func:`routed_moe_lora`.

    Raises:
        As :func:`routed_moe_lora`; PlanError where no backend has products for the format.
    """
    name = "fp8-block" if quantise_activations else "fp8-block-w8a16"
    scales = (gemm1_weights_scale, gemm2_weights_scale)
    return run(topk_ids, hidden_states, Gemms(gemm1_weights, gemm2_weights, name, scales), options)


def fp4_block_scale_routed_moe_lora(
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    *,
    gemm1_global_scale: torch.Tensor | None = None,
    gemm2_global_scale: torch.Tensor | None = None,
    **options: Unpack[RoutedOptions],
) -> torch.Tensor | UnfinalizedRows:
    """Run the experts from NVFP4 or MXFP4 weights, dequantised in the product (W4A16).

    Args:
        topk_ids: as of :func:`routed_moe_lora`.
        hidden_states: ``[T, H]``, bf16, fp16 or fp32.
        gemm1_weights: uint8 ``[E, 2I, H / 2]``, the even column in the low half of a byte.
        gemm1_weights_scale: NVFP4: e4m3 ``[E, 2I, H / 16]``; MXFP4: e8m0 as uint8
            ``[E, 2I, H / 32]``. Its dtype says which format it is.
        gemm2_weights: uint8 ``[E, H, I / 2]``.
        gemm2_weights_scale: likewise.
        gemm1_global_scale: NVFP4: fp32 ``[E, 2]``, gate's and up's in the order of the weights
            (``[E, 1]`` without a gate), or ``[E]`` for both; MXFP4: None.
        gemm2_global_scale: NVFP4: fp32 ``[E]``; MXFP4: None.
        **options: as of :func:`routed_moe_lora`.

    Returns:
        As :func:`routed_moe_lora`.

    Raises:
        As :func:`routed_moe_lora`; MoegraftError for only some of the scales of a format; PlanError
        where no backend has products for it.
    """
    whole = [s for s in (gemm1_global_scale, gemm2_global_scale) if s is not None]
    is_nvfp4 = gemm1_weights_scale.dtype == torch.float8_e4m3fn
    if len(whole) != (2 if is_nvfp4 else 0):
        raise MoegraftError(
            f"gemm1_weights_scale is {gemm1_weights_scale.dtype}, so the weights are "
            f"{'NVFP4 with two global scales' if is_nvfp4 else 'MXFP4 without global scales'}, but "
            f"{len(whole)} were given."
        )
    if whole and whole[0].dim() == 1:
        parts = 2 if gemm1_weights.shape[1] != gemm2_weights.shape[2] * 2 else 1
        whole[0] = whole[0][:, None].repeat(1, parts)
    name = "nvfp4" if is_nvfp4 else "mxfp4"
    scales = (gemm1_weights_scale, gemm2_weights_scale, *whole)
    return run(topk_ids, hidden_states, Gemms(gemm1_weights, gemm2_weights, name, scales), options)
