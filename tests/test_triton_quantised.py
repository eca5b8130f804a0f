"""Layers with quantised weights on the Triton backend, in its interpreter, in every mode."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from moegraft.backends.triton import FORMATS
from moegraft.backends.triton.device import INTERPRETER
from moegraft.backends.triton.stages import TritonStages
from moegraft.backends.triton.tiles import candidates, choose_config, config_ok
from moegraft.backends.triton.weights.rows import make_base_rows, run_base_rows
from moegraft.call import Mode
from moegraft.errors import PlanError
from moegraft.layer import MoeLoraLayer
from moegraft.problem import Problem
from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import expert_matrix, quantise_experts
from moegraft.quant.formats import format_of
from moegraft.sites import expert_site
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_bit_equal,
    assert_case,
    layer_case,
    poisoned_empty,
    random_factors,
    random_weights,
)
from moegraft.types import ExpertWeights, SiteFactors

MODES: tuple[Mode, ...] = ("in_kernel", "fused_serial", "two_stream", "serial")
#: H and I of partial blocks, tiles and groups.
HIDDEN, INTERMEDIATE = 160, 144


def quantised_case(
    name: str, layout: str = "gate_first", activation: str = "silu", tokens: int = 7, **options: Any
) -> LayerCase:
    """A case with every kind of adapter, ranks above one product's, an empty slot, -1 ids."""
    dtype = options.get("dtype", torch.float32)
    site = expert_site("experts", 5, HIDDEN, INTERMEDIATE, LAYOUTS[layout])
    adapters = [
        None,
        random_factors(site, 3, "fused", scale=0.25, seed=1, dtype=dtype),
        random_factors(site, 12, "separate", experts=[4, 0, 2], scale=8.0, seed=2, dtype=dtype),
        random_factors(site, 70, "shared_outer", seed=4, dtype=dtype),
        random_factors(site, 5, projections=["down"], seed=5, dtype=dtype),
    ]
    return layer_case(
        tokens,
        adapters,
        [-1, 0, 1, 2, 3, 4, -1],
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        layout=LAYOUTS[layout],
        activation=ACTIVATIONS[activation],
        scale=2.5,
        weight_format=name,
        **{"biases": True, "minus_ones": 0.1, **options},
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_mode_matches_the_reference(name: str, mode: Mode) -> None:
    case = quantised_case(name)
    layer = case.layer("triton", mode)
    assert layer.plan(7, 2).mode == mode
    assert_case(case, layer)


@pytest.mark.parametrize(
    ("layout", "activation"),
    [("up_first", "gelu_tanh"), ("no_gate", "relu2"), ("interleaved", "clamped")],
)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # h of pairs that are not local is anything
@pytest.mark.parametrize("name", FORMATS)
def test_orders_of_gate_and_up(name: str, layout: str, activation: str) -> None:
    if layout == "interleaved" and format_of(name).block[0] > 1:
        pytest.skip("blocks of 128 rows would mix gate and up")
    case = quantised_case(name, layout, activation)
    with poisoned_empty():
        assert_case(case, case.layer("triton", "in_kernel"))
        assert_case(case, case.layer("triton", "serial"))


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("name", ["fp8-block", "mxfp4"])
def test_no_token_one_and_several_blocks_per_expert(name: str, tokens: int) -> None:
    # Half precision: in fp32, one value of h that e4m3 rounds the other way would show.
    case = quantised_case(name, tokens=tokens, minus_ones=0.0, dtype=torch.float16)
    assert_case(case, case.layer("triton"))


@pytest.mark.parametrize("name", FORMATS)
def test_half_precision(name: str) -> None:
    case = quantised_case(name, dtype=torch.float16)
    assert_case(case, case.layer("triton"))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the broken adapter's rows
@pytest.mark.parametrize("name", ["fp8-block", "nvfp4"])
@pytest.mark.parametrize("mode", ["in_kernel", "two_stream"])
def test_rows_without_an_adapter_and_of_others_never_see_a_broken_one(
    name: str, mode: Mode
) -> None:
    case = quantised_case(name)
    held = list(case.adapters)
    broken = held[1]
    assert broken is not None
    held[1] = SiteFactors(
        {
            projection: replace(factor, lora_A=torch.full_like(factor.lora_A, torch.nan))
            for projection, factor in broken.projections.items()
        },
        broken.expert_map,
    )
    good = case.run(case.layer("triton", mode))
    bad_case = replace(case, adapters=tuple(held))
    bad = bad_case.run(bad_case.layer("triton", mode))
    rows = torch.tensor([slot != 1 for slot in case.token_slots])
    assert_bit_equal(bad[rows], good[rows])
    base = case.run(case.layer("triton", mode), base=True)
    plain = torch.tensor([slot < 0 or case.adapters[slot] is None for slot in case.token_slots])
    assert_bit_equal(good[plain], base[plain])


@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_inputs_read_the_exact_weights(name: str) -> None:
    """448 is the largest e4m3, so a W8A8 row that holds it and zeros has the scale 1."""
    weights = with_powers_of_two(quantise_experts(random_weights(3, 160, 144), name))
    for side, columns in (("gate_up", 160), ("down", 144)):
        config, _ = choose_config(Problem.of(weights, columns, 1), INTERPRETER)
        stages = TritonStages(config.overlapping(False))
        order = stages.permute(torch.ones(columns, 1, dtype=torch.int32), None, 3, 0)
        stage = stages.gate_up if side == "gate_up" else stages.down
        found = stage(448.0 * torch.eye(columns), weights, order)
        wanted = 448.0 * expert_matrix(weights, side, 1).T  # type: ignore[arg-type]
        assert torch.equal(found, wanted), side  # 0 may lose its sign


def with_powers_of_two(weights: ExpertWeights) -> ExpertWeights:
    """Return the weights with fp32 scales that no product rounds."""
    scales = weights.scales
    assert scales is not None
    found: dict[str, Any] = {
        field: torch.exp2(torch.log2(scale).round())
        for field in ("gate_up", "down", "gate_up_global", "down_global")
        if (scale := getattr(scales, field)) is not None and scale.dtype == torch.float32
    }
    return replace(weights, scales=replace(scales, **found))


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "fp8-tensor"])
def test_a_norm_behind_each_expert_and_an_activation_of_the_hosts_own(name: str) -> None:
    case = quantised_case(name, activation="custom")
    assert_case(case, case.layer("triton", "two_stream"))
    weights = replace(case.weights, post_norm=torch.nn.functional.normalize)
    normed = replace(case, weights=weights)
    assert_case(normed, normed.layer("triton"))


