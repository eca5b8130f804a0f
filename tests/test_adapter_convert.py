"""Converted adapters: the same delta in another layout, as PEFT itself and the oracles see it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

import tiny
from moegraft.adapters import (
    BoundAdapter,
    ReadOptions,
    bind,
    check_bound,
    make_source,
    read_adapter,
)
from moegraft.adapters.convert import Converted, convert
from moegraft.adapters.writers import WRITERS
from moegraft.errors import AdapterError
from moegraft.hosts.transformers.names import expert_names
from moegraft.testing import assert_bit_equal, relative_error
from stacked import CONFIG, OUTER, assert_same_experts, experts_of, random_pairs, stacked_form

TOLERANCE = 1e-5
GENERAL = ("peft", "per-expert", "3d")


def converted(case: str, to: str, **options: Any) -> Converted:
    """A fixture in another layout."""
    model = tiny.model_of(case)
    names = expert_names(model)
    return convert(read_adapter(tiny.folder(case)), tiny.spec_of(model), to, names=names, **options)


def bound_again(found: Converted, model: str) -> BoundAdapter:
    """What was written, read again and bound in full."""
    spec = tiny.spec_of(model)
    bound = bind(make_source(found.tensors, found.config), spec)
    check_bound(bound.report, spec)
    return bound


def assert_equals_oracle(bound: BoundAdapter, case: str) -> None:
    """Every parameter that PEFT's merge changed is changed alike, and no other."""
    model = tiny.model_of(case)
    deltas = tiny.all_deltas(bound, tiny.spec_of(model))
    changed = {key for key, delta in deltas.items() if delta.any()}
    merged = tiny.merged_parameters(case)
    assert changed == set(merged)
    for key, value in merged.items():
        assert relative_error(deltas[key], value - tiny.parameter_of(model, key)) <= TOLERANCE, key


