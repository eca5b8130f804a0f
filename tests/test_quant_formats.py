"""Every registered weight format: what is stored, what it means, and what the layer makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from moegraft.errors import MoegraftError, PlanError, UnsupportedError
from moegraft.plan import make_plan
from moegraft.problem import Problem
from moegraft.quant import FORMATS, WeightFormat, format_of
from moegraft.quant.activations import rounded_activations
from moegraft.quant.elements import E2M1, E2M1_VALUES, E4M3
from moegraft.quant.experts import dequantise_experts, expert_matrix, quantise_experts
from moegraft.quant.matrices import dequantise, quantise
from moegraft.quant.scales import E8M0
from moegraft.testing import (
    LAYOUTS,
    assert_bit_equal,
    random_weights,
)

#: Sizes with whole blocks, partial ones and less than one block.
SIZES = [(256, 384), (200, 160), (24, 48)]
#: Largest error of one value, as a share of the largest in its block: half a step at the top.
WORST = {"e4m3": 32 / 448 / 2, "e2m1": 1 / 6}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(weight_format: WeightFormat, rows: int, columns: int) -> torch.Tensor:
    """A matrix that the format holds exactly: values of the element times scales it can have."""
    generator = torch.Generator().manual_seed(3)
    element = weight_format.element
    largest = int(element.largest)
    choices = torch.tensor(E2M1_VALUES) if element is E2M1 else torch.arange(0.0, 15.0)
    values = choices[torch.randint(len(choices), (rows, columns), generator=generator)]
    values[:, :: weight_format.block[1] or columns] = largest  # each block has the largest value
    signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2.0 - 1
    down, across = weight_format.grid(rows, columns)
    scales = 2.0 ** torch.randint(-3, 1, (down, across), generator=generator)
    height = weight_format.block[0] or rows
    width = weight_format.block[1] or columns
    scales = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return values * signs * scales * 0.25


def test_e2m1_codes_are_those_of_the_standard() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes[0::2] | (codes[1::2] << 4)
    values = E2M1.decode(packed)
    assert values.tolist() == [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert E2M1.encode(torch.tensor([6.0, -0.5])).tolist() == [0x97]
    assert torch.equal(E2M1.encode(values), packed)


def test_e2m1_rounds_to_nearest_and_ties_to_even() -> None:
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1_VALUES)])
    padded = torch.cat([middles, torch.tensor([9.0])])
    assert E2M1.decode(E2M1.encode(padded)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    values = noise(1000) * 3
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    nearest = table[(values[:, None] - table).abs().argmin(1)]
    assert torch.equal(E2M1.decode(E2M1.encode(values)), nearest)


def test_e8m0_scales_are_exact_powers_of_two() -> None:
    found = E8M0.decode(torch.arange(255, dtype=torch.uint8))
    assert found.tolist() == [2.0**e for e in range(-127, 128)]


def test_e4m3_codes_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert_bit_equal(E4M3.decode(codes).nan_to_num(500.0), codes.float().nan_to_num(500.0))
    assert E4M3.decode(codes).isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert E4M3.decode(codes[:0]).shape == (0,)


def test_e4m3_is_clamped_not_nan() -> None:
    assert E4M3.decode(E4M3.encode(torch.tensor([1e6, -500.0]))).tolist() == [448.0, -448.0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_value_is_within_half_a_step_of_its_block(name: str, sizes: tuple[int, int]) -> None:
    found, matrix = format_of(name), noise(*sizes)
    stored = quantise(matrix, found)
    assert stored.values.shape == (sizes[0], sizes[1] // found.element.per_item)
    assert stored.values.dtype == found.element.storage
    assert tuple(stored.scales.shape) == found.grid(*sizes)
    assert stored.scales.dtype == found.scale.storage
    num_bytes = stored.values.nbytes + stored.scales.nbytes
    num_bytes += 0 if stored.global_scale is None else stored.global_scale.nbytes
    assert num_bytes == found.num_bytes(*sizes)
    back = dequantise(stored, found)
    assert back.shape == matrix.shape and back.dtype == torch.float32
    height, width = found.block[0] or sizes[0], found.block[1] or sizes[1]
    slack = 1.07 if found.scale.has_global else 1.0  # the scale is rounded to e4m3 itself
    if found.name == "mxfp4":
        slack = 2.0  # powers of two: up to 8 is clamped to 6
    for top in range(0, sizes[0], height):
        for left in range(0, sizes[1], width):
            block = (slice(top, top + height), slice(left, left + width))
            bound = WORST[found.element.name] * slack * matrix[block].abs().max()
            assert (back - matrix)[block].abs().max() <= bound


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_can_hold_comes_back_exactly_and_stays(name: str) -> None:
    found = format_of(name)
    matrix = exact(found, 256, 384)
    back = dequantise(quantise(matrix, found), found)
    if found.scale.has_global:  # the global scale is no power of two
        torch.testing.assert_close(back, matrix, rtol=1e-6, atol=0)
    else:
        assert_bit_equal(back, matrix)
    once = dequantise(quantise(noise(64, 96), found), found)
    twice = dequantise(quantise(once, found), found)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_tiny_values_stay_finite(name: str) -> None:
    found = format_of(name)
    assert not dequantise(quantise(torch.zeros(130, 160), found), found).any()
    tiny = torch.zeros(130, 160)
    tiny[0, 0], tiny[3, 150] = 1e-38, 1e30
    back = dequantise(quantise(tiny, found), found)
    assert bool(torch.isfinite(back).all()) and back[3, 150] > 0.9e30


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(name: str, broken: float) -> None:
    matrix = noise(32, 32)
    matrix[4, 5] = broken
    with pytest.raises(MoegraftError, match="not finite"):
        quantise(matrix, format_of(name))


def test_an_odd_number_of_columns_is_refused_where_two_share_a_byte() -> None:
    with pytest.raises(MoegraftError, match="2 columns into a byte"):
        quantise(noise(8, 15), format_of("nvfp4"))
    assert quantise(noise(8, 15), format_of("fp8-block")).values.shape == (8, 15)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("order", ["gate_first", "up_first", "no_gate"])
def test_gate_and_up_have_grids_of_their_own(name: str, order: str) -> None:
    weights = random_weights(3, 160, 144, LAYOUTS[order])
    found = format_of(name)
    quantised = quantise_experts(weights, name)
    for projection in ("gate", "up") if order != "no_gate" else ("up",):
        rows = weights.layout.columns(projection, 144)
        alone = dequantise(quantise(weights.gate_up[1][rows], found), found)
        assert_bit_equal(expert_matrix(quantised, "gate_up", 1)[rows], alone)
    alone = dequantise(quantise(weights.down[2], found), found)
    assert_bit_equal(expert_matrix(quantised, "down", 2), alone)
    assert (quantised.hidden, quantised.intermediate) == (160, 144)
    assert (quantised.dtype, quantised.num_experts) == (torch.float32, 3)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_come_back_unquantised_with_their_dtype(name: str) -> None:
    weights = random_weights(3, 160, 144, biases=True, dtype=torch.bfloat16)
    back = dequantise_experts(quantise_experts(weights, name))
    assert (back.dtype, back.weight_format, back.scales) == (torch.bfloat16, "unquantized", None)
    error = (back.gate_up.float() - weights.gate_up.float()).norm() / weights.gate_up.float().norm()
    assert error < (0.04 if format_of(name).bits == 8 else 0.14)
    assert dequantise_experts(weights) is weights


def test_weights_stored_the_other_way_round_are_turned() -> None:
    weights = random_weights(3, 64, 32, LAYOUTS["interleaved_in_major"], biases=True)
    quantised = quantise_experts(weights, "mxfp4")
    assert quantised.layout.out_major and quantised.gate_up_bias is weights.gate_up_bias
    turned = quantise_experts(
        replace(
            weights,
            gate_up=weights.gate_up_oi.contiguous(),
            down=weights.down_oi.contiguous(),
            layout=replace(weights.layout, out_major=True),
        ),
        "mxfp4",
    )
    assert_bit_equal(quantised.gate_up, turned.gate_up)
    assert_bit_equal(quantised.down, turned.down)


def test_w8a8_rounds_what_the_base_reads_and_nothing_else() -> None:
    # absmax 0.01 beside 100: without scales of their own the small rows would vanish
    rows = torch.cat([noise(4, 160) * 0.003, noise(4, 160, seed=1) * 30])
    found = format_of("fp8-block")
    seen = rounded_activations(rows, found)
    error = (seen - rows).norm(dim=1) / rows.norm(dim=1)
    assert bool((error > 1e-3).all()) and bool((error < 0.04).all())
    assert rounded_activations(rows, format_of("fp8-block-w8a16")) is rows
    assert rounded_activations(rows[:0], found).shape == (0, 160)


def test_native_w4a4_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="Blackwell"):
        format_of("nvfp4-w4a4")
    with pytest.raises(UnsupportedError, match=r"nvfp4-w4a4.*Blackwell"):
        quantise_experts(random_weights(2, 32, 32), "nvfp4-w4a4")
    problem = replace(Problem.of(random_weights(2, 32, 32), 4, 2), weight_format="nvfp4-w4a4")
    with pytest.raises(PlanError, match="Blackwell"):
        make_plan(problem, "cpu")
    with pytest.raises(UnsupportedError, match=r"no weight format 'int3'.*fp8-block, "):
        format_of("int3")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: replace(w, scales=None), "no scales"),
        (lambda w: replace(w, weight_format="unquantized"), "both or neither"),
        (lambda w: replace(w, weight_format="mxfp4"), "scales of gate_up are torch.float8"),
        (lambda w: replace(w, weight_format="fp8-block"), "values are torch.float8"),
        (lambda w: replace(w, scales=replace(w.scales, down=w.scales.down[:, :1])), "of down are"),
        (lambda w: replace(w, scales=replace(w.scales, down_global=None)), "down_global of nvfp4"),
        (
            lambda w: replace(w, scales=replace(w.scales, gate_up_global=w.scales.down_global)),
            "gate_up_global of nvfp4",
        ),
        (lambda w: replace(w, scales=replace(w.scales, dtype=torch.int8)), "scales.dtype"),
    ],
)
def test_scales_that_do_not_fit_are_refused(change, says: str) -> None:  # type: ignore[no-untyped-def]
    weights = quantise_experts(random_weights(2, 32, 32), "nvfp4")
    with pytest.raises(MoegraftError, match=says):
        change(weights)


def test_a_format_takes_the_bytes_that_its_name_promises() -> None:
    sizes = {name: f.num_bytes(1024, 1024) * 8 / 2**20 for name, f in FORMATS.items()}
    assert math.isclose(sizes["nvfp4"], 4.5, rel_tol=1e-3)
    assert math.isclose(sizes["mxfp4"], 4.25, rel_tol=1e-3)
    assert all(8 <= sizes[name] < 8.05 for name in FORMATS if name.startswith("fp8"))
