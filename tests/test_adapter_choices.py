"""Where a file leaves room for doubt: scale, orientation, column order, which projection."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tiny
from moegraft.adapters import BoundAdapter, ModelSpec, ReadOptions, bind, check_bound, make_source
from moegraft.adapters.config import AdapterConfig
from moegraft.errors import AdapterError
from moegraft.sites import expert_site, linear_site
from moegraft.testing import assert_bit_equal, relative_error
from moegraft.types import WeightLayout

CASE = "peft/0.21.2/qwen3_moe/experts"
SITE = "model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]

#: Without a gate up is H -> I and down I -> H: with H == I nothing tells normal from swapped.
SQUARE = ModelSpec((expert_site(SITE, 4, 8, 8, WeightLayout("no_gate")),))
OBLONG = ModelSpec((expert_site(SITE, 4, 8, 6, WeightLayout("no_gate")),))
#: The same for a host that stores [E, in, out].
SQUARE_IN_MAJOR = ModelSpec((expert_site(SITE, 4, 8, 8, WeightLayout("no_gate", False)),))


def pair(module: str, num_in: int, num_out: int, rank: int = 3, seed: int = 0) -> Tensors:
    """A fused pair for four experts with distinct values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{module}.lora_A.weight": torch.randn(4 * rank, num_in, generator=generator),
        f"{module}.lora_B.weight": torch.randn(num_out, 4 * rank, generator=generator),
    }


def bound_to(
    spec: ModelSpec, tensors: Tensors, options: ReadOptions | None = None, **config: Any
) -> BoundAdapter:
    """Bind in full, or raise."""
    bound = bind(make_source(tensors, {"r": 3, "lora_alpha": 6, **config}), spec, options)
    check_bound(bound.report, spec)
    return bound


def delta(bound: BoundAdapter, projection: str, expert: int) -> torch.Tensor:
    """One expert's delta of one projection."""
    factors = bound.factors[SITE]
    return tiny.delta_of(factors.projections[projection], factors, 4)[expert]


@pytest.mark.parametrize(
    ("spec", "version", "swapped"),
    [
        (SQUARE, "0.17.1", True),
        (SQUARE, "0.18.0", True),
        (SQUARE, "0.19.0", True),
        (SQUARE, "0.19.1", False),
        (SQUARE, "0.21.2", False),
        (SQUARE, "0.22.0.dev0", False),
        (SQUARE, "1.0", False),
        (SQUARE_IN_MAJOR, "0.18.0", False),
        (SQUARE_IN_MAJOR, "0.19.0", True),
        (SQUARE_IN_MAJOR, "0.21.2", False),
    ],
)
def test_the_version_that_wrote_it_decides_when_the_shapes_cannot(
    spec: ModelSpec, version: str, swapped: bool
) -> None:
    tensors = {**pair(f"{SITE}.base_layer", 8, 8, seed=1), **pair(SITE, 8, 8)}
    bound = bound_to(spec, tensors, peft_version=version)
    lora_a, lora_b = (tensors[f"{SITE}.lora_{x}.weight"] for x in "AB")
    for expert in range(4):
        right = lora_b.view(8, 3, 4)[:, :, expert] @ lora_a.view(4, 3, 8)[expert]
        expected = 2 * (right.t() if swapped else right)
        assert relative_error(delta(bound, "down", expert), expected) < 1e-6
    assert f"PEFT {version} wrote it" in bound.report.layouts["peft_fused"]


@pytest.mark.parametrize("version", ["", "unknown", None])
def test_without_shapes_version_or_option_the_orientation_is_refused(version: str | None) -> None:
    with pytest.raises(AdapterError, match="pass orientation='normal'") as caught:
        bound_to(
            SQUARE,
            pair(SITE, 8, 8),
            peft_version=version,
            target_parameters=["mlp.experts.down_proj"],
        )
    assert f"{SITE}.lora_A.weight" in str(caught.value)


@pytest.mark.parametrize("orientation", ["normal", "swapped"])
def test_the_orientation_option_decides_before_the_version(orientation: Any) -> None:
    bound = bound_to(
        SQUARE,
        pair(SITE, 8, 8),
        ReadOptions(orientation=orientation),
        peft_version="0.21.2",
        target_parameters=["mlp.experts.down_proj"],
    )
    assert f"{orientation} orientation (by the orientation option)" in str(bound.report.layouts)