def merged_by_peft(folder: Path, model: str) -> dict[str, torch.Tensor]:
    """The weights after the installed PEFT loaded a folder and merged it; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # PEFT looks for these among modules only; of parameters it honours them all the same.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        peft_model: Any = PeftModel.from_pretrained(tiny.new_model(model), str(folder))
        return dict(peft_model.merge_and_unload().state_dict())


def assert_peft_agrees(folder: Path, case: str) -> None:
    """PEFT merges a folder to the weights that the original merges to."""
    model, merged = tiny.model_of(case), tiny.merged_parameters(case)
    for key, value in merged_by_peft(folder, model).items():
        expected = merged.get(key, tiny.base_model(model).state_dict()[key])
        assert relative_error(value, expected) <= TOLERANCE, key


@pytest.mark.parametrize("to", GENERAL)
@pytest.mark.parametrize("case", tiny.SERVED_CASES)
def test_a_converted_adapter_means_what_peft_merged(case: str, to: str) -> None:
    found = converted(case, to)
    assert_equals_oracle(bound_again(found, tiny.model_of(case)), case)
    assert found.refit_error == {}
    assert found.exact == (not found.notes)


@pytest.mark.parametrize("case", tiny.SERVED_CASES)
def test_peft_loads_the_peft_layout_of_every_fixture(case: str, tmp_path: Path) -> None:
    converted(case, "peft").save(tmp_path / "new")
    assert_peft_agrees(tmp_path / "new", case)


@pytest.mark.parametrize(
    "case",
    [
        "per_expert/qwen3_moe/plain",
        "per_expert/mixtral/plain",
        "peft/0.18.0/qwen3_moe/experts",
        "peft/0.18.0/mixtral/experts",
        "peft/0.18.0/olmoe/experts",
    ],
)
def test_peft_loads_per_expert_files_under_the_names_of_the_family(
    case: str, tmp_path: Path
) -> None:
    converted(case, "per-expert").save(tmp_path / "new")
    assert_peft_agrees(tmp_path / "new", case)


@pytest.mark.parametrize("first", GENERAL)
@pytest.mark.parametrize("model", tiny.MODELS)
def test_there_and_back_gives_the_same_bits(model: str, first: str) -> None:
    case = f"peft/0.21.2/{model}/experts"
    there = converted(case, first)
    source = make_source(there.tensors, there.config)
    back = convert(source, tiny.spec_of(model), "peft")
    original = tiny.tensors_of(case)
    assert set(back.tensors) == set(original)
    for key, tensor in original.items():
        assert_bit_equal(back.tensors[key], tensor, key)
    assert (back.config["r"], back.config["lora_alpha"]) == (3, 6)
    assert back.config["rank_pattern"] == back.config["alpha_pattern"] == {}
    assert set(back.config["target_parameters"]) == {
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    assert back.config["target_modules"] == ["q_proj", "v_proj"]


def test_gate_and_up_of_different_a_lie_side_by_side_and_come_apart_again() -> None:
    case = "per_expert/qwen3_moe/plain"
    fused = converted(case, "peft")
    assert fused.exact and fused.notes == ()
    key = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    assert fused.tensors[key].shape[0] == 4 * 6
    source = make_source(fused.tensors, fused.config)
    apart = convert(source, tiny.spec_of("qwen3_moe"), "per-expert")
    assert set(apart.tensors) == set(tiny.tensors_of(case))
    for key, tensor in tiny.tensors_of(case).items():
        assert_bit_equal(apart.tensors[key], tensor, key)


def test_scales_that_differ_within_a_fused_parameter_are_rounded_and_said() -> None:
    found = converted("per_expert/qwen3_moe/rank_pattern_gate", "peft")
    assert not found.exact and len(found.notes) == 2
    assert "B of gate is multiplied by 0.7, rounded in float32" in found.notes[0]
    assert converted("per_expert/qwen3_moe/rank_pattern_gate", "3d").exact


def test_experts_that_a_file_leaves_out_are_left_out_or_zero() -> None:
    subset = "per_expert/mixtral/subset"
    kept = converted(subset, "per-expert").tensors
    assert {re.findall(r"experts\.(\d+)\.", key)[0] for key in kept} == {"0", "2"}
    assert set(kept) == set(tiny.tensors_of(subset))
    stacked = converted(subset, "3d").tensors
    w1 = stacked["base_model.model.model.layers.0.mlp.experts.w1.lora_A.weight"]
    assert [bool(entry.any()) for entry in w1] == [True, False, True, False]


def shared_source(model: str = "qwen3_moe") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter with shared outer factors, its copies written out for all experts."""
    found = {}
    for layer in (0, 1):
        site = experts_of(model, layer)
        pairs = random_pairs(site, shared=OUTER, seed=layer)
        wide = {
            name: tuple(t.expand(site.num_experts, -1, -1).clone() for t in pair)
            for name, pair in pairs.items()
        }
        found |= stacked_form(site, wide)  # type: ignore[arg-type]
    return found, CONFIG


@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("model", tiny.MODELS)
def test_shared_outer_factors_survive_every_layout(model: str, to: str) -> None:
    tensors, config = shared_source(model)
    spec = tiny.spec_of(model)
    source = make_source(tensors, config)
    found = convert(source, spec, to)
    if to == "shared-outer":
        shapes = {k.split("experts.")[1]: t.shape[0] for k, t in found.tensors.items()}
        assert shapes == {
            **{f"{w}.lora_A.weight": 1 for w in ("w1", "w3")},
            **{f"{w}.lora_B.weight": 4 for w in ("w1", "w3")},
            "w2.lora_A.weight": 4,
            "w2.lora_B.weight": 1,
        }
    again = convert(make_source(found.tensors, found.config), spec, "shared-outer")
    bound = bound_again(again, model)
    assert_same_experts(bound, bind(source, spec))


def test_shared_outer_is_refused_where_it_is_not_exact() -> None:
    with pytest.raises(
        AdapterError, match=r"gate of model\.layers\.0\.mlp\.experts .*own for each"
    ):
        converted(tiny.EXPERTS, "shared-outer")