def test_x_of_any_stride_is_rounded_row_by_row() -> None:
    x = torch.randn(40, 700)[::2, 100:500]
    rows = make_base_rows("fp8-block", 20, 400, torch.float32, x.device)
    assert rows is not None and rows.scales is not None
    run_base_rows(x, rows)
    seen = rows.values[:, :400].float() * rows.scales.repeat_interleave(128, 1)[:, :400]
    assert torch.equal(seen, rounded_activations(x, format_of("fp8-block")))


@pytest.mark.parametrize("columns", [64, 144, 4104])
def test_columns_change_places_for_4_bit_weights_and_end_with_zeros(columns: int) -> None:
    x = torch.randn(3, columns)
    rows = make_base_rows("mxfp4", 3, columns, torch.float32, x.device)
    assert rows is not None and rows.scales is None
    rows.values.fill_(torch.nan)
    run_base_rows(x, rows)
    found = rows.values.unflatten(1, (-1, 2, 2, 4, 2))  # 16 of 32, 8 of 16, word, half of a word
    padded = torch.nn.functional.pad(x, (0, -columns % 32)).unflatten(1, (-1, 4, 2, 2, 2))
    assert torch.equal(found, padded.permute(0, 1, 4, 5, 2, 3))
    rows = make_base_rows("mxfp4", 3, columns, torch.float32, x.device, eights=True)
    assert rows is not None
    run_base_rows(x, rows)
    found = rows.values.unflatten(1, (-1, 4, 2))  # 4 pairs, half of a word
    assert torch.equal(found, padded.flatten(1).unflatten(1, (-1, 2, 4)).transpose(2, 3))


@pytest.mark.parametrize("problem", [1, 4, 16, 64, 256, 512, 8192])
@pytest.mark.parametrize("shared_memory", [101_376, 232_448])
@pytest.mark.parametrize("name", FORMATS)
def test_every_size_has_tiles_that_fit(name: str, shared_memory: int, problem: int) -> None:
    facts = replace(INTERPRETER, shared_memory=shared_memory)
    for dtype, shape in product(("bfloat16", "float32"), ((128, 2048, 768), (32, 2880, 2880))):
        of = Problem(problem, 8, *shape, True, dtype, name, "cuda", 16)
        config, _ = choose_config(of, facts)
        assert config_ok(config, of, facts)
        found = list(islice(candidates(of, facts), 50))
        assert found[0] == config and len(set(found)) == len(found) > 1
        assert all(config_ok(other, of, facts) for other in found)


def test_rows_of_4_bits_that_are_no_whole_words_are_refused_by_their_sizes() -> None:
    weights = quantise_experts(random_weights(2, 36, 32), "nvfp4")
    with pytest.raises(PlanError, match=r"H and I are \(36, 32\).*multiples of 8"):
        MoeLoraLayer(weights, backend="triton")
