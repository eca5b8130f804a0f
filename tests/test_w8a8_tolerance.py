"""What a layer that rounds activations to FP8 may be off by: honest flips pass, faults do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moegraft.bench.cases import make_case, random_table
from moegraft.bench.every_row import EveryRow
from moegraft.bench.harness import Timer
from moegraft.bench.layer_runs import CheckedBase, CheckedRun, Expected, LayerRun, WrongResultError
from moegraft.bench.made import quantised_layer
from moegraft.bench.options import DecodeRequest
from moegraft.bench.shapes import ModelShape
from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import quantise_experts
from moegraft.quant.formats import FORMATS, format_of
from moegraft.sites import expert_site
from moegraft.testing import (
    LayerCase,
    assert_close,
    assert_delta_close,
    layer_case,
    random_factors,
    relative_error,
    tolerance_of,
    unrounded_weights,
)
from moegraft.types import ExpertWeights

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INTERMEDIATE = 4, 384, 256
DTYPES = (torch.bfloat16, torch.float16)


def w8a8_case(dtype: torch.dtype, seed: int = 0) -> LayerCase:
    """A case whose groups of 128 columns differ in size, as those of trained weights do."""
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
    case = layer_case(
        24, [random_factors(site, 8, seed=9, dtype=dtype)], [0, -1], num_experts=EXPERTS,
        hidden=HIDDEN, intermediate=INTERMEDIATE, biases=True, dtype=dtype, seed=seed,
    )  # fmt: skip
    sizes = torch.tensor([1.0, 0.5, 1.5]).to(dtype).repeat_interleave(128)
    weights = case.weights
    scaled = replace(
        weights, gate_up=weights.gate_up * sizes, down=weights.down * sizes[:INTERMEDIATE]
    )
    return replace(case, weights=quantise_experts(scaled, "fp8-block"))


def with_noise(case: LayerCase, size: float) -> LayerCase:
    """Add what sums in another precision add: noise on gate and up, whose size is about 1."""
    bias = case.weights.gate_up_bias
    assert bias is not None
    generator = torch.Generator().manual_seed(3)
    noisy = bias.double() + size * torch.randn(bias.shape, generator=generator).double()
    return replace(case, weights=replace(case.weights, gate_up_bias=noisy))


def with_scales(case: LayerCase, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> LayerCase:
    """Change copies of the scales of gate_up ``[E, 4, 3]`` and down ``[E, 3, 2]``."""
    scales = case.weights.scales
    assert scales is not None
    gate_up, down = scales.gate_up.clone(), scales.down.clone()
    change(gate_up, down)
    changed = replace(scales, gate_up=gate_up, down=down)
    return replace(case, weights=replace(case.weights, scales=changed))


def swap(scales: torch.Tensor) -> None:
    scales[..., :2] = scales[..., :2].flip(-1)


FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "two groups of gate_up swapped": lambda gate_up, down: swap(gate_up),
    "two groups of down swapped": lambda gate_up, down: swap(down),
    "a group of gate_up 25 % off": lambda gate_up, down: gate_up[..., 2].mul_(1.25),
    "a group of down 25 % off": lambda gate_up, down: down[..., 0].mul_(0.75),
    "rows of up with the scales of gate": lambda gate_up, down: gate_up[:, 2:].copy_(gate_up[:, 1]
        [:, None]),
    "one cell of one expert 25 % off": lambda gate_up, down: down[2, 1, 0].mul_(1.25),
}  # fmt: skip


@pytest.mark.parametrize("size", [2**-13, 2**-11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_flips_pass_and_are_more_than_the_dtype_allows(
    dtype: torch.dtype, size: float
) -> None:
    case = w8a8_case(dtype)
    noisy = with_noise(case, size)
    base, lora = noisy.reference(base=True).to(dtype), noisy.reference().to(dtype)
    expected = case.reference(base=True)
    assert_close(base, expected, dtype, case.unrounded(base=True))
    assert_close(lora, case.reference(), dtype, case.unrounded())
    assert_delta_close(lora, base, case.reference(), expected, w8a8=True)
    if dtype == torch.float16:
        assert relative_error(base, expected) > tolerance_of(dtype).output


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_scale_fails(dtype: torch.dtype, fault: str) -> None:
    case = w8a8_case(dtype)
    wrong = with_scales(case, FAULTS[fault]).reference(base=True).to(dtype)
    with pytest.raises(AssertionError, match="output: "):
        assert_close(wrong, case.reference(base=True), dtype, case.unrounded(base=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_rounds_no_activations_fails(dtype: torch.dtype) -> None:
    case = w8a8_case(dtype)
    unrounded = case.unrounded()
    assert unrounded is not None
    with pytest.raises(AssertionError, match="output: "):
        assert_close(unrounded.to(dtype), case.reference(), dtype, unrounded)


def test_an_error_along_that_of_the_format_fails_though_its_size_alone_would_pass() -> None:
    case = w8a8_case(torch.bfloat16)
    rounded, unrounded = case.reference(), case.unrounded()
    assert unrounded is not None
    actual = (rounded + 0.2 * (rounded - unrounded)).bfloat16()
    error = relative_error(rounded, unrounded)
    assert relative_error(actual, rounded) < tolerance_of(torch.bfloat16, error).output
    with pytest.raises(AssertionError, match="against activations as they are"):
        assert_close(actual, rounded, torch.bfloat16, unrounded)


def test_tolerances_come_from_the_formats_own_error_and_never_below_the_dtypes() -> None:
    assert tolerance_of(torch.float16).unrounded is None
    found = tolerance_of(torch.float16, 0.04)
    assert (found.output, found.delta, found.unrounded) == (0.01, 2e-2, pytest.approx(0.044))
    assert tolerance_of(torch.float16, 0.04, num_rows=8).output == 0.02
    exact = tolerance_of(torch.bfloat16, 0.0)
    assert (exact.output, exact.unrounded) == (1e-2, 1e-2)
    for error in (0.5, float("inf"), float("nan")):
        with pytest.raises(AssertionError, match="not of one layer"):
            tolerance_of(torch.bfloat16, error)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_without_rounded_activations_keep_the_bars_of_their_dtype(name: str) -> None:
    weights = quantised_layer(ModelShape("tiny", "tiny", 2, 160, 96, 2), name, CPU)
    found = unrounded_weights(weights)
    assert (found is None) == (format_of(name).activation_group is None)
    if found is not None:
        assert found.gate_up is weights.gate_up and found.scales is weights.scales
        assert format_of(found.weight_format).activation_group is None


class DividesAsCuda(TorchDispatchMode):
    """Division by a number as torch has it on CUDA: multiplication by its reciprocal."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            return args[0] * (torch.ones(()) / args[1])
        return func(*args, **(kwargs or {}))


