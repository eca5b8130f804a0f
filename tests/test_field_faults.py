"""Kinds of fault that users of MoE-LoRA systems have met, one test per kind, in few numbers.

``docs/field-faults.md`` lists all kinds and where each is tested; many are in other files.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from moegraft.adapters import BoundAdapter, ModelSpec, ReadOptions, bind, check_bound, make_source
from moegraft.errors import AdapterError
from moegraft.sites import expert_site, linear_site
from moegraft.testing import assert_bit_equal, assert_close
from moegraft.types import WeightLayout
from tiny_grafts import graft_of, new_graft, prompts

TESTS = Path(__file__).parent
CASE = "peft/0.21.2/qwen3_moe/experts"
SITE = "model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]


def bound_to(
    spec: ModelSpec, tensors: Tensors, config: dict[str, Any], **options: Any
) -> BoundAdapter:
    """Bind in full, or raise."""
    bound = bind(make_source(tensors, config), spec, ReadOptions(**options))
    check_bound(bound.report, spec)
    return bound


def pair(path: str, num_in: int, num_out: int, rank: int, seed: int = 0) -> Tensors:
    """A random 2-D pair for one linear."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{path}.lora_A.weight": 0.2 * torch.randn(rank, num_in, generator=generator),
        f"{path}.lora_B.weight": 0.2 * torch.randn(num_out, rank, generator=generator),
    }


def experts_pairs(names: tuple[str, ...], rank: int, layer: int = 0) -> Tensors:
    """Per-expert factors for the tiny qwen3_moe."""
    sizes = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
    found: Tensors = {}
    for expert in range(4):
        for seed, name in enumerate(names):
            path = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
            found.update(pair(path, *sizes[name], rank, seed=10 * expert + seed))
    return found


def assert_served_as_merged(tensors: Tensors, config: dict[str, Any], model: str) -> None:
    """Loading the tensors gives what adding their deltas to the weights gives."""
    graft, inputs = graft_of(model), prompts(2)
    graft.load_tensors("fault", tensors, config)
    plain = tiny.new_model(model)
    bound = bound_to(graft.spec, tensors, config)
    with torch.no_grad():
        before = plain(**inputs).logits
        for key, delta in tiny.all_deltas(bound, graft.spec).items():
            plain.get_parameter(key).add_(delta)
        expected = plain(**inputs).logits
    found = graft.forward(**inputs, adapters=["fault", None]).logits
    graft.unload("fault")
    assert_close(found[0], expected[0], torch.float32)
    assert (expected - before)[0].abs().max() > 1e-4, "the adapter must do something"


def test_fused_b_has_the_expert_index_fastest() -> None:
    spec = ModelSpec((expert_site(SITE, 4, 8, 6, WeightLayout("no_gate")),))
    lora_a = torch.arange(12 * 8.0).view(12, 8)
    lora_b = torch.arange(6 * 12.0).view(6, 12) / 7
    tensors = {f"{SITE}.lora_A.weight": lora_a, f"{SITE}.lora_B.weight": lora_b}
    bound = bound_to(spec, tensors, {"r": 3, "target_parameters": ["mlp.experts.up_proj"]})
    for expert in range(4):
        expected = sum(
            torch.outer(lora_b[:, rank * 4 + expert], lora_a[expert * 3 + rank])
            for rank in range(3)
        )
        factors = bound.factors[SITE]
        found = tiny.delta_of(factors.projections["up"], factors, 4)[expert]
        assert_close(found, torch.as_tensor(expected), torch.float32)


@pytest.mark.parametrize("names", [("down_proj",), ("up_proj",), ("gate_proj", "down_proj")])
def test_one_sided_experts_are_applied_not_ignored(names: tuple[str, ...]) -> None:
    config = {"r": 3, "lora_alpha": 6}
    assert_served_as_merged(experts_pairs(names, 3), config, "qwen3_moe")


def test_fused_experts_without_a_gate_bind_both_projections() -> None:
    spec = ModelSpec((expert_site(SITE, 4, 8, 6, WeightLayout("no_gate")),))
    tensors = {
        **pair(f"{SITE}.base_layer", 8, 6, 12),
        **pair(SITE, 6, 8, 12),
    }
    bound = bound_to(spec, tensors, {"r": 3, "peft_version": "0.21.2"})
    assert set(bound.factors[SITE].projections) == {"up", "down"}