def test_shapes_decide_before_the_option_and_the_version() -> None:
    options = ReadOptions(orientation="swapped")
    spec, tensors = tiny.spec_of("qwen3_moe"), tiny.tensors_of(CASE)
    bound = bound_to(spec, tensors, options, peft_version="0.18.0")
    assert "normal orientation (by shape)" in bound.report.layouts["peft_fused"]


def test_one_clear_parameter_decides_for_a_square_one() -> None:
    for version in ("0.18.0", "0.21.2"):
        case = f"peft/{version}/olmoe/experts"  # gate_up is square there, down is not
        config = tiny.config_of(case, peft_version=None)
        source = make_source(tiny.tensors_of(case), config)
        bound = bind(source, tiny.spec_of("olmoe"))
        deltas = tiny.all_deltas(bound, tiny.spec_of("olmoe"))
        for key, merged in tiny.merged_parameters(case).items():
            expected = merged - tiny.parameter_of("olmoe", key)
            assert relative_error(deltas[key], expected) < 1e-5


def test_an_adapter_that_is_half_swapped_is_refused() -> None:
    tensors = dict(tiny.tensors_of(CASE))
    swapped = tiny.tensors_of("peft/0.18.0/qwen3_moe/experts")
    for key in tensors:
        if "layers.1.mlp.experts" in key:
            tensors[key] = swapped[key]
    with pytest.raises(AdapterError, match="some of its parameters are swapped and some are not"):
        bound_to(tiny.spec_of("qwen3_moe"), tensors)


@pytest.mark.parametrize(
    ("target", "projection"),
    [("mlp.experts.down_proj", "down"), ("mlp.experts.up_proj", "up"), ("down_proj", "down")],
)
def test_target_parameters_say_which_projection_a_one_sided_adapter_is_for(
    target: str, projection: str
) -> None:
    sizes = (6, 8) if projection == "down" else (8, 6)
    bound = bound_to(OBLONG, pair(SITE, *sizes), target_parameters=[target])
    assert set(bound.factors[SITE].projections) == {projection}
    assert "normal orientation (by shape)" in bound.report.layouts["peft_fused"]


def test_a_one_sided_adapter_that_could_be_either_is_refused_without_target_parameters() -> None:
    with pytest.raises(AdapterError, match="it could be gate_up or down, both fit"):
        bound_to(OBLONG, pair(SITE, 8, 6), peft_version="0.21.2")


@pytest.mark.parametrize("case", ["down_only", "gate_up_only"])
def test_shapes_say_which_projection_it_is_when_the_config_does_not(case: str) -> None:
    path = f"peft/0.21.2/qwen3_moe/{case}"
    config = tiny.config_of(path, target_parameters=None)
    bound = bind(make_source(tiny.tensors_of(path), config), tiny.spec_of("qwen3_moe"))
    projections = {"down"} if case == "down_only" else {"gate", "up"}
    assert set(bound.factors[SITE].projections) == projections
    wrong = tiny.config_of(path, target_parameters=["mlp.experts.router_proj"])
    if case == "down_only":
        bound = bind(make_source(tiny.tensors_of(path), wrong), tiny.spec_of("qwen3_moe"))
        assert bound.report.refused, "a named target that does not fit must not bind"


def grouped(tensors: Tensors) -> Tensors:
    """The same adapter with one block of B columns per expert."""
    return {
        key: t.view(t.shape[0], -1, 4).transpose(1, 2).reshape(t.shape) if "lora_B" in key else t
        for key, t in tensors.items()
    }


@pytest.mark.parametrize("by", ["marker", "option", "option over marker"])
def test_columns_grouped_by_expert_are_read_by_marker_or_option(by: str) -> None:
    spec = tiny.spec_of("qwen3_moe")
    tensors = {k: t for k, t in tiny.tensors_of(CASE).items() if "experts" in k}
    expected = bound_to(spec, tensors)
    options = None if by == "marker" else ReadOptions(expert_b_layout="grouped_by_expert")
    config: dict[str, Any] = {}
    if by != "option":
        config["lora_B_layout"] = "grouped_by_expert" if by == "marker" else "rank_major"
    bound = bound_to(spec, grouped(tensors), options, **config)
    for projection in ("gate", "up", "down"):
        for expert in range(4):
            assert_bit_equal(delta(bound, projection, expert), delta(expected, projection, expert))
    said = "by option" if options else "by the file's marker"
    assert f"grouped_by_expert ({said})" in bound.report.layouts["peft_fused"]


