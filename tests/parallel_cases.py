"""Layers over several ranks, and what they must equal: the same layer in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from moegraft.factor_table import SiteTable, site_table
from moegraft.parallel import (
    AllReduceMoe,
    AllToAllMoe,
    ExpertParallel,
    ExpertPlacement,
    ExpertShard,
    MoeGroups,
    shard_experts,
)
from moegraft.sites import Site, expert_site
from moegraft.testing import (
    LAYOUTS,
    LayerCase,
    Routing,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    layer_case,
    poisoned_empty,
    random_factors,
)
from moegraft.types import SiteFactors, WeightLayout

PlacementKind = Literal["contiguous", "round_robin", "counts", "shuffled"]


@dataclass(frozen=True)
class Spec:
    """One layer over ranks, small enough to send.

    ``blocks`` and ``ep_size`` as of :meth:`MoeGroups.of`; every block runs the same layer.
    """

    blocks: tuple[tuple[int, ...], ...]
    ep_size: int
    placement: PlacementKind = "contiguous"
    num_experts: int = 8
    hidden: int = 24
    intermediate: int = 20
    top_k: int = 3
    num_tokens: int = 23
    layout: WeightLayout = WeightLayout()  # noqa: RUF009 (frozen)
    biases: bool = False
    scale: float = 1.0
    minus_ones: float = 0.1
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def site(self) -> Site:
        """The experts site of the whole layer."""
        return expert_site("experts", self.num_experts, self.hidden, self.intermediate, self.layout)


def adapters_of(site: Site, dtype: torch.dtype, seed: int) -> list[SiteFactors | None]:
    """An empty slot, every kind, some experts only, some projections only."""
    experts = list(range(site.num_experts))
    random.Random(seed).shuffle(experts)
    common: dict[str, Any] = {"dtype": dtype}
    return [
        random_factors(site, 4, "separate", seed=seed + 1, scale=0.5, **common),
        None,
        random_factors(site, 3, "fused", seed=seed + 2, **common),
        random_factors(site, 6, "shared_outer", seed=seed + 3, **common),
        random_factors(site, 5, "separate", experts=experts[:3], seed=seed + 4, **common),
        random_factors(site, 2, "separate", projections=["down"], seed=seed + 5, **common),
        random_factors(site, 7, "fused", experts=experts[1:2], seed=seed + 6, **common),
        random_factors(site, 2, "separate", projections=["up"], seed=seed + 7, **common),
    ]


@cache
def case_of(spec: Spec) -> LayerCase:
    """The whole layer, mixed adapters and base rows in its batch."""
    adapters = adapters_of(spec.site, spec.dtype, spec.seed)
    return layer_case(
        spec.num_tokens,
        adapters,
        [0, -1, 2, 3, -1, 4, 5, 6, 7, 1],
        num_experts=spec.num_experts,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        top_k=spec.top_k,
        layout=spec.layout,
        biases=spec.biases,
        minus_ones=spec.minus_ones,
        scale=spec.scale,
        dtype=spec.dtype,
        seed=spec.seed,
    )


def placement_of(spec: Spec, rank: int, size: int) -> ExpertPlacement:
    """Rank's experts by the spec's kind of map."""
    if spec.placement == "contiguous":
        return ExpertPlacement.contiguous(spec.num_experts, rank, size)
    if spec.placement == "round_robin":
        return ExpertPlacement.round_robin(spec.num_experts, rank, size)
    counts = [1] * (size - 1) + [spec.num_experts - size + 1]
    if spec.placement == "counts":
        return ExpertPlacement.contiguous(spec.num_experts, rank, size, counts)
    # Any owner, any order of local numbers.
    order = list(range(spec.num_experts))
    random.Random(spec.seed).shuffle(order)
    mine = order[sum(counts[:rank]) : sum(counts[: rank + 1])]
    everyone = range(spec.num_experts)
    return ExpertPlacement.of([mine.index(e) if e in mine else -1 for e in everyone])


def local_table(case: LayerCase, shard: ExpertShard) -> SiteTable:
    """The rank's factor table: every slot's factors, sliced."""
    local = [None if a is None else shard.factors(a) for a in case.adapters]
    return site_table(shard.site(case.site), local, case.x.dtype)


@cache
def groups_of(ep_size: int, blocks: tuple[tuple[int, ...], ...]) -> MoeGroups:
    """The groups, made once per process; every rank asks in the same order."""
    return MoeGroups.of(ep_size, blocks)


def parallel_of(spec: Spec) -> ExpertParallel:
    """This rank's share, agreed upon."""
    groups = groups_of(spec.ep_size, spec.blocks)
    placement = placement_of(spec, groups.ep_rank, groups.ep_size)
    return ExpertParallel.of(spec.num_experts, spec.intermediate, groups, placement)