def test_dense_and_moe_layers_in_one_adapter_both_bind() -> None:
    sites = (
        *(linear_site(f"model.layers.0.mlp.{n}_proj", 8, 8) for n in ("gate", "up", "down")),
        *(expert_site(f"model.layers.{i}.mlp.experts", 4, 8, 6, WeightLayout()) for i in (1, 2)),
    )
    tensors: Tensors = {}
    for name in ("gate", "up", "down"):
        tensors |= pair(f"model.layers.0.mlp.{name}_proj", 8, 8, 2)
    for layer in (1, 2):
        tensors |= pair(f"model.layers.{layer}.mlp.experts.base_layer", 8, 12, 12)
        tensors |= pair(f"model.layers.{layer}.mlp.experts", 6, 8, 12)
    bound = bound_to(ModelSpec(sites), tensors, {"r": 3, "lora_alpha": 6})
    assert set(bound.factors) == {site.name for site in sites}


@pytest.mark.parametrize("key", ["lm_head", "model.lm_head", "model.unembed_tokens"])
def test_output_head_keys_bind_under_every_name_or_are_refused_loudly(key: str) -> None:
    tensors = {**tiny.tensors_of(CASE), **pair(f"base_model.model.{key}", 24, 64, 3)}
    spec = tiny.spec_of("qwen3_moe")
    bound = bound_to(spec, tensors, tiny.config_of(CASE))
    assert bound.report.bound == 18 and "lm_head" in bound.factors
    with pytest.raises(AdapterError, match="2 of 18 tensors can't be served") as caught:
        headless = ModelSpec(spec.sites[:-1], {"lm_head": "no adapter goes there"})
        bound_to(headless, tensors, tiny.config_of(CASE))
    assert f"{key}.lora_A.weight" in str(caught.value)
    assert "no adapter goes there" in str(caught.value)


@pytest.mark.parametrize("targets", [None, [], "all-linear", ["model.layers.0.x"], ["experts"]])
def test_the_tensors_decide_what_is_targeted_not_the_config(targets: Any) -> None:
    config = tiny.config_of(CASE, target_modules=targets, layers_to_transform=[7])
    bound = bound_to(tiny.spec_of("qwen3_moe"), tiny.tensors_of(CASE), config)
    assert bound.report.bound == 16


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 6, 17, 64])
def test_small_odd_and_large_ranks_equal_merged(rank: int) -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = {**experts_pairs(names, rank), **experts_pairs(names, rank, layer=1)}
    assert_served_as_merged(tensors, {"r": rank, "lora_alpha": 2 * rank}, "qwen3_moe")


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("side", ["gate", "up"])
def test_one_half_of_gate_up_goes_into_its_own_columns(model: str, side: str) -> None:
    spec = tiny.spec_of(model)
    site = next(site for site in spec.sites if site.kind == "experts")
    sizes = site.projection(side)
    path = f"{site.name}.1.{side}_proj"
    tensors = pair(path, sizes.in_features, sizes.out_features, 2)
    bound = bound_to(spec, tensors, {"r": 2, "lora_alpha": 2})
    delta = tiny.all_deltas(bound, spec)[f"{site.name}.gate_up_proj"]
    rows = delta if site.layout.out_major else delta.transpose(1, 2)
    other = site.layout.columns("up" if side == "gate" else "gate", sizes.out_features)
    assert not rows[:, other].any() and not rows[[0, 2, 3]].any()
    own = rows[1, site.layout.columns(side, sizes.out_features)]
    expected = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
    assert_close(own, expected, torch.float32)
    interleaved = model == "gpt_oss"
    odd_rows = torch.arange(rows.shape[1]) % 2 == (1 if side == "up" else 0)
    assert bool(rows[1][odd_rows].any(1).all()) == interleaved
    assert_served_as_merged(tensors, {"r": 2, "lora_alpha": 2}, model)


