"""Rows never reach one another, calls never reach one another, and nothing is read unwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cpu_layer import DTYPES, check, mixed_adapters
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.testing import (
    FACTOR_KINDS,
    LAYOUTS,
    FactorKind,
    LayerCase,
    assert_bit_equal,
    layer_case,
    poisoned_empty,
    random_factors,
)
from moegraft.types import LoraFactor, SiteFactors, TokenSlots, WeightLayout

SITE = expert_site("experts", 5, 24, 20)
SLOTS = [1, -1, 2, 0, 3, -1, 4]


def _mixed_case(num_tokens: int, dtype: torch.dtype = torch.float32) -> LayerCase:
    return layer_case(
        num_tokens, mixed_adapters(SITE, dtype), SLOTS, biases=True, minus_ones=0.1, dtype=dtype
    )


def _filled(factors: SiteFactors, value: float) -> SiteFactors:
    """The same adapter with every factor value replaced; a shared A stays one tensor."""
    made: dict[int, torch.Tensor] = {}

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return made.setdefault(id(tensor), torch.full_like(tensor, value))

    return SiteFactors(
        {
            name: LoraFactor(fill(f.lora_A), fill(f.lora_B), f.scale)
            for name, f in factors.projections.items()
        },
        factors.expert_map,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [7, 64])
def test_base_rows_keep_their_bits_beside_adapter_rows(
    num_tokens: int, dtype: torch.dtype, lora_method: str
) -> None:
    case = _mixed_case(num_tokens, dtype)
    check(case, lora_method)
    mixed, base = case.run(), case.run(base=True)
    no_delta = torch.tensor([slot in (-1, 0) for slot in case.token_slots])  # slot 0 is empty
    assert_bit_equal(mixed[no_delta], base[no_delta], "rows without an adapter")
    everywhere = torch.tensor([slot in (1, 3, 4) for slot in case.token_slots])
    everywhere &= (case.routing.topk_ids >= 0).any(dim=1)
    assert not bool((mixed[everywhere] == base[everywhere]).all(dim=1).any())


def test_a_batch_of_base_rows_equals_a_layer_without_adapters(lora_method: str) -> None:
    case = replace(_mixed_case(9), token_slots=(-1,) * 9)
    bare = MoeLoraLayer(case.weights)
    expected = bare(case.x, case.routing.topk_ids, case.routing.topk_weights)
    assert_bit_equal(case.run(), expected)
    assert_bit_equal(case.run(base=True), expected)
    slots = TokenSlots.of([2] * 9)  # a layer without a table has nothing to apply
    assert_bit_equal(
        bare(case.x, case.routing.topk_ids, case.routing.topk_weights, slots), expected
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rank_zero_equals_base(dtype: torch.dtype, lora_method: str) -> None:
    none = random_factors(SITE, 0, "fused", dtype=dtype)
    first = random_factors(SITE, 4, seed=1, dtype=dtype)
    case = layer_case(9, [first, none], [-1, 1, 0], dtype=dtype)
    mixed, base = case.run(), case.run(base=True)
    for start in (0, 1):
        assert_bit_equal(mixed[start::3], base[start::3], "base and rank-0 rows")
    check(case, lora_method)
    alone = replace(case, token_slots=(1,) * 9)
    assert_bit_equal(alone.run(), base)


def test_tokens_of_experts_outside_an_adapter_equal_base(lora_method: str) -> None:
    adapter = random_factors(SITE, 4, "fused", experts=[3, 1])
    case = layer_case(40, [adapter], [0])
    mixed, base = case.run(), case.run(base=True)
    ids = case.routing.topk_ids
    outside = ~((ids == 1) | (ids == 3)).any(dim=1)
    assert 0 < int(outside.sum()) < 40
    assert_bit_equal(mixed[outside], base[outside])
    assert not bool((mixed[~outside] == base[~outside]).all(dim=1).any())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", FACTOR_KINDS)
@pytest.mark.parametrize("num_tokens", [6, 64])
def test_a_damaged_adapter_stays_in_its_own_rows(
    num_tokens: int, kind: FactorKind, value: float, lora_method: str
) -> None:
    good = [random_factors(SITE, 4, kind, seed=i) for i in range(3)]
    case = layer_case(num_tokens, good, [0, 1, 2, -1], biases=True, minus_ones=0.1)
    damaged = replace(case, adapters=(good[0], _filled(good[1], value), good[2]))
    before, after = case.run(), damaged.run()
    own = torch.tensor([slot == 1 for slot in case.token_slots])
    own &= (case.routing.topk_ids >= 0).any(dim=1)
    assert_bit_equal(after[~own], before[~own], "rows of other adapters and of none")
    assert not bool(torch.isfinite(after[own]).all(dim=1).any()), "the damage must reach its rows"
    unused = tuple(0 if slot == 1 else slot for slot in case.token_slots)
    assert_bit_equal(
        replace(damaged, token_slots=unused).run(), replace(case, token_slots=unused).run()
    )


def test_a_damaged_projection_of_another_rank_stays_in_its_own_rows(lora_method: str) -> None:
    good = [random_factors(SITE, rank, "fused", seed=rank) for rank in (2, 16)]
    case = layer_case(10, good, [0, 1, -1])
    damaged = replace(case, adapters=(good[0], _filled(good[1], float("nan"))))
    others = torch.tensor([slot != 1 for slot in case.token_slots])
    assert_bit_equal(damaged.run()[others], case.run()[others])


def test_a_damaged_token_stays_in_its_own_row(lora_method: str) -> None:
    case = _mixed_case(14)
    before = case.run()
    case.x[4] = float("nan")  # an adapter's token
    case.x[5] = float("inf")  # a base token
    rows = torch.tensor([t not in (4, 5) for t in range(14)])
    assert_bit_equal(case.run()[rows], before[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_two_runs_give_the_same_bits(num_tokens: int, dtype: torch.dtype, lora_method: str) -> None:
    case = _mixed_case(num_tokens, dtype)
    layer = case.layer()
    first = case.run(layer)
    assert_bit_equal(case.run(layer), first, "same layer")
    assert_bit_equal(case.run(), first, "fresh layer")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["gate_first", "interleaved_in_major"])
def test_nothing_is_read_before_it_was_written(
    layout: str, dtype: torch.dtype, lora_method: str
) -> None:
    site = expert_site("experts", 5, 23, 19, LAYOUTS[layout])  # odd: rows of factors are padded
    case = layer_case(
        14,
        mixed_adapters(site, dtype),
        SLOTS,
        hidden=23,
        intermediate=19,
        layout=LAYOUTS[layout],
        minus_ones=0.3,
        dtype=dtype,
    )
    clean = case.run()
    with poisoned_empty(integers=True):
        poisoned = case.run()
    assert_bit_equal(poisoned, clean)


def test_an_empty_batch_after_an_adapter_batch(lora_method: str) -> None:
    case = _mixed_case(7)
    layer = case.layer()
    before = case.run(layer)
    empty = replace(_mixed_case(0), weights=case.weights)
    assert empty.run(layer).shape == (0, 24)
    live_but_empty = TokenSlots(torch.zeros(0, dtype=torch.int32), (1, 2))
    ids, weights = empty.routing.topk_ids, empty.routing.topk_weights
    assert layer(empty.x, ids, weights, live_but_empty).shape == (0, 24)
    assert_bit_equal(case.run(layer), before)


def test_base_batch_after_an_adapter_batch_equals_a_fresh_layer(lora_method: str) -> None:
    case = _mixed_case(7)
    layer = case.layer()
    case.run(layer)
    second = replace(layer_case(7, case.adapters, [-1], seed=9), weights=case.weights)
    fresh = second.run()
    assert_bit_equal(second.run(layer), fresh, "slots -1")
    case.run(layer)
    assert_bit_equal(second.run(layer, base=True), fresh, "no slots at all")


def test_changing_batches_of_one_size_equal_fresh_layers(lora_method: str) -> None:
    case = _mixed_case(8)
    layer = case.layer()
    for seed in range(6):
        slots = tuple((seed * 3 + t) % 6 - 1 for t in range(8))
        batch = layer_case(8, case.adapters, slots, seed=seed, minus_ones=0.1 * (seed % 2))
        batch = replace(batch, weights=case.weights)
        assert_bit_equal(batch.run(layer), batch.run(), f"batch {seed}")


def test_one_slots_object_serves_layers_with_different_factors(lora_method: str) -> None:
    """Slots are made once per step and shared by all layers, which may cache on them."""
    cases = [_mixed_case(7), layer_case(7, [*mixed_adapters(SITE, torch.float32)[::-1]], SLOTS)]
    shared = cases[0].slots()
    for case in (*cases, *cases):
        ids, weights = case.routing.topk_ids, case.routing.topk_weights
        assert_bit_equal(case.layer()(case.x, ids, weights, shared), case.run())


def test_a_call_changes_none_of_its_inputs(lora_method: str) -> None:
    case = _mixed_case(12)
    table = case.table()
    layer = MoeLoraLayer(case.weights, table)
    routing = case.routing
    watched = [case.x, routing.topk_ids, routing.topk_weights, case.weights.gate_up]
    watched += [case.weights.down, table.arena.data, table.records]
    copies = [tensor.clone() for tensor in watched]
    case.run(layer)
    for tensor, copy in zip(watched, copies, strict=True):
        assert_bit_equal(tensor, copy)


@pytest.mark.parametrize("out_major", [True, False])
def test_the_hosts_weight_storage_is_used_and_not_copied(out_major: bool) -> None:
    layout = WeightLayout(out_major=out_major)
    case = layer_case(6, [None], [-1], layout=layout)
    store = torch.zeros(5, *case.weights.gate_up.shape[1:], 2)  # every second element
    view = store[..., 0]
    view.copy_(case.weights.gate_up)
    weights = replace(case.weights, gate_up=view)
    assert weights.gate_up_oi.data_ptr() == store.data_ptr() == weights.gate_up.data_ptr()
    assert weights.down_oi.data_ptr() == case.weights.down.data_ptr()
    layer = MoeLoraLayer(weights)
    assert layer.weights.gate_up.data_ptr() == store.data_ptr()
    case.run(layer)
    view.mul_(-1.0)  # a host that updates its weights in place must be followed
    negated = replace(case, weights=replace(case.weights, gate_up=-case.weights.gate_up))
    check_output = negated.reference(base=True)
    found = case.run(layer)
    assert float((found.double() - check_output).norm() / check_output.norm()) < 1e-5
