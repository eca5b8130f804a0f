"""Kinds of fault that users of parallel MoE-LoRA systems have met, one test per kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import parallel_cases as cases
from moegraft.errors import MoegraftError
from moegraft.factor_table import site_table
from moegraft.parallel import (
    AllReduceMoe,
    AllToAllMoe,
    ExpertPlacement,
    ExpertShard,
    LinearShard,
    Part,
    PartialMoe,
    RankShards,
    shard_experts,
)
from moegraft.sites import expert_site, linear_site
from moegraft.testing import (
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    random_factors,
)
from moegraft.types import TokenSlots
from parallel_cases import Spec
from ranks import shared

ALL = ((0, 1, 2, 3),)


@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
@pytest.mark.parametrize("num_experts", [8, 10])
def test_global_adapters_land_in_local_slots_by_the_map(
    placement: cases.PlacementKind, num_experts: int
) -> None:
    spec = Spec(ALL, 4, placement, num_experts=num_experts)
    shared(4).run(cases.all_reduce_equals_one_process, spec)


def test_one_id_space_per_call_and_ids_of_no_expert_contribute_nothing() -> None:
    spec = Spec(((0,),), 1, num_experts=128, hidden=8, intermediate=4, num_tokens=9)
    case = cases.case_of(spec)
    shard = ExpertShard(ExpertPlacement.contiguous(128, 3, 4), Part.of(4, 0, 1))
    layer = PartialMoe(shard, shard_experts(case.weights, shard), cases.local_table(case, shard))
    ids = case.routing.topk_ids.clone()
    ids[:3] = torch.tensor([-1, 5, 31])  # as local numbers they are experts of this rank
    ids[3:6] = torch.tensor([96, 127, 128])
    weights = torch.rand(ids.shape)
    found = layer(case.x, ids, weights, case.slots())
    assert_bit_equal(found[:3], torch.zeros_like(found[:3]))
    routing = replace(case.routing, topk_ids=torch.where(ids < 96, -1, ids), topk_weights=weights)
    whole = replace(case, routing=routing)
    assert_close(found, whole.reference(), torch.float32)


def test_experts_on_two_of_four_ranks_are_sliced_two_ways_not_four() -> None:
    shared(4).run(cases.all_reduce_equals_one_process, Spec(ALL, 2, intermediate=20))
    widths = shared(4).run(width_of_my_slice, Spec(ALL, 2, intermediate=20))
    assert widths == [(0, 10), (10, 20), (0, 10), (10, 20)]
    # The rank among all ranks would leave nothing of a small rank's columns.
    with pytest.raises(MoegraftError, match="rank=3 is not among 2 ranks"):
        Part.of(20, 3, 2)


def width_of_my_slice(rank: int, spec: Spec) -> tuple[int, int]:
    part = cases.parallel_of(spec).shard.part
    return part.start, part.end


def test_delta_scale_and_bias_count_once_whatever_the_number_of_ranks() -> None:
    """Emulated: the partial results of two ranks, added up."""
    spec = Spec(((0,),), 1, biases=True, scale=2.5)
    case = cases.case_of(spec)
    total, base = torch.zeros_like(case.x), torch.zeros_like(case.x)
    for rank in range(2):
        shard = ExpertShard(ExpertPlacement.contiguous(8, 0, 1), Part.of(20, rank, 2))
        layer = PartialMoe(
            shard,
            shard_experts(case.weights, shard),
            cases.local_table(case, shard),
            routed_scaling_factor=2.5,
        )
        args = (case.x, case.routing.topk_ids, case.routing.topk_weights)
        total += layer(*args, case.slots())
        base += layer(*args)
    assert_close(total, case.reference(), torch.float32)
    assert_delta_close(total, base, case.reference(), case.reference(base=True))


def idle_after_adapters(rank: int) -> None:
    spec = Spec(ALL, 4, minus_ones=0.0)
    case, parallel = cases.case_of(spec), cases.parallel_of(spec)
    weights = shard_experts(case.weights, parallel.shard)
    table = cases.local_table(case, parallel.shard)
    layer = AllToAllMoe(parallel, weights, table)
    busy = rank == 2
    for step in range(4):
        # Each rank is idle in its turn, and the last step has no adapter at all.
        start, end = (5 * rank, 5 * rank + 5) if step % 4 != rank or busy else (0, 0)
        mine = cases.rows_of(case, start, end)
        slots = mine.slots() if step < 3 else None
        found = layer(mine.x, mine.routing.topk_ids, mine.routing.topk_weights, slots)
        assert_close(found, mine.reference(base=step == 3), torch.float32)
    empty = cases.rows_of(case, 0, 0)
    args = (empty.x, empty.routing.topk_ids, empty.routing.topk_weights, TokenSlots.of([]))
    assert AllReduceMoe(parallel, weights, table)(*args).shape == (0, spec.hidden)
    assert layer(*args).shape == (0, spec.hidden)


def test_an_idle_rank_takes_part_with_no_tokens_and_nothing_of_an_earlier_batch() -> None:
    shared(4).run(idle_after_adapters)


def more_rows_than_mine(rank: int) -> None:
    """Rank 0 has one token; the other ranks send it theirs, with and without slots."""
    spec = Spec(ALL, 4, num_experts=4, top_k=4, num_tokens=16, minus_ones=0.0)
    case, parallel = cases.case_of(spec), cases.parallel_of(spec)
    layer = AllToAllMoe(
        parallel,
        shard_experts(case.weights, parallel.shard),
        cases.local_table(case, parallel.shard),
    )
    edges = [0, 1, 6, 11, 16]
    mine = cases.rows_of(case, edges[rank], edges[rank + 1])
    args = (mine.x, mine.routing.topk_ids, mine.routing.topk_weights)
    base = layer(*args)
    found = layer(*args, None if rank % 2 else mine.slots())
    assert_close(found, mine.reference(base=bool(rank % 2)), torch.float32)
    if rank % 2:
        assert_bit_equal(found, base)


def test_rows_from_other_ranks_bring_their_slots_and_are_the_base_without() -> None:
    shared(4).run(more_rows_than_mine)


def test_each_module_is_sliced_by_its_own_ranks() -> None:
    """Experts are spread over four ranks, the dense layer beside them is on every rank."""
    experts, dense = expert_site("mlp.experts", 8, 24, 20), linear_site("dense.up_proj", 24, 40)
    factors = {experts.name: random_factors(experts, 4), dense.name: random_factors(dense, 4)}
    for rank in range(4):
        placement = ExpertPlacement.contiguous(8, rank, 4)
        shards = RankShards(
            (experts, dense),
            {
                experts.name: ExpertShard(placement, Part.of(20, 0, 1)),
                dense.name: LinearShard(),
            },
        )
        local = shards.slice(factors).factors
        assert local[dense.name] is factors[dense.name]
        assert local[experts.name].projections["gate"].lora_B.shape == (2, 20, 4)


def test_layers_of_other_stages_are_counted_and_left_out() -> None:
    sites = tuple(linear_site(f"layers.{i}.o_proj", 8, 8) for i in range(4))
    factors = {site.name: random_factors(site, 2) for site in sites}
    stage = RankShards(sites, {site.name: LinearShard() for site in sites[2:]})
    local = stage.slice(factors)
    assert local.elsewhere == ("layers.0.o_proj", "layers.1.o_proj")
    assert list(local.factors) == [site.name for site in stage.local_sites]
    table = site_table(stage.local_sites[0], [local.factors["layers.2.o_proj"]])
    assert table.factors(0) is not None