def test_adapters_that_are_loaded_but_unused_change_nothing() -> None:
    inputs, graft = prompts(2), new_graft("qwen3_moe")
    for name in "abc":
        graft.load(name, tiny.folder(CASE))
    alone = new_graft("qwen3_moe")
    alone.load("a", tiny.folder(CASE))
    for rows in ([None, None], ["a", None], [None, None]):
        found = graft.forward(**inputs, adapters=rows).logits
        assert_bit_equal(found, alone.forward(**inputs, adapters=rows).logits)


def test_an_adapter_of_rank_zero_is_refused_not_taken_for_another() -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", 24, 16, 0)
    with pytest.raises(AdapterError, match="r >= 1"):
        bound_to(tiny.spec_of("qwen3_moe"), {**tensors, **pair(f"{SITE}.0.up_proj", 24, 16, 1)}, {})


def test_a_higher_rank_that_comes_later_is_served_whole() -> None:
    for rank in (2, 32, 4):
        names = ("gate_proj", "up_proj", "down_proj")
        assert_served_as_merged(experts_pairs(names, rank), {"r": rank}, "qwen3_moe")


def test_adding_adapters_stays_as_fast_as_at_first() -> None:
    graft = new_graft("qwen3_moe")
    source = tiny.tensors_of(CASE)
    seconds: list[float] = []
    for i in range(200):
        start = time.perf_counter()
        graft.load_tensors(f"adapter {i}", source, tiny.config_of(CASE))
        seconds.append(time.perf_counter() - start)
    first, last = sorted(seconds[:40])[20], sorted(seconds[-40:])[20]
    assert last < 4 * first, (first, last)
    assert len(graft.adapters) == 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["experts", "router", "attention"])
def test_a_large_b_changes_the_output_in_every_dtype(dtype: torch.dtype, part: str) -> None:
    graft, inputs = new_graft("qwen3_moe", dtype), prompts(2)
    tensors = {
        "experts": experts_pairs(("down_proj",), 3),
        "router": pair("model.layers.0.mlp.gate", 24, 4, 3),
        "attention": pair("model.layers.0.self_attn.q_proj", 24, 16, 3),
    }[part]
    large = {key: 5 * tensor if "lora_B" in key else tensor for key, tensor in tensors.items()}
    graft.load_tensors("large", large, {"r": 3, "lora_alpha": 6})
    base = graft.forward(**inputs).logits
    found = graft.forward(**inputs, adapters=["large", None]).logits
    assert (found - base)[0].abs().max() > 0.05
    assert_close(found[1], base[1], dtype)


def test_every_test_that_the_table_names_exists() -> None:
    table = (TESTS.parent / "docs" / "field-faults.md").read_text()
    named = set(re.findall(r"`(test_\w+)\.(test_\w+)`", table))
    assert len(named) > 40
    files = {path.stem: path.read_text() for path in TESTS.rglob("test_*.py")}
    for module, test in named:
        assert f"def {test}(" in files[module], f"{module}.{test}"
    for module in (name for name in files if name.startswith("test_field_faults")):
        for test in re.findall(r"^def (test_\w+)\(", files[module], re.MULTILINE):
            assert f"{module}.{test}`" in table or "table_names" in test, test


def test_every_row_of_the_table_names_a_test_or_says_why_not() -> None:
    table = (TESTS.parent / "docs" / "field-faults.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", table, re.MULTILINE | re.DOTALL))
    without = ("not built yet", "does not apply")
    for section, text in sections.items():
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:2] == "| "]
        assert rows[0] == ["Kind of fault", "Here"] and len(rows) > 5, section
        kinds = [row[0] for row in rows]
        assert len(set(kinds)) == len(kinds), section
        for kind, where in rows[2:]:
            assert "`test_" in where or where.startswith(without), (section, kind)
    # What this library is for has no such excuse.
    for section in ("Files, key names, layouts", "Scales", "Mixed batches", "Security"):
        assert not any(excuse in sections[section] for excuse in without), section
    for section in ("Slots, loading, unloading", "Updates while serving (reinforcement learning)"):
        assert not any(excuse in sections[section] for excuse in without), section
