"""The layer on the Triton backend (its interpreter) as a plan chooses it, in every mode."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import get_args

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from cpu_layer import mixed_adapters
from moegraft.backends import triton as backend
from moegraft.backends.triton import device
from moegraft.backends.triton.device import DeviceFacts
from moegraft.call import Mode
from moegraft.errors import PlanError
from moegraft.problem import Problem
from moegraft.sites import expert_site
from moegraft.streams import beside
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_bit_equal,
    assert_case,
    layer_case,
    random_factors,
)
from moegraft.types import LoraFactor, SiteFactors

MODES: tuple[Mode, ...] = get_args(Mode)


def case_of(layout: str = "gate_first", activation: str = "silu", num_tokens: int = 6) -> LayerCase:
    """Return a case with every kind of adapter."""
    site = expert_site("experts", 5, 24, 20, LAYOUTS[layout])
    return layer_case(
        num_tokens,
        mixed_adapters(site, torch.float32),
        [-1, 0, 1, 2, 3, 4],
        layout=LAYOUTS[layout],
        activation=ACTIVATIONS[activation],
        biases=True,
        minus_ones=0.1,
        scale=2.5,
    )


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "base"])
@pytest.mark.parametrize(
    ("layout", "activation"), [("gate_first", "silu"), ("interleaved_in_major", "clamped")]
)
def test_every_mode_matches_the_reference(layout: str, activation: str, mode: Mode) -> None:
    case = case_of(layout, activation)
    layer = case.layer("triton", mode)
    assert layer.plan(*case.routing.topk_ids.shape).mode == mode
    assert_case(case, layer)


def normed(case: LayerCase) -> LayerCase:
    """The case with a norm behind each expert, which no smaller part of a row can stand for."""

    def norm(y: torch.Tensor) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-3)

    return replace(case, weights=replace(case.weights, post_norm=norm))


@pytest.mark.parametrize("pieces", [False, True])
def test_a_norm_behind_each_expert_sees_base_and_delta(
    monkeypatch: pytest.MonkeyPatch, pieces: bool
) -> None:
    case = normed(case_of())
    layer = case.layer("triton")
    assert layer.plan(6, 2).mode == "serial"
    if pieces:
        monkeypatch.setattr("moegraft.backends.triton.normed.MAX_PAIRS", 6)
        monkeypatch.setattr("moegraft.backends.triton.fused.in_pieces.__defaults__", (6,))
    assert_case(case, layer)
    base = normed(replace(case_of(), token_slots=(-1,) * 6))
    assert_case(base, base.layer("triton", "base"))
    for mode in ("in_kernel", "fused_serial", "two_stream"):
        with pytest.raises(PlanError, match="norm behind"):
            case.layer("triton", mode)


@pytest.mark.parametrize("mode", ["in_kernel", "serial"])
def test_one_factor_serves_all_of_the_experts_that_the_adapter_has(mode: Mode) -> None:
    site = expert_site("experts", 5, 24, 20)
    plain = [random_factors(site, 3, experts=experts) for experts in (None, [3, 0])]
    once = [
        SiteFactors(
            {
                name: LoraFactor(f.lora_A[:1], f.lora_B[:1], f.scale)
                for name, f in factors.projections.items()
            },
            factors.expert_map,
        )
        for factors in plain
    ]
    case = layer_case(6, [*once, *plain], [-1, 0, 1, 2, 3])
    assert_case(case, case.layer("triton", mode))


def test_an_activation_of_the_hosts_own_runs_in_mode_serial_by_default() -> None:
    case = case_of("gate_first", "custom")
    layer = case.layer("triton")
    assert layer.plan(*case.routing.topk_ids.shape).mode == "serial"
    assert_case(case, layer)
    two_stream = case.run(case.layer("triton", "two_stream"))
    assert_bit_equal(two_stream, case.run(layer))
    base = case.layer("triton", "base")
    assert_bit_equal(case.run(base, base=True), case.run(layer, base=True))


@pytest.mark.parametrize("mode", ["in_kernel", "fused_serial"])
def test_fused_modes_refuse_an_activation_that_is_a_function(mode: Mode) -> None:
    with pytest.raises(PlanError, match="activation given as a function"):
        case_of("gate_first", "custom").layer("triton", mode)


@pytest.mark.parametrize(
    ("capability", "mode", "overlaps"),
    [
        (90, None, True),
        (90, "in_kernel", True),
        (90, "fused_serial", False),
        (90, "two_stream", False),
        (80, None, False),
        (80, "base", False),
    ],
)
def test_few_tokens_merge_the_delta_into_a_gemm_only_where_launches_overlap(
    monkeypatch: pytest.MonkeyPatch, capability: int, mode: Mode | None, overlaps: bool
) -> None:
    facts = DeviceFacts("GPU", capability, 132, 232_448)
    monkeypatch.setattr(device, "device_facts", lambda: facts)
    problem = Problem(1, 8, 128, 2048, 768, True, "bfloat16", "unquantized", "cuda", 16)
    run = backend.choose(problem, mode).run
    config = getattr(run, "plain", run).keywords["config"]
    assert (config.pdl, config.merged) == (overlaps, overlaps)


def test_the_plan_says_when_two_stream_runs_on_one() -> None:
    layer = case_of().layer("triton", "two_stream")
    assert "on one stream" not in layer.plan(256, 2).explain()
    assert "on one stream (T > 256)" in layer.plan(257, 2).explain()


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens: int) -> None:
    case = case_of(num_tokens=num_tokens)
    assert_case(case, case.layer("triton"))
    assert_case(case, case.layer("triton", "two_stream"))


def test_work_beside_runs_before_the_body_on_a_cpu() -> None:
    done: list[str] = []
    with beside(torch.device("cpu"), lambda: done.append("work")):
        done.append("body")
    assert done == ["work", "body"]
