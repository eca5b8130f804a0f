"""Updates by a plan: the very bits of a full reading, and a full reading where there is no plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moegraft.adapters import (
    AdapterBank,
    AdapterSource,
    AdapterStore,
    AdapterUpdater,
    BoundAdapter,
    ReadOptions,
    make_source,
)
from moegraft.adapters.planned import PlannedUpdate, UnusualValuesError
from moegraft.adapters.update_plan import TensorKinds, make_plan
from moegraft.errors import AdapterError
from moegraft.factors import TableLayout
from moegraft.packing import pack_adapter
from moegraft.parallel import ExpertPlacement, ExpertShard, Part, RankShards
from store_tools import assert_sound, failing_copy
from update_kinds import (
    CONFIG,
    EXPERTS,
    HIDDEN,
    KINDS,
    RANK,
    SITES,
    WIDTH,
    Tensors,
    bound,
    fused,
    linear,
    new_bank,
    per_expert,
    per_projection,
    plan_of,
    shuffled,
)


class Watched:
    """An updater that counts how often an adapter is read in full."""

    def __init__(self, slots: int = 2) -> None:
        self.store = AdapterStore(new_bank(slots=slots))
        self.readings = 0
        self.updater = AdapterUpdater(self.store, self.bind)

    def bind(self, source: AdapterSource, options: ReadOptions | None) -> BoundAdapter:
        self.readings += 1
        return bound(source, options)

    def add(self, name: str, tensors: Tensors) -> None:
        self.store.add(name, bound(make_source(tensors, CONFIG), None))

    def assert_slot_holds(self, slot: int, tensors: Tensors) -> None:
        wanted = bound(make_source(tensors, CONFIG), None)
        other = AdapterStore(new_bank())
        other.add("a", wanted)
        with other.use(["a"]) as slots:
            for site in SITES:
                found = self.store.bank.site_table(site.name).factors(slot)
                right = other.bank.site_table(site.name).factors(slots["a"])
                assert (found is None) == (right is None), site.name
                if found is not None and right is not None:
                    for name, factor in right.projections.items():
                        own = found.projections[name]
                        assert torch.equal(own.lora_A, factor.lora_A)
                        assert torch.equal(own.lora_B, factor.lora_B)
                        assert own.scale == factor.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_packs_the_very_bits_that_a_reading_does(kind: str, dtype: torch.dtype) -> None:
    bank = new_bank(dtype)
    plan = plan_of(KINDS[kind](0), bank)
    for seed in (1, 2):
        tensors = shuffled(KINDS[kind](seed))
        wanted = pack_adapter(bound(make_source(tensors, CONFIG), None).factors, bank.layout, dtype)
        data = torch.full((plan.pack.elements,), torch.nan, dtype=dtype)
        plan.fill([tensors[name] for name in plan.kinds.names], data)
        found = plan.pack.packed(data)
        assert torch.equal(found.row, wanted.row) and found.spans == wanted.spans
        assert torch.equal(data, wanted.data) and found.max_rank == wanted.max_rank


def test_what_is_computed_from_values_has_no_plan() -> None:
    bank = new_bank()
    tensors = per_expert(0)
    kinds = TensorKinds.of(tensors)
    assert kinds is not None
    scaled = {**CONFIG, "alpha_pattern": {r"experts\.3\.gate_proj": 99}}
    assert make_plan(kinds, scaled, None, bound, bank.layout, bank.dtype) is None
    wide = per_expert(0)  # a larger rank of one expert: the others are padded
    path = "layers.0.mlp.experts.2.up_proj.lora_"
    wide[path + "A.weight"] = torch.randn(RANK + 1, HIDDEN)
    wide[path + "B.weight"] = torch.randn(WIDTH, RANK + 1)
    kinds = TensorKinds.of(wide)
    assert kinds is not None
    assert make_plan(kinds, CONFIG, None, bound, bank.layout, bank.dtype) is None


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("part", [Part.of(WIDTH, 0, 1), Part.of(WIDTH, 1, 2)])
@pytest.mark.parametrize("kind", ["per_expert", "per_projection", "fused"])
def test_a_rank_plans_its_own_part(kind: str, part: Part, rank: int) -> None:
    shard = ExpertShard(ExpertPlacement.contiguous(EXPERTS, rank, 2), part)
    shards = RankShards(SITES, {site.name: shard for site in SITES if site.kind == "experts"})
    layout = TableLayout.of(shards.local_sites)

    def local(source: AdapterSource, options: ReadOptions | None) -> BoundAdapter:
        found = bound(source, options)
        return replace(found, factors=shards.slice(found.factors).factors)

    kinds = TensorKinds.of(KINDS[kind](0))
    assert kinds is not None
    plan = make_plan(kinds, CONFIG, None, local, layout, torch.float32)
    assert plan is not None and plan.copies is not None
    tensors = KINDS[kind](1)
    wanted = pack_adapter(local(make_source(tensors, CONFIG), None).factors, layout, torch.float32)
    data = torch.full((plan.pack.elements,), torch.nan)
    plan.fill(list(tensors.values()), data)
    assert torch.equal(data, wanted.data) and torch.equal(plan.pack.row, wanted.row)
    assert plan.is_partial and not plan_of(tensors, new_bank()).is_partial


def test_a_value_that_goes_to_another_rank_is_refused_here_too() -> None:
    """Else one rank would serve the new version and the other the old one."""
    shard = ExpertShard(ExpertPlacement.contiguous(EXPERTS, 0, 2), Part(0, WIDTH, WIDTH))
    shards = RankShards(SITES, {site.name: shard for site in SITES if site.kind == "experts"})
    bank = AdapterBank(shards.local_sites, num_slots=1, max_rank=16, dtype=torch.float32)

    def local(source: AdapterSource, options: ReadOptions | None) -> BoundAdapter:
        found = bound(source, options)
        return replace(found, factors=shards.slice(found.factors).factors)

    kinds = TensorKinds.of(per_expert(0))
    assert kinds is not None
    plan = make_plan(kinds, CONFIG, None, local, bank.layout, bank.dtype)
    assert plan is not None
    tensors = per_expert(1)
    PlannedUpdate(plan, tuple(tensors.values())).entry(bank, "a", None)
    last = f"layers.0.mlp.experts.{EXPERTS - 1}.up_proj.lora_B.weight"
    tensors[last][0, 0] = torch.nan
    with pytest.raises(UnusualValuesError):
        PlannedUpdate(plan, tuple(tensors.values())).entry(bank, "a", None)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        [1],
        {"x": 1},
        {"x": torch.zeros(2, dtype=torch.int8)},
        {"x": torch.zeros(3, 4).T},
        {"x": torch.zeros(2), "y": torch.zeros(2, device="meta")},
        {"x": torch.zeros(2).to_sparse()},
    ],
)
def test_tensors_of_an_unusual_kind_have_no_plan(odd: Any) -> None:
    assert TensorKinds.of(odd) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_update_of_a_kind_makes_a_plan_and_later_ones_read_nothing(kind: str) -> None:
    watched = Watched()
    make = KINDS[kind]
    watched.add("a", make(0))
    with watched.store.use(["a"]) as slots:
        slot = slots["a"]
    read, versions = [], []
    for seed in range(1, 6):
        tensors = shuffled(make(seed))
        info = watched.updater.update("a", tensors, CONFIG)
        read.append(watched.readings)
        versions.append(info.version)
        assert info.slot == slot and info == watched.store.info("a")
        watched.assert_slot_holds(slot, tensors)
        fresh = AdapterStore(new_bank()).add("a", bound(make_source(tensors, CONFIG), None))
        assert info.checksum == fresh.checksum and info.num_bytes == fresh.num_bytes
        assert info.report.sites == fresh.report.sites
        assert info.report.origin == "update of 'a'"
        assert_sound(watched.store)
    assert read == [1, 2, 2, 2, 2], "the second reading makes the plan"
    assert versions == sorted(set(versions))


def test_two_adapters_share_a_plan_and_another_config_or_option_does_not() -> None:
    watched = Watched(slots=3)
    for name in "ab":
        watched.add(name, per_expert(0))
    watched.updater.update("a", per_expert(1), CONFIG)
    watched.updater.update("b", per_expert(2), CONFIG)
    watched.updater.update("a", per_expert(3))
    assert watched.readings == 2
    other = {**CONFIG, "lora_alpha": 5 * RANK}
    info = watched.updater.update("a", per_expert(4), other)
    assert watched.readings == 3
    scales = {p.scale for site in info.report.sites for p in site.projections.values()}
    assert scales == {5.0}
    only = ReadOptions(only=("experts",))
    with pytest.raises(AdapterError, match="leaves out factors"):
        watched.updater.update("a", per_expert(4), options=only)
    assert watched.store.info("a") == info


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_refused_by_name_and_the_old_version_stays(
    value: float,
) -> None:
    watched = Watched()
    watched.add("a", per_expert(0))
    with watched.store.use(["a"]):
        pass
    for seed in (1, 2, 3):
        info = watched.updater.update("a", per_expert(seed), CONFIG)
    broken = per_expert(4)
    name = "layers.1.mlp.experts.7.up_proj.lora_B.weight"
    broken[name][3, 1] = value
    before = watched.readings
    with pytest.raises(AdapterError, match=rf"{name} holds 1 NaN or infinite"):
        watched.updater.update("a", broken, CONFIG)
    assert watched.store.info("a") == info and info.slot is not None
    watched.assert_slot_holds(info.slot, per_expert(3))
    watched.updater.update("a", per_expert(5), CONFIG)
    assert watched.readings == before, "the plan was lost"


def test_values_beyond_the_banks_dtype_are_refused() -> None:
    store = AdapterStore(new_bank(torch.float16))
    updater = AdapterUpdater(store, bound)
    store.add("a", bound(make_source(linear(0), CONFIG), None))
    for seed in (1, 2):
        info = updater.update("a", linear(seed), CONFIG)
    large = {name: tensor * 1e6 for name, tensor in linear(3).items()}
    with pytest.raises(AdapterError, match="beyond float16's range"):
        updater.update("a", large, CONFIG)
    assert store.info("a") == info


def test_factors_that_were_stored_once_for_all_experts_are_looked_for_again() -> None:
    def alike(seed: int) -> Tensors:
        tensors = per_projection(seed)
        for name, tensor in tensors.items():
            if "gate_proj.lora_A" in name:
                tensors[name] = tensor[:1].expand_as(tensor).contiguous()
        return tensors

    watched = Watched()
    watched.add("a", alike(0))
    with watched.store.use(["a"]):
        pass
    for seed in range(1, 5):
        info = watched.updater.update("a", alike(seed), CONFIG)
        assert info.num_bytes == watched.store.bank.memory.used
        [gate] = [s.projections["gate"] for s in info.report.sites if "experts" in s.site]
        assert gate.shared_a
        assert info.slot is not None
        watched.assert_slot_holds(info.slot, alike(seed))


def test_a_running_batch_keeps_its_version_under_an_update_by_a_plan() -> None:
    watched = Watched(slots=2)
    watched.add("a", per_expert(0))
    for seed in (1, 2, 3):
        watched.updater.update("a", per_expert(seed), CONFIG)
    with watched.store.use(["a"]) as first:
        assert watched.updater.update("a", per_expert(4), CONFIG).slot is None
        with watched.store.use(["a"]) as second:
            assert first["a"] != second["a"]
            watched.assert_slot_holds(first["a"], per_expert(3))
            watched.assert_slot_holds(second["a"], per_expert(4))
    assert_sound(watched.store, slots_in_use=1)


@pytest.mark.parametrize("after", [False, True])
def test_an_update_by_a_plan_that_fails_at_any_copy_keeps_the_old_version(after: bool) -> None:
    watched = Watched()
    watched.add("a", fused(0))
    for seed in (1, 2):
        watched.updater.update("a", fused(seed), CONFIG)
    failed = 0
    for step in range(100):
        with watched.store.use(["a"]):
            pass
        before = watched.store.info("a")
        try:
            with failing_copy(step, after):
                watched.updater.update("a", fused(3), CONFIG)
            break
        except RuntimeError:
            failed += 1
        assert watched.store.info("a") == before and before.slot is not None
        assert_sound(watched.store)
        watched.assert_slot_holds(before.slot, fused(2))
    assert failed > 2
    slot = watched.store.info("a").slot
    assert slot is not None
    watched.assert_slot_holds(slot, fused(3))


def test_only_the_latest_kinds_are_remembered() -> None:
    watched = Watched()
    watched.add("a", linear(0))
    for extra in range(12):
        path = "layers.1.mlp.experts."
        more = {
            f"{path}{expert}.up_proj.lora_{leaf}.weight": torch.randn(
                *((RANK, HIDDEN) if leaf == "A" else (WIDTH, RANK))
            )
            for expert in range(extra)
            for leaf in "AB"
        }
        watched.updater.update("a", linear(1) | more, CONFIG)
    assert len(watched.updater._known) == 8