def test_a_smaller_rank_is_a_refit_with_its_true_error() -> None:
    case, model = "peft/0.21.2/qwen3_moe/all_linear", "qwen3_moe"
    spec = tiny.spec_of(model)
    whole = tiny.all_deltas(tiny.bound_case(case), spec)
    for to in GENERAL:
        found = converted(case, to, rank=2)
        assert not found.exact and max(found.refit_error.values()) < 1
        bound = bound_again(found, model)
        assert bound.report.max_rank == 2
        small = tiny.all_deltas(bound, spec)
        key = "model.layers.0.mlp.experts.down_proj"
        errors = [
            max(relative_error(small[k][e], whole[k][e]) for e in range(4))
            for k in (key, key.replace("layers.0", "layers.1"))
        ]
        assert max(errors) == pytest.approx(found.refit_error["down"], rel=1e-4)
        # The best rank 2 of each expert: no other factors of rank 2 are closer.
        for expert in range(4):
            singular = torch.linalg.svdvals(whole[key][expert].double())
            best = float(singular[2:].norm() / singular.norm())
            error = relative_error(small[key][expert], whole[key][expert])
            assert error == pytest.approx(best, rel=1e-4)


def test_a_refit_keeps_shared_factors_shared() -> None:
    tensors, config = shared_source()
    spec = tiny.spec_of("qwen3_moe")
    found = convert(make_source(tensors, config), spec, "shared-outer", rank=2)
    assert set(found.refit_error) == {"gate", "up", "down"}
    key = "base_model.model.model.layers.0.mlp.experts.w1.lora_A.weight"
    assert found.tensors[key].shape[:2] == (1, 2)
    site = experts_of("qwen3_moe")
    whole = tiny.all_deltas(bind(make_source(tensors, config), spec), spec)
    small = tiny.all_deltas(bound_again(found, "qwen3_moe"), spec)
    key = f"{site.name}.down_proj"
    assert 0 < relative_error(small[key], whole[key]) <= found.refit_error["down"] * (1 + 1e-5)


def test_a_rank_that_nothing_exceeds_changes_nothing() -> None:
    exact, asked = converted(tiny.EXPERTS, "3d"), converted(tiny.EXPERTS, "3d", rank=3)
    assert asked.exact and asked.refit_error == {}
    for key, tensor in exact.tensors.items():
        assert_bit_equal(asked.tensors[key], tensor, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_conversion_keeps_the_dtype_and_every_bit(dtype: torch.dtype) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in tiny.tensors_of(tiny.EXPERTS).items()}
    source = make_source(tensors, tiny.config_of(tiny.EXPERTS))
    spec = tiny.spec_of("qwen3_moe")
    found = convert(source, spec, "per-expert")
    assert {tensor.dtype for tensor in found.tensors.values()} == {dtype}
    assert_same_experts(bound_again(found, "qwen3_moe"), bind(source, spec))


def test_what_can_not_be_converted_is_refused() -> None:
    spec = tiny.spec_of("qwen3_moe")
    source = read_adapter(tiny.folder(tiny.EXPERTS))
    with pytest.raises(AdapterError, match="to='fused' is not one of peft, per-expert"):
        convert(source, spec, "fused")
    with pytest.raises(AdapterError, match="rank=0 must be at least 1"):
        convert(source, spec, "3d", rank=0)
    with pytest.raises(AdapterError, match=r"8 of 16 tensors .*on this GptOss"):
        convert(source, tiny.spec_of("gpt_oss"), "3d")
    zeros = {k: 0 * t for k, t in tiny.tensors_of("per_expert/qwen3_moe/gate_only").items()}
    with pytest.raises(AdapterError, match="all of its factors are zeros"):
        convert(make_source(zeros, CONFIG), spec, "per-expert")
    full = read_adapter(tiny.folder("peft/0.21.2/qwen3_moe/modules_to_save"))
    with pytest.raises(AdapterError, match="nothing was loaded"):
        convert(full, spec, "3d")
    found = convert(full, spec, "3d", options=ReadOptions(skip=("lm_head",)))
    assert len(found.tensors) == 4


def test_a_saved_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    found = converted(tiny.EXPERTS, "3d")
    found.save(tmp_path / "a" / "new")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["new"]
    with safe_open(tmp_path / "a" / "new" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["made_by"].endswith("convert to 3d")
    with pytest.raises(AdapterError, match="exists already"):
        found.save(tmp_path / "a" / "new")
    broken: Mapping[str, Any] = {**found.config, "base_model_name_or_path": object()}
    with pytest.raises(TypeError):
        Converted(found.tensors, broken, "3d", True, {}, found.report).save(tmp_path / "b")
    assert not (tmp_path / "b").exists() and len(list(tmp_path.iterdir())) == 1
    json.loads((tmp_path / "a" / "new" / "adapter_config.json").read_text())
