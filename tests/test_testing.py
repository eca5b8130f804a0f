"""The test helpers themselves: a comparison that can't fail would hide every other fault."""

from __future__ import annotations

import pytest
import torch

from moegraft.sites import expert_site
from moegraft.testing import (
    FACTOR_KINDS,
    LAYOUTS,
    TOLERANCES,
    FactorKind,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    layer_case,
    poisoned_empty,
    random_factors,
    random_routing,
    random_weights,
    relative_error,
)
from moegraft.types import WeightLayout


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_assert_close_accepts_just_inside_and_refuses_just_outside(dtype: torch.dtype) -> None:
    expected = torch.full((8, 8), 1024.0, dtype=torch.float64)
    limit = TOLERANCES[dtype].output
    if dtype in (torch.float64, torch.float32):  # finer than the tolerance
        assert_close((expected * (1 + 0.8 * limit)).to(dtype), expected, dtype)
    assert_close(expected.to(dtype), expected, dtype)
    with pytest.raises(AssertionError, match=r"\|\|a-e\|\|/\|\|e\|\| = "):
        assert_close((expected * (1 + 2 * limit)).to(dtype), expected, dtype)


def test_assert_close_names_the_figure_and_the_worst_coordinates() -> None:
    expected = torch.ones(3, 4)
    actual = expected.clone()
    actual[1, 2] = 3.0
    with pytest.raises(AssertionError, match=r"5\.774e-01.*worst row 1.*\(1, 2\): 3, expected 1"):
        assert_close(actual, expected, torch.float32)


def test_assert_close_finds_one_wrong_row_among_very_many() -> None:
    expected = torch.ones(20_000, 2)
    actual = expected.clone()
    actual[777] = 2.0
    assert relative_error(actual, expected) < TOLERANCES[torch.bfloat16].output
    with pytest.raises(AssertionError, match="worst row 777"):
        assert_close(actual.bfloat16(), expected, torch.bfloat16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_assert_close_refuses_values_that_are_not_finite_on_either_side(bad: float) -> None:
    good, damaged = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [bad, 1.0]])
    with pytest.raises(AssertionError, match=r"the result has 1 NaN.*\(1, 0\)"):
        assert_close(damaged, good, torch.float32)
    with pytest.raises(AssertionError, match="the reference has 1 NaN"):
        assert_close(damaged, damaged, torch.float32)


def test_assert_close_refuses_other_shapes_and_dtypes() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2, 1), torch.ones(2, 2), torch.float32)
    with pytest.raises(AssertionError, match="bfloat16"):
        assert_close(torch.ones(2).bfloat16(), torch.ones(2), torch.float32)


def test_assert_close_wants_exact_zeros_where_the_reference_is_zero() -> None:
    assert_close(torch.zeros(2, 2), torch.zeros(2, 2), torch.float32)
    with pytest.raises(AssertionError, match="inf"):
        assert_close(torch.full((2, 2), 1e-30), torch.zeros(2, 2), torch.float32)


def test_a_wrong_delta_cannot_hide_behind_a_large_base() -> None:
    base, delta = torch.full((4, 4), 1e4), torch.ones(4, 4)
    assert_delta_close(base + delta, base, base + delta, base)
    assert relative_error(base + 2 * delta, base + delta) < TOLERANCES[torch.bfloat16].output
    with pytest.raises(AssertionError, match="delta"):
        assert_delta_close(base + 2 * delta, base, base + delta, base)


def test_bit_equality_tells_minus_zero_from_zero_and_accepts_equal_nan() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_bit_equal(nan, nan.clone())
    assert_bit_equal(torch.ones(0, 3), torch.ones(0, 3))
    assert_bit_equal(torch.ones(8)[::8], torch.ones(1))
    with pytest.raises(AssertionError, match=r"1 of 1 values differ.*\(0,\)"):
        assert_bit_equal(torch.tensor([-0.0]), torch.tensor([0.0]))


@pytest.mark.parametrize("kind", FACTOR_KINDS)
@pytest.mark.parametrize("layout", ["gate_first", "no_gate"])
@pytest.mark.parametrize("rank", [1, 16, 128])
def test_random_factors_change_the_output_about_as_much_as_the_base(
    kind: FactorKind, layout: str, rank: int
) -> None:
    site = expert_site("experts", 5, 32, 24, LAYOUTS[layout])
    factors = random_factors(site, rank, kind)
    case = layer_case(32, [factors], [0], hidden=32, intermediate=24, layout=LAYOUTS[layout])
    base, with_lora = case.reference(base=True), case.reference()
    assert 0.3 <= float((with_lora - base).norm() / base.norm()) <= 3.0


def test_random_factors_have_the_shapes_of_their_kind() -> None:
    site = expert_site("experts", 5, 8, 6)
    fused = random_factors(site, 3, "fused", experts=[4, 1]).projections
    assert fused["gate"].lora_A is fused["up"].lora_A
    assert fused["down"].lora_B.shape == (2, 8, 3)
    separate = random_factors(site, {"gate": 1, "up": 2, "down": 3}).projections
    assert [f.rank for f in separate.values()] == [1, 2, 3]
    assert not torch.equal(separate["gate"].lora_A[:, :1], separate["up"].lora_A[:, :1])
    outer = random_factors(site, 3, "shared_outer").projections
    assert (outer["up"].lora_A.shape[0], outer["up"].lora_B.shape[0]) == (1, 5)
    assert (outer["down"].lora_A.shape[0], outer["down"].lora_B.shape[0]) == (5, 1)


def test_random_routing_leaves_an_expert_empty_and_drops_the_asked_share() -> None:
    routing = random_routing(50, 3, 6, minus_ones=0.2)
    ids = routing.topk_ids
    assert routing.empty_expert >= 0 and not bool((ids == routing.empty_expert).any())
    assert int((ids < 0).sum()) == 30
    assert bool((routing.topk_weights.isnan() == (ids < 0)).all())
    for row in ids.tolist():
        local = [e for e in row if e >= 0]
        assert len(set(local)) == len(local)
    assert random_routing(4, 5, 3).topk_ids.shape == (4, 5)


def test_generators_repeat_for_a_seed_and_differ_between_seeds() -> None:
    one, two, other = (random_weights(2, 4, 3, seed=s) for s in (1, 1, 2))
    assert_bit_equal(one.gate_up, two.gate_up)
    assert not torch.equal(one.gate_up, other.gate_up)
    in_major = random_weights(2, 4, 3, WeightLayout(out_major=False), seed=1)
    assert_bit_equal(in_major.gate_up_oi, one.gate_up)


def test_poisoned_empty_fills_new_memory_and_ends_with_its_block() -> None:
    like = torch.zeros(3, dtype=torch.bfloat16)
    with poisoned_empty(integers=True):
        found = [torch.empty(2), torch.empty_like(like), like.new_empty(2), torch.empty(0)]
        index = torch.empty(2, dtype=torch.int64)
        zeros = torch.zeros(2)
    assert all(bool(t.isnan().all()) for t in found)
    assert index.tolist() == [torch.iinfo(torch.int64).min] * 2
    assert zeros.tolist() == [0.0, 0.0]
    with poisoned_empty():
        pass
    assert not bool(torch.empty(1).fill_(1.0).isnan())
