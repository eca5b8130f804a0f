"""Adapter files that PEFT wrote: each binds in full and means what PEFT's own merge says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from moegraft.adapters import (
    BindReport,
    BoundAdapter,
    ReadOptions,
    bind,
    check_bound,
    make_source,
)
from moegraft.hosts.transformers import model_spec
from moegraft.testing import assert_bit_equal, relative_error
from tiny import EXPERTS, MAGNITUDE, bound_case

TOLERANCE = 1e-5


def bound_tensors(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], model: str = "qwen3_moe"
) -> BoundAdapter:
    """Live tensors bound in full to a tiny model."""
    spec = tiny.spec_of(model)
    bound = bind(make_source(tensors, config), spec)
    check_bound(bound.report, spec)
    return bound


def deltas_of(bound: BoundAdapter, model: str = "qwen3_moe") -> dict[str, torch.Tensor]:
    """Parameter name -> delta in the model's own storage order."""
    return tiny.all_deltas(bound, tiny.spec_of(model))


def assert_equals_oracle(bound: BoundAdapter, case: str, only: str = "") -> None:
    """Every parameter that PEFT's merge changed must be changed alike, and no other."""
    model = tiny.model_of(case)
    merged = {key: value for key, value in tiny.merged_parameters(case).items() if only in key}
    deltas = deltas_of(bound, model)
    assert set(deltas) == set(merged)
    for key, value in merged.items():
        expected = value - tiny.parameter_of(model, key)
        assert relative_error(deltas[key], expected) <= TOLERANCE, key


def per_expert_form(site: str, bound: BoundAdapter) -> dict[str, torch.Tensor]:
    """A bound site's factors under per-expert key names."""
    found: dict[str, torch.Tensor] = {}
    for name, factor in bound.factors[site].projections.items():
        for expert in range(factor.lora_A.shape[0]):
            key = f"{site}.{expert}.{name}_proj"
            found[f"{key}.lora_A.weight"] = factor.lora_A[expert]
            found[f"{key}.lora_B.weight"] = factor.lora_B[expert]
    return found


