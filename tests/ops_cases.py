"""What the tests of the ops share on CPU and GPU: cases, and the delta that a host computes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import compiled
from moegraft import ops
from moegraft.factor_table import SiteTable
from moegraft.reference import lora_delta
from moegraft.sites import expert_site
from moegraft.testing import (
    LayerCase,
    assert_close,
    assert_delta_close,
    layer_case,
    poisoned_empty,
    random_factors,
)
from moegraft.types import Activation, SiteFactors, WeightLayout

SIZES: dict[str, Any] = {"num_experts": 5, "hidden": 40, "intermediate": 24}
#: Sizes of the cases on a GPU.
GPU_SIZES: dict[str, Any] = {"num_experts": 8, "hidden": 256, "intermediate": 128}
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start"
)
#: The kernels run on CPU tensors in Triton's interpreter.
BACKENDS = [
    "cpu",
    pytest.param("cpp", marks=compiled.needed),
    pytest.param("triton", marks=interpreted),
]


def ops_case(
    num_tokens: int = 7,
    layout: WeightLayout | None = None,
    activation: Activation | None = None,
    adapters: list[SiteFactors | None] | None = None,
    **options: Any,
) -> LayerCase:
    """A case with mixed adapters and -1 ids, whose weights are finite and bf16 values."""
    layout = layout or WeightLayout()
    sizes = {**SIZES, **{k: v for k, v in options.items() if k in SIZES}}
    dtype = options.get("dtype", torch.float32)
    site = expert_site(
        "experts", sizes["num_experts"], sizes["hidden"], sizes["intermediate"], layout
    )
    if adapters is None:
        adapters = [
            random_factors(site, 3, "fused", seed=1, dtype=dtype),
            random_factors(site, 20, "separate", experts=[0, 3], seed=2, dtype=dtype),
            None,
            random_factors(site, 5, "shared_outer", seed=3, dtype=dtype),
        ]
    options = {"minus_ones": 0.2, **SIZES, **options}
    case = layer_case(
        num_tokens, adapters, [0, 1, -1, 3, 2], layout=layout, activation=activation, **options
    )
    weights = case.routing.topk_weights.nan_to_num(7.0).to(torch.bfloat16).float()
    object.__setattr__(case.routing, "topk_weights", weights)
    return case


@dataclass(frozen=True)
class HostDelta:
    """What an engine's own LoRA kernels hand to the op, for a case.

    Attributes:
        gate_up: fp32 ``[T, K, 2I]`` as gate | up; NaN where a pair is not local.
        case: whose.
    """

    gate_up: torch.Tensor
    case: LayerCase

    @staticmethod
    def of(case: LayerCase) -> HostDelta:
        """Compute the delta of gate and up, pair by pair."""
        sides = ("gate", "up") if case.weights.layout.gated else ("up",)
        width = case.weights.intermediate
        found = torch.full((*case.routing.topk_ids.shape, width * len(sides)), torch.nan)
        for t, k, entry, adapter in _local_pairs(case):
            x = case.x[t].cpu().float()
            for i, side in enumerate(sides):
                factor = None if adapter is None else adapter.projections.get(side)
                found[t, k, i * width : (i + 1) * width] = _delta(factor, entry, x)
        return HostDelta(found.to(case.x.device), case)

    def down(self, h: torch.Tensor, weighted: bool = False) -> torch.Tensor:
        """Return fp32 ``[T, K, H]`` from h ``[T, K, I]``; NaN where a pair is not local."""
        case = self.case
        found = torch.full((*case.routing.topk_ids.shape, case.weights.hidden), torch.nan)
        for t, k, entry, adapter in _local_pairs(case):
            factor = None if adapter is None else adapter.projections.get("down")
            found[t, k] = _delta(factor, entry, h[t, k].cpu().float())
        if weighted:
            found = found * case.routing.topk_weights.cpu()[:, :, None]
        return found.to(h.device)


def _delta(factor: Any, entry: int, x: torch.Tensor) -> torch.Tensor | float:
    return 0.0 if factor is None else lora_delta(factor, entry, x)


def _local_pairs(case: LayerCase) -> Any:
    """Yield (t, k, the adapter's entry for the pair's expert, adapter) of local pairs."""
    num_tokens, top_k = case.routing.topk_ids.shape
    ids = case.routing.topk_ids.tolist()
    for t in range(num_tokens):
        slot = case.token_slots[t]
        adapter = case.adapters[slot] if slot >= 0 else None
        for k in range(top_k):
            expert = ids[t][k] - case.expert_offset
            if 0 <= expert < case.weights.num_experts:
                yield t, k, -1 if adapter is None else adapter.entry(expert), adapter


def routed(case: LayerCase, **options: Any) -> Any:
    """Call ``routed_moe_lora``, or its sibling for a format, with plain ids and weights."""
    defaults: dict[str, Any] = {
        "topk_weights": case.routing.topk_weights,
        "local_expert_offset": case.expert_offset,
        "up_first": case.weights.layout.gate_up_order == "up_first",
        "activation_type": case.weights.activation,
    }
    if options.get("do_finalize", True):
        defaults["routed_scaling_factor"] = case.scale
    ids, w, scales = case.routing.topk_ids, case.weights, case.weights.scales
    options = {**defaults, **options}
    if scales is None:
        return ops.routed_moe_lora(ids, case.x, w.gate_up, w.down, **options)
    tensors = (ids, case.x, w.gate_up, scales.gate_up, w.down, scales.down)
    if w.weight_format.startswith("fp8-block"):
        w8a8 = w.weight_format == "fp8-block"
        return ops.fp8_block_scale_routed_moe_lora(*tensors, quantise_activations=w8a8, **options)
    return ops.fp4_block_scale_routed_moe_lora(
        *tensors,
        gemm1_global_scale=scales.gate_up_global,
        gemm2_global_scale=scales.down_global,
        **options,
    )


def with_all_deltas(case: LayerCase, backend: str | None = None, **options: Any) -> torch.Tensor:
    """Run a case as an engine does: rows, then finalize with the delta of down."""
    delta = HostDelta.of(case)
    shape = (*case.routing.topk_ids.shape, case.weights.intermediate)
    h = torch.full(shape, torch.nan, dtype=case.x.dtype, device=case.x.device)
    rows = routed(
        case,
        gate_up_lora_delta=delta.gate_up,
        activation_lora_input=h,
        do_finalize=False,
        backend=backend,
        **options,
    )
    return ops.finalize_moe_lora(
        *rows,
        down_delta=delta.down(h),
        routed_scaling_factor=case.scale,
        backend=backend,
    )


def run_case(
    case: LayerCase, backend: str, slots: Any = "case", table: SiteTable | None = None
) -> torch.Tensor:
    """Run a case; ``slots`` None = base only."""
    with poisoned_empty():
        return ops.moe_lora(
            case.x,
            case.routing.topk_ids,
            case.routing.topk_weights,
            case.weights,
            table or case.table(),
            case.slots() if isinstance(slots, str) else slots,
            expert_offset=case.expert_offset,
            routed_scaling_factor=case.scale,
            backend=backend,
        )


def check_case(case: LayerCase, backend: str) -> None:
    """Compare a case with the reference: output, base, and the delta alone."""
    found, base = run_case(case, backend), run_case(case, backend, None)
    ref_with, ref_base = case.reference(), case.reference(base=True)
    assert_close(found, ref_with, case.x.dtype)
    assert_close(base, ref_base, case.x.dtype)
    assert_delta_close(found, base, ref_with, ref_base)


def gpu_case(num_tokens: int = 24, **options: Any) -> LayerCase:
    """A case in bf16 on the GPU."""
    return ops_case(num_tokens, device="cuda", **{"dtype": torch.bfloat16, **GPU_SIZES, **options})
