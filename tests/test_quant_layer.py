"""Layers of every weight format, on the CPU, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moegraft.errors import MoegraftError, PlanError
from moegraft.plan import make_plan
from moegraft.problem import Problem
from moegraft.quant import FORMATS
from moegraft.quant.experts import expert_matrix, quantise_experts
from moegraft.sites import expert_site
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_case,
    layer_case,
    random_factors,
    random_weights,
)


def quantised_case(name: str, **options: Any) -> LayerCase:
    """A case with quantised weights and every kind of adapter, H and I of partial blocks."""
    layout = options.pop("layout", LAYOUTS["gate_first"])
    site = expert_site("experts", 5, 160, 144, layout)
    adapters = [
        None,
        random_factors(site, 3, "fused", scale=0.25, seed=1),
        random_factors(site, 12, "separate", experts=[4, 0, 2], scale=8.0, seed=2),
        random_factors(site, 16, "shared_outer", seed=4),
    ]
    return layer_case(
        7,
        adapters,
        [-1, 0, 1, 2, 3, 1, -1],
        hidden=160,
        intermediate=144,
        layout=layout,
        biases=True,
        weight_format=name,
        **options,
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("layout", "activation"), [("gate_first", "silu"), ("up_first", "silu"), ("no_gate", "relu2")]
)
def test_a_layer_of_every_format_matches_the_reference(
    name: str, layout: str, activation: str
) -> None:
    case = quantised_case(
        name, layout=LAYOUTS[layout], activation=ACTIVATIONS[activation], minus_ones=0.1, scale=2.5
    )
    layer = case.layer()
    assert name in layer.plan(7, 2).explain()
    assert_case(case, layer)


def test_interleaved_rows_with_the_clamp_of_gpt_oss() -> None:
    case = quantised_case("mxfp4", layout=LAYOUTS["interleaved"], activation=ACTIVATIONS["clamped"])
    assert_case(case, case.layer())
    with pytest.raises(MoegraftError, match="mix gate and up"):
        quantise_experts(random_weights(2, 32, 32, LAYOUTS["interleaved"]), "fp8-block")


@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_inputs_read_the_exact_weights(name: str) -> None:
    weights = quantise_experts(random_weights(2, 160, 144), name)
    case = layer_case(160, [], [-1] * 160, hidden=160, intermediate=144, num_experts=2, top_k=1)
    stages = case.layer().plan(160, 1).stages
    ids = torch.ones(160, 1, dtype=torch.int32)
    perm = stages.permute(ids, None, 2, 0)
    found = stages.gate_up(torch.eye(160), weights, perm)
    assert torch.equal(found, expert_matrix(weights, "gate_up", 1).T)  # 0 may lose its sign


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("name", ["fp8-block", "nvfp4"])
def test_lora_reads_activations_as_they_are_whatever_their_size(name: str, scale: float) -> None:
    case = quantised_case(name, activation=ACTIVATIONS["silu"])
    case = replace(case, x=case.x * scale)
    assert_case(case, case.layer())


def test_gpu_backends_refuse_by_name_when_the_layer_is_built() -> None:
    problem = Problem.of(quantise_experts(random_weights(2, 32, 32), "nvfp4"), 4, 2)
    assert problem.dtype == "float32" and problem.weight_format == "nvfp4"
    pytest.importorskip("triton")
    with pytest.raises(PlanError, match=r"triton: .*(runs on NVIDIA|need a Blackwell GPU)"):
        make_plan(replace(problem, weight_format="nvfp4-w4a4"), "triton")


def test_gpu_backends_refuse_a_format_that_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    odd = replace(FORMATS["nvfp4"], name="fp4-24", block=(3, 24))
    monkeypatch.setattr("moegraft.quant.formats.FORMATS", {**FORMATS, "fp4-24": odd})
    problem = Problem.of(quantise_experts(random_weights(2, 32, 32), "fp4-24"), 4, 2)
    with pytest.raises(PlanError, match=r"triton: .*(runs on NVIDIA|'fp4-24' has no kernels)"):
        make_plan(problem, "triton")


def test_experts_without_tokens_are_never_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quantised_case("nvfp4")
    used: list[int] = []
    real = expert_matrix

    def counting(weights, side, expert, dtype=torch.float32):  # type: ignore[no-untyped-def]
        used.append(expert)
        return real(weights, side, expert, dtype)

    monkeypatch.setattr("moegraft.backends.cpu.quantised.expert_matrix", counting)
    case.run(case.layer())
    routed = sorted({int(e) for e in case.routing.topk_ids.flatten() if e >= 0})
    assert sorted(used) == sorted(routed * 2)
