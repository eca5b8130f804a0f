"""The same adapter in every layout: the same canonical tensors, bit for bit, and PEFT's weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tiny
from moegraft.adapters import BoundAdapter, ReadOptions, bind, check_bound, read_adapter
from moegraft.adapters.merge import merge
from moegraft.testing import assert_bit_equal, relative_error
from tiny import FIXTURES
from tiny_grafts import new_graft, prompts

TOLERANCE = 1e-5
LAYOUTS = FIXTURES / "layouts"
GROUPS = sorted(str(p.parent.relative_to(LAYOUTS)) for p in LAYOUTS.rglob("merged.safetensors"))
CASES = sorted(str(p.parent.relative_to(LAYOUTS)) for p in LAYOUTS.rglob("adapter_config.json"))
#: Files of Unsloth's older order without its mark need the caller's word.
OPTIONS = {"unsloth_grouped": ReadOptions(expert_b_layout="grouped_by_expert")}
READER = {
    "peft": "peft_fused",
    "peft_swapped": "peft_fused",
    "unsloth_grouped": "peft_fused",
    "unsloth_marked": "peft_fused",
    "unsloth_rank_major": "peft_fused",
    "per_expert": "per_expert",
    "tinker_per_expert": "per_expert",
    "mixed": "per_expert, per_projection",
}


def bound_layout(case: str) -> BoundAdapter:
    """A case such as ``qwen3_moe/distinct/mixed``, bound in full."""
    model, _, layout = case.split("/")
    spec = tiny.spec_of(model)
    bound = bind(read_adapter(LAYOUTS / case), spec, OPTIONS.get(layout))
    check_bound(bound.report, spec)
    return bound


def test_every_group_has_every_layout_that_can_hold_it() -> None:
    found = {
        group: {c.split("/")[2] for c in CASES if c.startswith(f"{group}/")} for group in GROUPS
    }
    general = {*READER, "stacked_w", "stacked_proj"}
    assert found["gpt_oss/distinct"] == general - {"mixed"}
    assert found["qwen3_moe/distinct"] == general | {"stacked_gate_up"}
    outer = general | {"stacked_gate_up", "shared_outer"}
    assert found["qwen3_moe/outer"] == outer
    assert found["qwen3_moe/shared"] == (outer | {"shared_2d"}) - {"tinker_per_expert"}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_has_the_canonical_tensors_of_pefts_own_file(case: str) -> None:
    group = case.rpartition("/")[0]
    bound, known = bound_layout(case), bound_layout(f"{group}/peft")
    assert bound.report.bound == bound.report.total and bound.report.skipped == ()
    tiny.assert_same(bound, known)
    assert {len(f.projections) for f in bound.factors.values()} == {3}
    for factors in bound.factors.values():
        assert factors.expert_map is None
    entries = {
        f"{name}.{leaf}": getattr(factor, leaf).shape[0]
        for name, factor in bound.factors["model.layers.1.mlp.experts"].projections.items()
        for leaf in ("lora_A", "lora_B")
    }
    shared = {
        "distinct": set(),
        "outer": {"gate.lora_A", "up.lora_A", "down.lora_B"},
        "shared": set(entries),
    }[group.split("/")[1]]
    assert entries == {name: 1 if name in shared else 4 for name in entries}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_merges_to_pefts_weights(case: str) -> None:
    model, group, _ = case.split("/")
    bound, expected = bound_layout(case), load_file(LAYOUTS / model / group / "merged.safetensors")
    deltas = tiny.all_deltas(bound, tiny.spec_of(model))
    assert set(deltas) == set(expected)
    for key, value in expected.items():
        merged = tiny.parameter_of(model, key) + deltas[key]
        assert relative_error(merged, value) <= TOLERANCE, key
        assert relative_error(deltas[key], value - tiny.parameter_of(model, key)) <= TOLERANCE


@pytest.mark.parametrize("group", GROUPS)
def test_every_layout_merges_to_the_same_bytes(group: str, tmp_path: Path) -> None:
    model = group.split("/")[0]
    written = set()
    for case in (case for case in CASES if case.startswith(f"{group}/")):
        out = tmp_path / case.replace("/", "-")
        merge(FIXTURES / "models" / model, bound_layout(case), tiny.spec_of(model), out)
        written.add((out / "model.safetensors").read_bytes())
        shutil.rmtree(out)
    assert len(written) == 1


@pytest.mark.parametrize("case", CASES)
def test_the_report_names_the_reader_and_its_evidence(case: str) -> None:
    layout = case.rpartition("/")[2]
    report = bound_layout(case).report
    assert ", ".join(sorted(report.layouts)) == READER.get(layout, "per_projection")
    evidence = " ".join(report.layouts.values())
    notes = " ".join(report.notes)
    words = {
        "peft": "normal orientation (by shape); B rank_major (PEFT's order)",
        "peft_swapped": "swapped orientation (by shape)",
        "unsloth_grouped": "B grouped_by_expert (by option)",
        "unsloth_marked": "B grouped_by_expert (by the file's marker)",
        "unsloth_rank_major": "B rank_major (by the file's marker)",
        "mixed": "rows of gate_up_proj's B are [gate | up]",
        "shared_2d": 'the config\'s "veomni_lora": {"moe_mode": "shared"}',
    }
    assert words.get(layout, "") in evidence
    copies = "/distinct/" not in case and not case.endswith(("shared_2d", "outer/shared_outer"))
    assert ("is the same for all experts" in notes) == copies


def test_unsloths_older_order_without_a_mark_is_read_as_pefts_with_a_warning() -> None:
    case = LAYOUTS / "qwen3_moe/distinct/unsloth_grouped"
    report = bind(read_adapter(case), tiny.spec_of("qwen3_moe")).report
    assert "rank_major (PEFT's order)" in report.layouts["peft_fused"]
    assert any("signs of Unsloth" in note and "--expert-b-layout" in note for note in report.notes)


@pytest.mark.parametrize("group", GROUPS)
def test_a_model_serves_every_layout_with_the_same_bits(group: str) -> None:
    model = group.split("/")[0]
    cases = [case for case in CASES if case.startswith(f"{group}/")]
    graft = new_graft(model, max_adapters=1)
    inputs = prompts(2)
    logits = []
    for case in cases:
        graft.load("one", LAYOUTS / case, OPTIONS.get(case.rpartition("/")[2]))
        logits.append(graft.forward(**inputs, adapters="one").logits)
    for case, other in zip(cases, logits, strict=True):
        assert_bit_equal(other, logits[0], case)
