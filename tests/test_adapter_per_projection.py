"""3-D factors per projection: what binds, and that it means the same as other files' factors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import moegraft
import tiny
from moegraft.adapters import BoundAdapter, ModelSpec, ReadOptions
from moegraft.sites import expert_site
from moegraft.testing import assert_bit_equal, assert_close, relative_error
from moegraft.types import WeightLayout
from stacked import (
    CONFIG,
    EXPERTS,
    OUTER,
    PROJ_NAMES,
    W_NAMES,
    Pairs,
    Tensors,
    assert_same_experts,
    bound_to,
    experts_of,
    merged_by_hand,
    per_expert_form,
    put,
    random_pairs,
    stacked_form,
)

TOLERANCE = 1e-5
LEAVES = [f"{p}.{leaf}" for p in ("gate", "up", "down") for leaf in "AB"]
MARKED = {**CONFIG, "veomni_lora": {"moe_mode": "shared"}}


def assert_equals_merged(bound: BoundAdapter, model: str, merged: Tensors) -> None:
    """Every weight that the adapter changes must change as in the merged weights, and no other."""
    deltas = tiny.all_deltas(bound, tiny.spec_of(model))
    assert deltas
    for key, value in merged.items():
        expected = value.float() - tiny.parameter_of(model, key)
        if key in deltas:
            assert relative_error(deltas[key], expected) <= TOLERANCE, key
        else:
            assert not expected.any(), key


def fused_halves(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a gate_up_proj: gate's A, and the rows of B as [gate | up]."""
    b_gate, b_up = pairs["gate"][1], pairs["up"][1]
    return pairs["gate"][0], torch.cat([b_gate, b_up], 1)


@pytest.mark.parametrize("names", [W_NAMES, PROJ_NAMES])
@pytest.mark.parametrize("case", ["plain", "rslora", "gate_only"])
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_a_per_expert_file_of_peft_written_3d_equals_pefts_merged_weights(
    model: str, case: str, names: dict[str, str]
) -> None:
    path = f"per_expert/{model}/{case}"
    tensors = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for key, tensor in sorted(tiny.tensors_of(path).items()):
        if not re.search(r"\.experts\.\d+\.", key):
            tensors[key] = tensor
            continue
        for projection in W_NAMES:
            for old in (W_NAMES[projection], PROJ_NAMES[projection]):
                key = re.sub(rf"experts\.\d+\.{old}\.", f"experts.{names[projection]}.", key)
        stacks.setdefault(key, []).append(tensor)
    tensors |= {key: torch.stack(stack) for key, stack in stacks.items()}
    bound = bound_to(tiny.spec_of(model), tensors, tiny.config_of(path))
    assert_same_experts(bound, tiny.bound_case(path))
    deltas = tiny.all_deltas(bound, tiny.spec_of(model))
    merged = tiny.merged_parameters(path)
    assert set(deltas) == set(merged)
    for key, value in merged.items():
        assert relative_error(deltas[key], value - tiny.parameter_of(model, key)) <= TOLERANCE


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "olmoe"])
def test_a_fused_file_of_peft_written_3d_has_the_same_factors_and_one_a(model: str) -> None:
    path = f"peft/0.21.2/{model}/experts"
    known, tensors = tiny.bound_case(path), {}
    for key, tensor in tiny.tensors_of(path).items():
        if ".experts." not in key:
            tensors[key] = tensor
    for site in (experts_of(model, layer) for layer in (0, 1)):
        factors = known.factors[site.name].projections
        pairs = {name: (f.lora_A, f.lora_B) for name, f in factors.items()}
        tensors |= put(f"{site.name}.gate_up_proj", *fused_halves(pairs))
        tensors |= put(f"{site.name}.down_proj", *pairs["down"])
    bound = bound_to(tiny.spec_of(model), tensors, tiny.config_of(path))
    tiny.assert_same(bound, known)
    assert_same_experts(bound, known)
    factors = bound.factors[experts_of(model).name].projections
    assert factors["gate"].lora_A is factors["up"].lora_A
    for key, value in tiny.merged_parameters(path).items():
        delta = tiny.all_deltas(bound, tiny.spec_of(model))[key]
        assert relative_error(delta, value - tiny.parameter_of(model, key)) <= TOLERANCE
    evidence = bound.report.layouts["per_projection"]
    assert "(down_proj, gate_up_proj) on 2 experts modules" in evidence
    assert "rows of gate_up_proj's B are [gate | up]" in evidence