def all_reduce_equals_one_process(rank: int, spec: Spec) -> None:
    """Run on every rank: output, base and delta alone are those of the whole layer."""
    case, parallel = case_of(spec), parallel_of(spec)
    layer = AllReduceMoe(
        parallel,
        shard_experts(case.weights, parallel.shard),
        local_table(case, parallel.shard),
        routed_scaling_factor=spec.scale,
    )
    with poisoned_empty():
        found = layer(case.x, case.routing.topk_ids, case.routing.topk_weights, case.slots())
        base = layer(case.x, case.routing.topk_ids, case.routing.topk_weights)
    check(case, found, base)


def all_to_all_equals_one_process(rank: int, spec: Spec, tokens: Sequence[int]) -> None:
    """Run on every rank: each has its own rows of the batch, ``tokens[ep_rank]`` of them."""
    case, parallel = case_of(spec), parallel_of(spec)
    layer = AllToAllMoe(
        parallel,
        shard_experts(case.weights, parallel.shard),
        local_table(case, parallel.shard),
        routed_scaling_factor=spec.scale,
    )
    first = sum(tokens[: parallel.groups.ep_rank])
    mine = rows_of(case, first, first + tokens[parallel.groups.ep_rank])
    ids, weights = mine.routing.topk_ids, mine.routing.topk_weights
    with poisoned_empty():
        found = layer(mine.x, ids, weights, mine.slots())
        base = layer(mine.x, ids, weights)
    check(mine, found, base)


def rows_of(case: LayerCase, start: int, end: int) -> LayerCase:
    """The case with some of its tokens."""
    routing = Routing(case.routing.topk_ids[start:end], case.routing.topk_weights[start:end], -1)
    return replace(
        case, x=case.x[start:end], routing=routing, token_slots=case.token_slots[start:end]
    )


def check(case: LayerCase, found: torch.Tensor, base: torch.Tensor) -> None:
    """Compare with the reference of the whole layer; base rows have the base's bits.

    The delta alone is compared where it is large enough beside the base's rounding: some ranks'
    few rows may have small ones only.
    """
    ref_with, ref_base = case.reference(), case.reference(base=True)
    assert_close(base, ref_base, case.x.dtype)
    assert_close(found, ref_with, case.x.dtype)
    if case.x.dtype == torch.float32 or (ref_with - ref_base).norm() > 0.3 * ref_base.norm():
        assert_delta_close(found, base, ref_with, ref_base)
    rows = torch.tensor([slot < 0 for slot in case.token_slots], dtype=torch.bool)
    assert_bit_equal(found[rows], base[rows], "base rows")


def random_spec(seed: int, size: int) -> Spec:
    """A layer of any kind over ``size`` ranks."""
    pick = random.Random(seed)
    ep_size = pick.choice([n for n in (1, 2, 4) if size % n == 0])
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16])
    return Spec(
        blocks=(tuple(range(size)),),
        ep_size=ep_size,
        placement=pick.choice(["contiguous", "round_robin", "counts", "shuffled"]),
        num_experts=pick.randint(max(ep_size, 3), 11),
        hidden=pick.choice([8, 17, 24, 40]),
        intermediate=pick.choice([12, 20, 31]),
        top_k=pick.randint(1, 4),
        num_tokens=pick.choice([1, 2, 9, 30]),
        layout=pick.choice(list(LAYOUTS.values())),
        biases=pick.random() < 0.5,
        scale=pick.choice([1.0, 2.5]),
        minus_ones=pick.choice([0.0, 0.2]),
        dtype=dtype,
        seed=seed,
    )
