"""What of PEFT's files is not served: refused by name, with the reason and a way out if any."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import tiny
from moegraft.adapters import (
    ReadOptions,
    bind,
    check_bound,
    make_source,
    read_adapter,
)
from moegraft.errors import AdapterError
from tiny import EXPERTS, MAGNITUDE, bound_case

DORA = "peft/0.21.2/qwen3_moe/dora_attention"


@pytest.mark.parametrize(
    ("case", "part", "reason"),
    [
        ("modules_to_save", "lm_head.weight", "modules_to_save"),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_can_be_excused(
    case: str, part: str, reason: str
) -> None:
    path = f"peft/0.21.2/qwen3_moe/{case}"
    refused = sorted(key for key in tiny.tensors_of(path) if part in key)
    with pytest.raises(AdapterError, match="nothing was loaded") as caught:
        bound_case(path)
    assert refused[0] in str(caught.value) and reason in str(caught.value)
    excused = bound_case(path, ReadOptions(skip=(re.escape(part),)))
    assert set(refused) <= set(excused.report.skipped)
    assert excused.report.bound + len(excused.report.skipped) == excused.report.total


@pytest.mark.parametrize(
    ("case", "names", "reason"),
    [
        (
            "qwen3_moe/embedding",
            ["embed_tokens.base_layer.weight", "embed_tokens.lora_embedding_A"],
            "bound 0 of 3 .*LoRA on embeddings and trainable tokens are not served",
        ),
        (
            "gpt_oss/experts_and_biases",
            ["experts.base_layer.base_layer.lora_A.weight"],
            "4 parameters are wrapped .*only the two weights",
        ),
    ],
)
def test_other_tensors_that_are_not_served_are_named(
    case: str, names: list[str], reason: str
) -> None:
    with pytest.raises(AdapterError, match=reason) as caught:
        bound_case(f"peft/0.21.2/{case}")
    assert all(name in str(caught.value) for name in names)
    assert "which one" not in str(caught.value)
    assert ("another model" in str(caught.value)) == case.startswith("gpt_oss/experts")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("model.embed_tokens", "it is an embedding; LoRA on embeddings is not served"),
        ("transformer.wte", r"embedding; .* \(the file calls it wte\)"),
        ("model.no_such", "has no such module"),
    ],
)
def test_factors_of_embeddings_are_refused_under_all_their_names(module: str, reason: str) -> None:
    pair = {
        f"{module}.lora_A.weight": torch.ones(3, 24),
        f"{module}.lora_B.weight": torch.ones(64, 3),
    }
    source = make_source({**tiny.tensors_of(EXPERTS), **pair}, tiny.config_of(EXPERTS))
    spec = tiny.spec_of("qwen3_moe")
    with pytest.raises(AdapterError, match=reason) as caught:
        check_bound(bind(source, spec).report, spec)
    assert f"{module}.lora_A.weight" in str(caught.value)


def test_a_dora_magnitude_is_left_out_with_its_factors_or_not_at_all() -> None:
    source = read_adapter(tiny.folder(DORA))
    spec = replace(tiny.spec_of("qwen3_moe"), serves_vectors=False)
    with pytest.raises(AdapterError, match=r"4 of 12 .*DoRA is not served") as caught:
        check_bound(bind(source, spec).report, spec)
    assert "skip" not in str(caught.value)
    alone = ReadOptions(skip=("lora_magnitude_vector",))
    with pytest.raises(AdapterError, match=r"4 of 12 .*can't be left out alone") as caught:
        bound_case(DORA, alone)
    assert "skip=" not in str(caught.value)
    both = ReadOptions(skip=("lora_magnitude_vector", r"q_proj"))
    report = bind(source, spec, both).report
    assert len(report.skipped) == 6 and all("v_proj" in key for key in report.refused)
    assert report.bound + len(report.refused) + len(report.skipped) == report.total


def test_a_skip_pattern_that_matches_nothing_is_noted() -> None:
    options = ReadOptions(skip=("lm_haed", "lm_head"))
    report = bound_case("peft/0.21.2/qwen3_moe/modules_to_save", options).report
    assert len(report.skipped) == 1 and report.notes == ("skip 'lm_haed' matches no tensor's name",)


def test_a_dora_magnitude_on_experts_is_refused_by_name() -> None:
    tensors = {**tiny.tensors_of(EXPERTS), MAGNITUDE: torch.ones(4, 24)}
    with pytest.raises(AdapterError, match="DoRA is not served") as caught:
        spec = tiny.spec_of("qwen3_moe")
        source = make_source(tensors, tiny.config_of(EXPERTS, use_dora=True))
        check_bound(bind(source, spec).report, spec)
    assert MAGNITUDE in str(caught.value)