@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_the_rows_of_a_packed_b_are_in_the_order_that_the_caller_names(
    model: str, order: Any
) -> None:
    known = tiny.bound_case(f"peft/0.21.2/{model}/experts")
    tensors = {}
    for site in (experts_of(model, layer) for layer in (0, 1)):
        factors = known.factors[site.name].projections
        pairs = {name: (f.lora_A, f.lora_B) for name, f in factors.items()}
        a, b = fused_halves(pairs)
        if order == "interleaved":
            b = torch.stack([pairs["gate"][1], pairs["up"][1]], 2).flatten(1, 2)
        tensors |= put(f"{site.name}.gate_up_proj", a, b)
        tensors |= put(f"{site.name}.down_proj", *pairs["down"])
    bound = bound_to(tiny.spec_of(model), tensors, options=ReadOptions(gate_up_rows=order))
    for name, found in bound.factors.items():
        for projection, factor in found.projections.items():
            other = known.factors[name].projections[projection]
            assert_bit_equal(factor.lora_A.contiguous(), other.lora_A.contiguous())
            assert_bit_equal(factor.lora_B.contiguous(), other.lora_B.contiguous())
    rows = {"concatenated": "[gate | up]", "interleaved": "g0, u0, g1, .."}[order]
    assert f"B are {rows} (by option)" in bound.report.layouts["per_projection"]


@pytest.mark.parametrize("model", tiny.MODELS)
@pytest.mark.parametrize(
    "shared", [(), OUTER, tuple(LEAVES), *((leaf,) for leaf in LEAVES)], ids=lambda s: "+".join(s)
)
def test_factors_shared_by_all_experts_equal_their_copies_and_the_merged_weights(
    model: str, shared: tuple[str, ...]
) -> None:
    site, spec = experts_of(model), tiny.spec_of(model)
    pairs = random_pairs(site, shared=shared)
    bound = bound_to(spec, stacked_form(site, pairs))
    assert_same_experts(bound, bound_to(spec, per_expert_form(site, pairs)))
    tiny.assert_same(bound, bound_to(spec, per_expert_form(site, pairs)))
    assert_equals_merged(bound, model, merged_by_hand(model, site, pairs))
    report = next(s for s in bound.report.sites if s.site == site.name)
    for name, projection in report.projections.items():
        assert projection.experts == 4
        assert projection.shared_a == (f"{name}.A" in shared)
        assert projection.shared_b == (f"{name}.B" in shared)


@pytest.mark.parametrize("names", [("gate",), ("up",), ("down",), ("gate", "down")])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_projection_of_one_layer_is_enough(names: tuple[str, ...], layer: int) -> None:
    site = experts_of("qwen3_moe", layer)
    pairs = random_pairs(site, names, ("down.A",))
    bound = bound_to(tiny.spec_of("qwen3_moe"), stacked_form(site, pairs))
    assert {n: set(f.projections) for n, f in bound.factors.items()} == {site.name: set(names)}
    assert_equals_merged(bound, "qwen3_moe", merged_by_hand("qwen3_moe", site, pairs))


