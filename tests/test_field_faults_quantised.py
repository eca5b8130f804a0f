"""Kinds of fault around quantised bases that users of MoE-LoRA systems have met.

``docs/field-faults.md`` lists all kinds and where each is tested; many are in other files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moegraft
from families import adapter_for
from moegraft.adapters import bind, make_source
from moegraft.adapters.merge import merge
from moegraft.errors import AdapterError, PlanError
from moegraft.hosts.transformers import load_quantised, model_spec
from moegraft.layer import MoeLoraLayer
from moegraft.plan import make_plan
from moegraft.problem import Problem
from moegraft.quant import FORMATS, format_of
from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import dequantise_experts, quantise_experts
from moegraft.quant.matrices import dequantise, quantise
from moegraft.quant.write import quantise_checkpoint
from moegraft.sites import expert_site
from moegraft.testing import (
    LAYOUTS,
    LayerCase,
    assert_case,
    assert_close,
    layer_case,
    random_factors,
    random_weights,
)
from moegraft.types import LoraFactor, SiteFactors, WeightLayout
from quantised_models import make_model, save

SITE = expert_site("experts", 4, 128, 128)


def case_of(
    name: str | None,
    dtype: torch.dtype = torch.float32,
    layout: WeightLayout | None = None,
    factors: SiteFactors | None = None,
) -> LayerCase:
    """Six tokens, four of which use an adapter of rank 16, over a base of some format."""
    factors = factors or random_factors(SITE, 16, dtype=dtype)
    sizes: dict[str, Any] = dict(num_experts=4, hidden=128, intermediate=128, layout=layout)
    return layer_case(6, [factors], [0, -1, 0, 0, -1, 0], dtype=dtype, weight_format=name, **sizes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_lora_reads_the_input_of_both_products_before_it_is_quantised(
    name: str, scale: float
) -> None:
    case = case_of(name)
    case = replace(case, x=case.x / case.x.abs().max() * scale)
    assert_case(case, case.layer())  # the delta alone, to the tolerance of fp32


def test_lora_on_quantised_activations_would_be_seen() -> None:
    case = case_of("fp8-block")
    rounded = rounded_activations(case.x, format_of("fp8-block"))
    with pytest.raises(AssertionError):
        assert_close(rounded, case.x, torch.float32)
    with pytest.raises(AssertionError):
        wrong = replace(case, x=rounded, weights=dequantise_experts(case.weights))
        assert_close(wrong.run(wrong.layer()), case.reference(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_16_bit_adapters_of_rank_16_run_over_every_format(name: str, dtype: torch.dtype) -> None:
    case = case_of(name, dtype)
    assert case.weights.dtype == dtype
    assert_case(case, case.layer())


@pytest.mark.parametrize("name", FORMATS)
def test_deltas_of_gate_and_up_follow_a_base_that_holds_up_first(name: str) -> None:
    gate_first = case_of(name)
    halves = gate_first.weights.gate_up.chunk(2, 1)
    scales = gate_first.weights.scales
    assert scales is not None
    whole = scales.gate_up_global
    swapped = replace(
        gate_first.weights,
        gate_up=torch.cat([halves[1], halves[0]], 1),
        layout=WeightLayout("up_first"),
        scales=replace(
            scales,
            gate_up=torch.cat([*scales.gate_up.chunk(2, 1)[::-1]], 1),
            gate_up_global=None if whole is None else whole.flip(1),
        ),
    )
    for projections in (None, ["gate"], ["up"]):
        factors = random_factors(SITE, 16, projections=projections)
        one = replace(gate_first, adapters=(factors,))
        other = replace(one, weights=swapped)
        torch.testing.assert_close(other.run(other.layer()), one.run(one.layer()))
        assert_case(other, other.layer())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_an_adapter_that_a_merge_into_4_bits_would_lose_is_served_in_full(name: str) -> None:
    plain = case_of(None)
    small = random_factors(SITE, 16)
    tiny = SiteFactors(
        {k: LoraFactor(f.lora_A, f.lora_B, f.scale * 2e-3) for k, f in small.projections.items()}
    )
    found, down = format_of(name), plain.weights.down[0]
    factor = tiny.projections["down"]
    delta = factor.scale * factor.lora_B[0] @ factor.lora_A[0]
    stored = dequantise(quantise(down, found), found)
    merged = dequantise(quantise(stored + delta, found), found) - stored
    assert (merged - delta).norm() > 0.5 * delta.norm()
    case = case_of(name, factors=tiny)
    served = case.run(case.layer()) - case.run(case.layer(), base=True)
    exact = case.reference() - case.reference(base=True)
    assert 0 < (served - exact).norm() < 1e-3 * exact.norm()  # what fp32 sums leave of it


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4"])
def test_a_merge_into_quantised_weights_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save(make_model("qwen3_moe"), tmp_path / "plain")
    quantise_checkpoint(folder, tmp_path / "q", name)
    spec = model_spec(make_model("qwen3_moe"))
    bound = bind(make_source(adapter_for(spec, 0), {"r": 2}), spec)
    with pytest.raises(AdapterError, match=r"is quantised.*use the checkpoint that"):
        merge(tmp_path / "q", bound, spec, tmp_path / "out")


def test_a_backend_is_chosen_or_refused_when_the_layer_is_built() -> None:
    weights = quantise_experts(random_weights(4, 32, 32), "nvfp4")
    plan = MoeLoraLayer(weights).plan(4, 2)
    assert plan.backend == "cpu" and "nvfp4" in plan.explain()
    with pytest.raises(PlanError, match="cpp: "):
        MoeLoraLayer(weights, backend="cpp")
    on_gpu = replace(Problem.of(weights, 4, 2), device_type="cuda")
    with pytest.raises(PlanError, match=r"No backend can.*nvfp4.*cpu: .*triton: "):
        make_plan(on_gpu)


def test_a_new_format_runs_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(format_of("nvfp4"), name="fp4-24", block=(3, 24))
    monkeypatch.setattr("moegraft.quant.formats.FORMATS", {**FORMATS, "fp4-24": odd})
    case = case_of("fp4-24")
    assert case.weights.scales is not None
    assert case.weights.scales.down.shape == (4, 43, 6)
    assert_case(case, case.layer())


@pytest.mark.parametrize("name", [None, "fp8-block", "nvfp4", "mxfp4"])
def test_every_format_reaches_our_layers_in_the_host(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model("qwen3_moe", torch.bfloat16), tmp_path / "plain")
    if name is not None:
        quantise_checkpoint(folder, tmp_path / "q", name)
        folder = tmp_path / "q"
    ran: list[str] = []
    run = MoeLoraLayer.__call__

    def counting(layer: MoeLoraLayer, *args: Any) -> torch.Tensor:
        ran.append(layer.weights.weight_format)
        return run(layer, *args)

    monkeypatch.setattr(MoeLoraLayer, "__call__", counting)
    graft = moegraft.attach(load_quantised(folder))
    spec = replace(graft.spec, sites=tuple(s for s in graft.spec.sites if s.kind == "experts"))
    graft.load_tensors("a", adapter_for(spec, 0), {"r": 2, "lora_alpha": 40})
    ids = torch.arange(3, 9)[None].repeat(2, 1)
    logits = graft.forward(input_ids=ids, adapters=["a", None]).logits
    assert ran == [name or "unquantized"] * 2
    assert (logits[0] - logits[1]).norm() > 0.05 * logits[1].norm()


def test_every_order_that_blocks_can_have_is_served() -> None:
    for name, found in FORMATS.items():
        for layout in ("gate_first", "up_first", "no_gate", "interleaved"):
            if layout == "interleaved" and found.block[0] != 1:
                continue
            site = expert_site("experts", 4, 128, 128, LAYOUTS[layout])
            case = case_of(name, layout=LAYOUTS[layout], factors=random_factors(site, 3))
            assert_case(case, case.layer())