def test_an_unknown_marker_or_signs_of_unsloth_leave_a_note() -> None:
    spec, tensors = tiny.spec_of("qwen3_moe"), tiny.tensors_of(CASE)
    assert bound_to(spec, tensors, lora_B_layout="rank_major").report.notes == ()
    notes = bound_to(spec, tensors, lora_B_layout="diagonal").report.notes
    assert "lora_B_layout='diagonal' is unknown" in notes[0]
    notes = bound_to(spec, tensors, auto_mapping={"unsloth_fixed": True}).report.notes
    assert "expert_b_layout='grouped_by_expert'" in notes[0]


def test_the_scale_is_one_without_any_alpha_whatever_the_order_of_keys() -> None:
    spec = ModelSpec(tuple(linear_site(f"model.layers.{i}.q_proj", 4, 4) for i in (0, 1)))
    tensors: Tensors = {}
    for i, rank in enumerate((16, 64)):
        tensors[f"model.layers.{i}.q_proj.lora_A.weight"] = torch.ones(rank, 4)
        tensors[f"model.layers.{i}.q_proj.lora_B.weight"] = torch.ones(4, rank)
    for items in (list(tensors.items()), list(tensors.items())[::-1]):
        bound = bind(make_source(dict(items), {}), spec)
        scales = {f.projections["linear"].scale for f in bound.factors.values()}
        assert scales == {1.0}


def test_alpha_zero_is_a_delta_of_zero() -> None:
    bound = bound_to(tiny.spec_of("qwen3_moe"), tiny.tensors_of(CASE), lora_alpha=0)
    assert {p.scale for s in bound.report.sites for p in s.projections.values()} == {0.0}


@pytest.mark.parametrize(
    ("config", "name", "scale"),
    [
        ({"r": 8, "lora_alpha": 16}, "model.layers.3.x", 2.0),
        ({"r": 8, "lora_alpha": 16, "use_rslora": True}, "x", 16 / math.sqrt(8)),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"x": 32}}, "model.layers.3.x", 0.5),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"x": 32}}, "model.layers.3.xx", 2.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"x": 32}}, "model.layers.3.yx", 2.0),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"3.x": 128}}, "layers.3.x", 16.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"x": 4, "3.x": 32}}, "layers.3.x", 4.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"^layers.3.x": 4}}, "layers.3.x", 4.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {r"layers\.\d+\.x": 4}}, "layers.3.x", 4.0),
        ({"lora_alpha": 16}, "x", 16 / 5),
        ({"r": 8}, "x", 1.0),
        ({}, "x", 1.0),
    ],
)
def test_the_scale_follows_pefts_rules(config: dict[str, Any], name: str, scale: float) -> None:
    assert AdapterConfig.parse(config).scale_for(name, 5) == pytest.approx(scale)


def test_the_rank_comes_from_the_tensors_and_the_scale_from_the_config() -> None:
    bound = bound_to(tiny.spec_of("qwen3_moe"), tiny.tensors_of(CASE), r=12, lora_alpha=24)
    projections = [p for site in bound.report.sites for p in site.projections.values()]
    assert {(p.rank, p.scale) for p in projections} == {(3, 2.0)}


def test_experts_with_scales_of_their_own_keep_them() -> None:
    case = "per_expert/qwen3_moe/plain"
    config = tiny.config_of(case, alpha_pattern={r"experts\.2\.up_proj": 60})
    spec = tiny.spec_of("qwen3_moe")
    bound = bind(make_source(tiny.tensors_of(case), config), spec)
    plain = bind(make_source(tiny.tensors_of(case), tiny.config_of(case)), spec)
    for expert in range(4):
        factor = 10 if expert == 2 else 1
        expected = factor * delta(plain, "up", expert)
        assert relative_error(delta(bound, "up", expert), expected) < 1e-6
    assert "experts have different scales" in bound.report.notes[0]