@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("experts", [(0, 1, 2, 3), (0, 2), (3,)])
def test_a_3d_gate_up_and_per_expert_downs_of_one_module_both_bind(
    shared_a: bool, experts: tuple[int, ...]
) -> None:
    site, spec = experts_of("qwen3_moe"), tiny.spec_of("qwen3_moe")
    pairs = random_pairs(site, shared=("gate.A", "up.A") if shared_a else ())
    pairs["up"] = (pairs["gate"][0], pairs["up"][1])
    left_out = [f"experts.{e}.down" for e in range(4) if e not in experts]
    apart = {
        key: tensor
        for key, tensor in per_expert_form(site, pairs).items()
        if not any(name in key for name in left_out)
    }
    downs = {key: tensor for key, tensor in apart.items() if "down_proj" in key}
    tensors = {**put(f"{site.name}.gate_up_proj", *fused_halves(pairs)), **downs}
    bound = bound_to(spec, tensors)
    assert set(bound.report.layouts) == {"per_expert", "per_projection"}
    assert_same_experts(bound, bound_to(spec, apart))
    counts = {name: p.experts for name, p in bound.report.sites[0].projections.items()}
    assert counts == {"gate": 4, "up": 4, "down": len(experts)}
    a, b = pairs["down"]
    for expert in set(range(4)) - set(experts):
        b[expert] = 0
    pairs["down"] = (a, b)
    assert_equals_merged(bound, "qwen3_moe", merged_by_hand("qwen3_moe", site, pairs))


def test_2d_pairs_serve_all_experts_when_the_config_says_so() -> None:
    site, spec = experts_of("qwen3_moe"), tiny.spec_of("qwen3_moe")
    pairs = random_pairs(site, shared=LEAVES)
    flat = {k: t[0] for k, t in stacked_form(site, pairs, PROJ_NAMES).items()}
    bound = bound_to(spec, flat, MARKED)
    tiny.assert_same(bound, bound_to(spec, stacked_form(site, pairs)))
    assert_equals_merged(bound, "qwen3_moe", merged_by_hand("qwen3_moe", site, pairs))
    assert "2-D ones serve all experts" in bound.report.layouts["per_projection"]
    mixed = {k: t[None] if "down" in k else t for k, t in flat.items()}
    tiny.assert_same(bound_to(spec, mixed, MARKED), bound)


@pytest.mark.parametrize("empty", [(0,), (4, 0, 8), "none"])
def test_experts_without_a_gate_take_w1_as_up_beside_an_empty_w3(empty: Any) -> None:
    site = expert_site(EXPERTS, 4, 8, 6, WeightLayout("no_gate"))
    spec = ModelSpec((site,))
    pairs = random_pairs(site, ("up", "down"))
    names = {"up": "w1", "down": "w2"}
    tensors = stacked_form(site, pairs, names)
    if empty != "none":
        tensors |= put(f"{EXPERTS}.w3", torch.ones(empty), torch.ones(empty))
    bound = bound_to(spec, tensors)
    assert_same_experts(bound, bound_to(spec, per_expert_form(site, pairs)))
    assert_same_experts(bound, bound_to(spec, stacked_form(site, pairs, PROJ_NAMES)))
    assert any("empty w3" in note for note in bound.report.notes) == (empty != "none")


def test_the_scale_follows_the_config_at_the_names_of_the_file() -> None:
    site, spec = experts_of("qwen3_moe"), tiny.spec_of("qwen3_moe")
    config = {**CONFIG, "use_rslora": True, "alpha_pattern": {"experts.w2": 9}}
    config["rank_pattern"] = {"w1": 4}
    factors = bound_to(spec, stacked_form(site, random_pairs(site)), config).factors[site.name]
    scales = {name: factor.scale for name, factor in factors.projections.items()}
    assert scales == pytest.approx({"gate": 6 / 4**0.5, "up": 6 / 3**0.5, "down": 9 / 3**0.5})