def test_activations_are_rounded_alike_where_division_is_by_the_reciprocal() -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    wanted = rounded_activations(x, format_of("fp8-block"))
    with DividesAsCuda():
        assert not torch.equal(x / 448.0, x / torch.full_like(x, 448.0)), "the mode does nothing"
        found = rounded_activations(x, format_of("fp8-block"))
    assert torch.equal(found, wanted)


SHAPE = ModelShape("small", "small", 4, 384, 256, 2)


@pytest.mark.parametrize("checks", [Expected, EveryRow])
def test_bench_refuses_a_wrong_group_and_passes_honest_flips(checks: type[Expected]) -> None:
    def changed(case: Any, weights: ExpertWeights, lora: bool) -> LayerRun:
        return LayerRun.of_layer(replace(case, weights=weights), None if lora else "base", lora)

    request = DecodeRequest(SHAPE, 6, 4, 2, 3, weight_format="fp8-block")
    weights = quantised_layer(SHAPE, "fp8-block", CPU)
    case = make_case(request, weights, random_table(SHAPE, 4, 3, "separate", CPU), 0)
    expected, timer = checks(case), Timer(CPU, 1)
    own = CheckedBase(changed(case, weights, False), expected, timer)
    assert 0.02 < own.checked["format_error"] < 0.06
    # The noise of an FP8 tensor core's sums: its accumulators have 13 bits behind the point.
    assert weights.scales is not None
    generator = torch.Generator().manual_seed(1)
    noise = 1 + 2**-13 * torch.randn(weights.scales.gate_up.shape, generator=generator)
    honest = replace(
        weights, scales=replace(weights.scales, gate_up=weights.scales.gate_up * noise)
    )
    assert CheckedBase(changed(case, honest, False), expected, timer).checked["output_error"] > 0
    CheckedRun(changed(case, honest, True), expected, timer)
    wrong = weights.scales.gate_up.clone()
    wrong[..., 1] *= 1.25
    off = replace(weights, scales=replace(weights.scales, gate_up=wrong))
    for run, check in (
        (changed(case, off, False), CheckedBase),
        (changed(case, off, True), CheckedRun),
    ):
        with pytest.raises(WrongResultError, match="output"):
            check(run, expected, timer)
