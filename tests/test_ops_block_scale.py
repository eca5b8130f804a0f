"""The ops over quantised weights: the contract of the plain ones, with scales of the base."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moegraft import ops
from moegraft.errors import MoegraftError, PlanError, UnsupportedError
from moegraft.testing import (
    ACTIVATIONS,
    LayerCase,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    poisoned_empty,
)
from moegraft.types import WeightLayout
from ops_cases import check_case, interpreted, ops_case, routed, run_case, with_all_deltas

FORMATS = ["fp8-block", "fp8-block-w8a16", "nvfp4", "mxfp4"]
#: The kernels run on CPU tensors in Triton's interpreter.
each_backend = pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("triton", marks=interpreted)]
)
each_format = pytest.mark.parametrize("name", FORMATS)
#: Sizes with partial blocks of 128, 32 and 16.
SIZES: dict[str, Any] = {"hidden": 160, "intermediate": 144}


def case_of(name: str, **options: Any) -> LayerCase:
    return ops_case(weight_format=name, **{**SIZES, **options})


@each_format
@each_backend
@pytest.mark.parametrize("order", ["gate_first", "up_first", "no_gate"])
def test_rows_and_finalize_with_both_deltas_match_the_reference(
    name: str, order: Any, backend: str
) -> None:
    activation = ACTIVATIONS["relu2"] if order == "no_gate" else None
    case = case_of(name, layout=WeightLayout(order), activation=activation, scale=2.5)
    with poisoned_empty():
        found = with_all_deltas(case, backend)
    assert_close(found, case.reference(), torch.float32)
    base = routed(case, backend=backend)
    assert_delta_close(found, base, case.reference(), case.reference(base=True))


@each_format
@each_backend
def test_the_activation_for_the_callers_lora_is_not_rounded(name: str, backend: str) -> None:
    case = case_of(name, activation=ACTIVATIONS["clamped"])
    h = torch.full((7, 2, 144), torch.nan)
    routed(case, activation_lora_input=h, backend=backend)
    local = case.routing.topk_ids >= 0
    assert not h[~local].any() and bool(torch.isfinite(h).all())
    if name.startswith("fp8"):  # values of e4m3 have 3 bits behind the point: these have more
        mantissa = torch.frexp(h[local].double()).mantissa * 16
        assert bool((mantissa != mantissa.round()).any())


@each_format
def test_the_whole_layer_of_a_format_runs_eagerly_and_compiled(name: str) -> None:
    case = case_of(name, minus_ones=0.0)
    check_case(case, "cpu")

    def step(x: torch.Tensor) -> torch.Tensor:
        routing = case.routing
        return ops.moe_lora(x, routing.topk_ids, routing.topk_weights, case.weights)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_bit_equal(compiled(case.x), run_case(case, "cpu", None))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["mxfp4"])  # opcheck itself can't handle tensors of e4m3
def test_opcheck_finds_nothing(name: str) -> None:
    case = case_of(name)
    w, scales = case.weights, case.weights.scales
    assert scales is not None
    found = [s for s in (scales.gate_up, scales.down) if s is not None]
    found += [s for s in (scales.gate_up_global, scales.down_global) if s is not None]
    args = (
        case.x, case.routing.topk_ids, case.routing.topk_weights, w.gate_up, w.down, name, found,
        torch.float32, None, "gate_first", "silu", None, 1.0, 0.0, 0, 1.0, 0, 0, True, "cpu",
        torch.zeros_like(case.x), None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.moegraft.routed_moe_lora, args)


def test_one_global_scale_per_expert_stands_for_gate_and_up() -> None:
    case = case_of("nvfp4")
    scales = case.weights.scales
    assert scales is not None and scales.gate_up_global is not None
    scales.gate_up_global[:, 1] = scales.gate_up_global[:, 0]
    w, routing = case.weights, case.routing
    tensors = (routing.topk_ids, case.x, w.gate_up, scales.gate_up, w.down, scales.down)
    one = ops.fp4_block_scale_routed_moe_lora(
        *tensors,
        gemm1_global_scale=scales.gate_up_global[:, 0].clone(),
        gemm2_global_scale=scales.down_global,
        topk_weights=routing.topk_weights,
    )
    assert_bit_equal(one, routed(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_format
def test_16_bit_activations(name: str, dtype: torch.dtype) -> None:
    case = case_of(name, dtype=dtype)
    out = routed(case, backend="cpu")
    assert out.dtype == dtype
    assert_close(out, case.reference(base=True), dtype)


def test_what_does_not_fit_a_format_is_refused() -> None:
    case = case_of("nvfp4")
    w, scales = case.weights, case.weights.scales
    assert scales is not None
    tensors = (case.routing.topk_ids, case.x, w.gate_up, scales.gate_up, w.down, scales.down)
    weights = {"topk_weights": case.routing.topk_weights}
    with pytest.raises(MoegraftError, match="NVFP4 with two global scales, but 0"):
        ops.fp4_block_scale_routed_moe_lora(*tensors, **weights)
    with pytest.raises(MoegraftError, match=r"gemm1_weights is torch.uint8; fp8-block"):
        ops.fp8_block_scale_routed_moe_lora(*tensors, **weights)
    with pytest.raises(MoegraftError, match="scales of gate_up are"):
        ops.fp8_block_scale_routed_moe_lora(*_with_short_scales(), **weights)
    with pytest.raises(UnsupportedError, match="quantised, or shuffled bytes"):
        ops.routed_moe_lora(case.routing.topk_ids, case.x, w.gate_up, w.down, **weights)
    with pytest.raises(PlanError, match="cpp: "):
        routed(case, backend="cpp")


def _with_short_scales() -> tuple[torch.Tensor, ...]:
    case = case_of("fp8-block")
    w, scales = case.weights, case.weights.scales
    assert scales is not None
    short = scales.gate_up[:, :-1]
    return (case.routing.topk_ids, case.x, w.gate_up, short, w.down, scales.down)


def test_a_norm_behind_experts_is_not_lost_in_a_compiled_graph() -> None:
    case = ops_case()
    weights = replace(case.weights, post_norm=torch.nn.functional.normalize)

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.moe_lora(x, case.routing.topk_ids, case.routing.topk_weights, weights)

    torch.compiler.reset()
    with pytest.raises(Exception, match="norm behind experts"):
        torch.compile(step, fullgraph=True, backend="eager")(case.x)
    torch.compiler.reset()