def test_equal_copies_are_stored_once_whatever_the_layout() -> None:
    site, spec = experts_of("qwen3_moe"), tiny.spec_of("qwen3_moe")
    pairs = random_pairs(site, shared=OUTER)
    copied = {n: (a.repeat(4 // len(a), 1, 1), b.repeat(4 // len(b), 1, 1))
              for n, (a, b) in pairs.items()}  # fmt: skip
    once = bound_to(spec, stacked_form(site, pairs))
    assert not once.report.notes
    for tensors in (stacked_form(site, copied), per_expert_form(site, pairs)):
        bound = bound_to(spec, tensors)
        tiny.assert_same(bound, once)
        assert bound.report.num_bytes == once.report.num_bytes
        assert bound.report.notes == (
            "lora_B of down is the same for all experts on 1 experts module: stored once",
            "lora_A of gate is the same for all experts on 1 experts module: stored once",
            "lora_A of up is the same for all experts on 1 experts module: stored once",
        )
    fused = {**put(f"{site.name}.gate_up_proj", *fused_halves(copied))}
    factors = bound_to(spec, fused).factors[site.name].projections
    assert factors["gate"].lora_A is factors["up"].lora_A and len(factors["up"].lora_A) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_that_differ_in_one_bit_are_kept_apart(dtype: torch.dtype) -> None:
    site, spec = experts_of("qwen3_moe"), tiny.spec_of("qwen3_moe")
    a, b = (t.to(dtype) for t in random_pairs(site, ("up",), ("up.A", "up.B"))["up"])
    a[0, 0, 0] = 0.0
    for expert in (1, 3):
        copies = a.repeat(4, 1, 1)
        copies[expert, 0, 0] = -0.0
        tensors = stacked_form(site, {"up": (copies, b)})
        bound = bound_to(spec, tensors)
        assert_bit_equal(bound.factors[site.name].projections["up"].lora_A, copies)
        assert not bound.report.notes


def test_factors_before_training_take_as_much_as_after_it() -> None:
    site, spec = experts_of("qwen3_moe"), tiny.spec_of("qwen3_moe")
    pairs = random_pairs(site)
    fresh = {name: (a, torch.zeros_like(b)) for name, (a, b) in pairs.items()}
    for form in (stacked_form, per_expert_form):
        before, after = (bound_to(spec, form(site, p)).report for p in (fresh, pairs))
        assert before.num_bytes == after.num_bytes and not before.notes


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_a_shared_outer_file_serves_rows_as_the_merged_model(model: str) -> None:
    graft = moegraft.attach(tiny.new_model(model), max_adapters=2)
    site = experts_of(model)
    pairs = random_pairs(site, shared=OUTER)
    graft.load_tensors("outer", stacked_form(site, pairs), CONFIG)
    graft.load_tensors("copies", per_expert_form(site, pairs), CONFIG)
    merged = tiny.new_model(model)
    for key, value in merged_by_hand(model, site, pairs).items():
        module, _, leaf = key.rpartition(".")
        setattr(merged.get_submodule(module), leaf, nn.Parameter(value.float()))
    ids = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(0))
    found = graft.forward(input_ids=ids, adapters=["outer", None, "copies"]).logits
    with torch.no_grad():
        expected, base = merged(input_ids=ids).logits, tiny.base_model(model)(input_ids=ids).logits
    assert_close(found[[0, 2]], expected[[0, 2]], torch.float32)
    assert_close(found[1], base[1], torch.float32)
    assert (expected - base)[0].abs().max() > 1e-3, "the adapter must do something"


def test_what_is_not_wanted_is_skipped_by_name() -> None:
    site, spec = experts_of("qwen3_moe"), tiny.spec_of("qwen3_moe")
    tensors = stacked_form(site, random_pairs(site))
    source = moegraft.adapters.make_source(tensors, CONFIG)
    bound = moegraft.adapters.bind(source, spec, ReadOptions(skip=(r"\.w2\.",)))
    assert set(bound.factors[site.name].projections) == {"gate", "up"}
    assert len(bound.report.skipped) == 2 and not bound.report.refused