def swapped_form(tensors: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The same adapter as PEFT <= 0.18 wrote it: in and out of the experts exchanged."""
    found = dict(tensors)
    for key_a in (k for k in tensors if "experts" in k and "lora_A" in k):
        key_b = key_a.replace("lora_A", "lora_B")
        a3 = tensors[key_a].view(num_experts, -1, tensors[key_a].shape[1])
        b3 = tensors[key_b].view(tensors[key_b].shape[0], -1, num_experts)
        found[key_a] = b3.permute(2, 1, 0).reshape(-1, b3.shape[0]).contiguous()
        found[key_b] = a3.permute(2, 1, 0).reshape(a3.shape[2], -1).contiguous()
    return found


def test_the_fixtures_are_all_there() -> None:
    assert len(tiny.SERVED_CASES) == 34
    assert {*tiny.REFUSED_CASES, *tiny.VECTOR_CASES} < set(tiny.ALL_CASES)


@pytest.mark.parametrize("case", tiny.SERVED_CASES)
def test_every_tensor_binds_and_the_factors_equal_the_merged_weights(case: str) -> None:
    bound = bound_case(case)
    report = bound.report
    assert (report.bound, report.refused, report.skipped) == (report.total, {}, ())
    assert report.total == len(tiny.tensors_of(case)) > 0
    assert_equals_oracle(bound, case)


@pytest.mark.parametrize("case", tiny.SERVED_CASES)
def test_a_model_without_weights_is_enough_to_bind(case: str) -> None:
    config = AutoConfig.from_pretrained(tiny.FIXTURES / "models" / tiny.model_of(case))
    with torch.device("meta"):
        spec = model_spec(AutoModelForCausalLM.from_config(config))
    assert spec == tiny.spec_of(tiny.model_of(case))


@pytest.mark.parametrize(
    ("first", "second", "model"),
    [
        ("0.18.0", "0.19.0", "qwen3_moe"),
        ("0.18.0", "0.19.0", "mixtral"),
        ("0.18.0", "0.19.0", "olmoe"),
        ("0.18.0", "0.21.2", "gpt_oss"),
    ],
)
def test_versions_that_wrote_the_same_tensors_give_the_same_deltas(
    first: str, second: str, model: str
) -> None:
    cases = [f"peft/{version}/{model}/experts" for version in (first, second)]
    for key, tensor in tiny.tensors_of(cases[0]).items():
        assert_bit_equal(tensor, tiny.tensors_of(cases[1])[key], key)
    deltas = [deltas_of(bound_case(case), model) for case in cases]
    for key, delta in deltas[0].items():
        assert_bit_equal(delta, deltas[1][key], key)


@pytest.mark.parametrize(
    ("version", "model", "orientation"),
    [
        *(("0.18.0", m, "swapped") for m in ("qwen3_moe", "mixtral", "olmoe")),
        ("0.18.0", "gpt_oss", "normal"),
        *(("0.19.0", m, "swapped") for m in tiny.MODELS),
        *(("0.21.2", m, "normal") for m in tiny.MODELS),
    ],
)
def test_the_report_says_the_orientation_and_its_evidence(
    version: str, model: str, orientation: str
) -> None:
    evidence = bound_case(f"peft/{version}/{model}/experts").report.layouts["peft_fused"]
    assert f"{orientation} orientation (by shape)" in evidence
    assert "rank_major (PEFT's order)" in evidence


@pytest.mark.parametrize("model", tiny.MODELS)
def test_the_same_adapter_written_swapped_and_normal_binds_to_equal_factors(model: str) -> None:
    case = f"peft/0.21.2/{model}/experts"
    tensors, config = tiny.tensors_of(case), tiny.config_of(case)
    normal = bound_tensors(tensors, config, model)
    swapped = bound_tensors(swapped_form(tensors, 4), {**config, "peft_version": "0.19.0"}, model)
    tiny.assert_same(normal, swapped)


@pytest.mark.parametrize("model", ("qwen3_moe", "gpt_oss"))
def test_the_same_adapter_fused_and_per_expert_binds_to_equal_factors(model: str) -> None:
    case = f"peft/0.21.2/{model}/experts"
    fused = bound_case(case)
    sites = [name for name in fused.factors if name.endswith("experts")]
    tensors = {k: t for name in sites for k, t in per_expert_form(name, fused).items()}
    apart = bound_tensors(tensors, {"r": 3, "lora_alpha": 6}, model)
    assert set(apart.factors) == set(sites)
    for name in sites:
        for projection, factor in fused.factors[name].projections.items():
            other = apart.factors[name].projections[projection]
            assert_bit_equal(factor.lora_A.contiguous(), other.lora_A)
            assert_bit_equal(factor.lora_B.contiguous(), other.lora_B)


def test_gate_and_up_of_a_fused_adapter_share_one_a() -> None:
    factors = bound_case(EXPERTS).factors["model.layers.0.mlp.experts"].projections
    assert factors["gate"].lora_A is factors["up"].lora_A


def test_experts_that_a_per_expert_file_leaves_out_are_mapped_to_nothing() -> None:
    bound = bound_case("per_expert/mixtral/subset")
    site = bound.report.sites[0]
    expert_map = bound.factors[site.site].expert_map
    assert expert_map is not None
    assert expert_map.tolist() == [0, -1, 1, -1]
    assert {p.experts for p in site.projections.values()} == {2}
    assert bound.factors[site.site].projections["gate"].lora_A.shape[0] == 2


def test_the_report_counts_experts_per_projection() -> None:
    tensors, config = tiny.tensors_of("per_expert/qwen3_moe/plain"), {"r": 3, "lora_alpha": 6}
    partial = {k: t for k, t in tensors.items() if not re.search(r"experts\.[13]\.down_proj", k)}
    report = bound_tensors(partial, config).report
    for site in (site for site in report.sites if site.kind == "experts"):
        counts = {name: projection.experts for name, projection in site.projections.items()}
        assert counts == {"gate": 4, "up": 4, "down": 2}


def test_the_report_counts_in_words() -> None:
    tensors = tiny.tensors_of("per_expert/qwen3_moe/plain")
    one_layer = {k: t for k, t in tensors.items() if ".layers.0.mlp" in k}
    report = bound_tensors(one_layer, {"r": 3}).report
    assert "to 1 experts module; ranks" in report.summary()
    assert report.layouts == {"per_expert": "2-D factors per expert on 1 experts module"}
    both = bound_case(EXPERTS).report
    assert "to 4 linears, 2 experts modules; ranks" in both.summary()
    assert both.layouts["linear"] == "2-D factors on 4 linears"


@pytest.mark.parametrize(
    ("case", "ranks", "scales"),
    [
        (EXPERTS, {3}, {2.0}),
        ("peft/0.21.2/qwen3_moe/rslora", {3}, {6 / 3**0.5}),
        ("peft/0.21.2/qwen3_moe/patterns", {2, 3, 5, 6}, {2.0, 7 / 5, 3 / 2, 9 / 6}),
        ("peft/0.21.2/qwen3_moe/all_linear", {3, 6}, {2.0}),
        ("peft/0.21.2/qwen3_moe/all_linear_rslora", {3, 6}, {6 / 3**0.5, 12 / 6**0.5}),
        ("per_expert/qwen3_moe/rslora", {3}, {6 / 3**0.5}),
        ("per_expert/qwen3_moe/rank_pattern_gate", {3, 5}, {2.0, 7 / 5}),
    ],
)
def test_the_report_says_ranks_and_scales(case: str, ranks: set[int], scales: set[float]) -> None:
    report = bound_case(case).report
    projections = [p for site in report.sites for p in site.projections.values()]
    assert {p.rank for p in projections} == ranks
    assert sorted({p.scale for p in projections}) == pytest.approx(sorted(scales))
    assert report.max_rank == max(ranks)
    assert f"bound {report.total} of {report.total} tensors" in report.summary()
    assert report.to_dict()["bound"] == report.total


def test_a_report_counts_every_tensor_once() -> None:
    tensors = {**tiny.tensors_of(EXPERTS), MAGNITUDE: torch.ones(4, 24)}
    options = ReadOptions(skip=(r"q_proj",))
    source = make_source(tensors, tiny.config_of(EXPERTS))
    report: BindReport = bind(source, tiny.spec_of("qwen3_moe"), options).report
    assert report.bound + len(report.refused) + len(report.skipped) == report.total == 17
    assert list(report.refused) == [MAGNITUDE] and len(report.skipped) == 4


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_experts_router_and_attention_module_and_the_head_is_a_site(name: str) -> None:
    spec = tiny.spec_of(name)
    kinds = [site.kind for site in spec.sites]
    assert (kinds.count("experts"), kinds.count("router"), kinds.count("linear")) == (2, 2, 9)
    assert spec.sites[-1].name == "lm_head" and set(spec.refused) == {"model.embed_tokens"}
    assert isinstance(tiny.base_model(name).get_submodule(spec.sites[0].name), nn.Module)
