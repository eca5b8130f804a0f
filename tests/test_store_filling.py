"""While an update fills a region, as one from a GPU does, the store is everybody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from moegraft.adapters import AdapterBank, AdapterStore, AdapterUpdater, make_source
from moegraft.adapters import planned as planned_module
from moegraft.adapters.checksum import Digest, checksum_of
from moegraft.adapters.entry import Entry
from moegraft.adapters.info import AdapterInfo, ReadAs
from moegraft.adapters.planned import PlannedUpdate, UnusualValuesError
from moegraft.errors import AdapterError
from store_tools import assert_sound, run_threads
from update_kinds import (
    CONFIG,
    RANK,
    SITES,
    Tensors,
    bound,
    linear,
    new_bank,
    per_expert,
    plan_of,
)

WAIT = 20.0


@dataclass(frozen=True)
class SlowUpdate(PlannedUpdate):
    """Fills its region as one from a GPU does, from the CPU, when it is told to go on."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    error: type[Exception] | None = None

    @staticmethod
    def of(store: AdapterStore, tensors: Tensors, **more: Any) -> SlowUpdate:
        return SlowUpdate(plan_of(tensors, store.bank), tuple(tensors.values()), **more)

    def entry(self, bank: AdapterBank, name: str, read_as: ReadAs | None) -> Entry:
        data = torch.empty(self.plan.pack.elements, dtype=self.plan.dtype)
        packed = self.plan.pack.packed(data)

        def fill(region: torch.Tensor) -> None:
            self.begun.set()
            assert self.go.wait(WAIT), "nobody let the update go on"
            self.plan.fill(self.tensors, region)
            if self.error is not None:
                raise self.error
            data.copy_(region)

        digest = Digest(lambda: checksum_of(packed, bank.layout))
        return Entry(name, 0, digest, packed, self.plan.report, read_as, fill=fill)

    def stage(self, entry: Entry, bank: AdapterBank) -> None:
        self.plan.fill(self.tensors, entry.packed.data)
        entry.fill = None


class StagedUpdate(SlowUpdate):
    """Is staged as one from a GPU is."""

    stage = PlannedUpdate.stage


class Running:
    """Something that runs in a thread of its own."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.found: list[object] = []
        self.errors: list[BaseException] = []

        def run() -> None:
            try:
                self.found.append(work())
            except BaseException as error:
                self.errors.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self, within: float = WAIT) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()


def add(store: AdapterStore, name: str, tensors: Tensors) -> AdapterInfo:
    return store.add(name, bound(make_source(tensors, CONFIG), None), ReadAs.of(CONFIG, None))


def bring(store: AdapterStore, *names: str) -> None:
    with store.use(names):
        pass


def assert_serves(store: AdapterStore, name: str, tensors: Tensors) -> None:
    with store.use([name]) as slots:
        assert_slot_holds(store, slots[name], tensors)


def assert_slot_holds(store: AdapterStore, slot: int, tensors: Tensors) -> None:
    wanted = bound(make_source(tensors, CONFIG), None).factors
    for site in SITES:
        found = store.bank.site_table(site.name).factors(slot)
        assert (found is None) == (site.name not in wanted), site.name
        if found is None:
            continue
        for projection, right in wanted[site.name].projections.items():
            own = found.projections[projection]
            pairs = ((own.lora_A, right.lora_A), (own.lora_B, right.lora_B))
            for ours, theirs in pairs:
                assert torch.equal(*torch.broadcast_tensors(ours, theirs)), (site.name, slot)
            assert own.scale == right.scale


def filling(store: AdapterStore, name: str, update: SlowUpdate) -> Running:
    """Begin an update and return when it fills its region."""
    running = Running(lambda: store.update_planned(name, update))
    assert update.begun.wait(WAIT)
    return running


def test_others_are_loaded_used_updated_and_removed_while_an_update_fills_its_region() -> None:
    store = AdapterStore(new_bank(slots=4))
    for i, name in enumerate(("policy", "served", "old")):
        add(store, name, per_expert(i))
    bring(store, "policy", "served", "old")
    before = store.info("policy")
    update = SlowUpdate.of(store, per_expert(10))
    running = filling(store, "policy", update)

    def others() -> None:
        assert_serves(store, "served", per_expert(1))
        add(store, "new", linear(3))
        assert_serves(store, "new", linear(3))
        info = store.update("served", bound(make_source(per_expert(4), CONFIG), None))
        assert info.version > before.version
        assert_serves(store, "served", per_expert(4))
        second = SlowUpdate.of(store, per_expert(5))
        second.go.set()
        assert store.update_planned("served", second) is not None
        assert_serves(store, "served", per_expert(5))
        store.remove("old")
        assert store.info("policy") == before and len(store) == 3
        with pytest.raises(AdapterError, match="no adapter 'missing'"), store.use(["missing"]):
            pass

    other = Running(others)
    assert other.done(), "others waited for the update"
    assert not other.errors, other.errors
    assert not running.done(0.0)
    update.go.set()
    assert running.done() and not running.errors, running.errors
    (info,) = running.found
    assert isinstance(info, AdapterInfo) and info == store.info("policy")
    assert info.slot == before.slot and info.version > store.info("served").version
    assert_serves(store, "policy", per_expert(10))
    assert_sound(store)
    wanted = AdapterStore(new_bank())
    assert info.checksum == add(wanted, "policy", per_expert(10)).checksum


@pytest.mark.parametrize("error", [UnusualValuesError, RuntimeError])
def test_an_update_that_fails_while_it_fills_has_changed_nothing(error: type[Exception]) -> None:
    store = AdapterStore(new_bank(slots=2))
    add(store, "a", per_expert(0))
    bring(store, "a")
    before, used = store.info("a"), store.bank.memory.used
    update = SlowUpdate.of(store, per_expert(1), error=error)
    running = filling(store, "a", update)
    assert store.bank.memory.used == 2 * used, "the region is the update's"
    update.go.set()
    assert running.done() and [type(e) for e in running.errors] == [error]
    assert store.info("a") == before and store.bank.memory.used == used
    assert_sound(store)
    assert_serves(store, "a", per_expert(0))


def test_a_batch_that_begins_meanwhile_keeps_the_old_version() -> None:
    store = AdapterStore(new_bank(slots=2))
    add(store, "a", per_expert(0))
    bring(store, "a")
    update = SlowUpdate.of(store, per_expert(1))
    running = filling(store, "a", update)
    with store.use(["a"]) as first:
        update.go.set()
        assert running.done() and not running.errors
        assert store.info("a").slot is None
        assert_slot_holds(store, first["a"], per_expert(0))
        with store.use(["a"]) as second:
            assert second["a"] != first["a"]
            assert_slot_holds(store, second["a"], per_expert(1))
    assert_sound(store, slots_in_use=1)
    assert store.info("a").slot == second["a"]


def test_an_adapter_that_loses_its_slot_meanwhile_gets_its_new_version_at_its_next_use() -> None:
    store = AdapterStore(new_bank(slots=1))
    add(store, "a", per_expert(0))
    add(store, "b", per_expert(1))
    bring(store, "a")
    update = SlowUpdate.of(store, per_expert(2))
    running = filling(store, "a", update)
    assert_serves(store, "b", per_expert(1))
    update.go.set()
    assert running.done() and not running.errors
    assert store.info("a").slot is None
    assert_sound(store, slots_in_use=1)
    assert_serves(store, "a", per_expert(2))


def test_a_batch_for_which_updates_hold_the_room_waits_for_them() -> None:
    size = add(AdapterStore(new_bank()), "a", per_expert(0)).num_bytes
    store = AdapterStore(new_bank(slots=2, arena_bytes=2 * size))
    add(store, "a", per_expert(0))
    add(store, "b", per_expert(1))
    bring(store, "a")
    store.pin("a")
    update = SlowUpdate.of(store, per_expert(2))
    running = filling(store, "a", update)
    batch = Running(lambda: assert_serves(store, "b", per_expert(1)))
    later = Running(lambda: store.info("a"))
    assert later.done() and not batch.done(0.2), "there was room for b"
    update.go.set()
    for thread in (running, batch):
        assert thread.done() and not thread.errors, thread.errors
    assert_serves(store, "a", per_expert(2))
    assert_sound(store, slots_in_use=2)


def wide(seed: int) -> Tensors:
    """A linear of twice the rank, which takes twice the room."""
    return {
        name: torch.cat([tensor, tensor], 0 if "lora_A" in name else 1)
        for name, tensor in linear(seed).items()
    }


def test_nothing_is_moved_over_a_region_that_is_being_filled() -> None:
    double = {**CONFIG, "r": 2 * RANK}
    size = add(AdapterStore(new_bank()), "a", per_expert(0)).num_bytes
    part = add(AdapterStore(new_bank()), "a", linear(0)).num_bytes
    store = AdapterStore(new_bank(slots=4, arena_bytes=2 * size + 3 * part))
    wanted = bound(make_source(wide(1), double), None)
    assert store.add("wide", wanted).num_bytes == 2 * part
    for name, tensors in {"low": linear(1), "a": per_expert(0), "last": linear(2)}.items():
        add(store, name, tensors)
    bring(store, "low")
    bring(store, "a")
    update = SlowUpdate.of(store, per_expert(2))
    running = filling(store, "a", update)
    bring(store, "last")
    for name in ("a", "last"):
        store.pin(name)
    store.remove("low")  # free, a, being filled, last, free: both too small, and far apart
    batch = Running(lambda: bring(store, "wide"))
    assert not batch.done(0.2), "there was room"
    update.go.set()
    for thread in (running, batch):
        assert thread.done() and not thread.errors, thread.errors
    assert_sound(store, slots_in_use=3)
    assert_serves(store, "a", per_expert(2))
    assert_serves(store, "last", linear(2))


def test_an_arena_that_grows_meanwhile_takes_the_filled_region_along() -> None:
    store = AdapterStore(new_bank(slots=6))
    add(store, "a", per_expert(0))
    bring(store, "a")
    update = SlowUpdate.of(store, per_expert(1))
    running = filling(store, "a", update)
    before = store.bank.memory.arena
    for i in range(4):
        add(store, f"more{i}", per_expert(3 + i))
        bring(store, f"more{i}")
    assert store.bank.memory.arena > before
    update.go.set()
    assert running.done() and not running.errors
    assert_serves(store, "a", per_expert(1))
    for i in range(4):
        assert_serves(store, f"more{i}", per_expert(3 + i))
    assert_sound(store)


def test_threads_that_fill_use_and_evict_see_whole_versions_in_order() -> None:
    store = AdapterStore(new_bank(slots=3))
    names = ("a", "b", "c", "d")
    made = [linear(seed) for seed in range(40)]
    plan = plan_of(made[0], store.bank)
    for name in names:
        add(store, name, made[0])
    whole = {float(t["layers.0.self_attn.q_proj.lora_A.weight"][0, 0]): t for t in made}

    def work(i: int) -> None:
        seen: dict[str, int] = {}
        for step in range(12):
            name = names[(i + step) % len(names)]
            if i % 2:
                update = SlowUpdate(plan, tuple(made[(7 * i + step) % 40].values()))
                update.go.set()
                info = store.update_planned(name, update)
                assert info is not None and info.version > seen.get(name, 0)
                seen[name] = info.version
                continue
            try:
                with store.use([name]) as slots:
                    site = store.bank.site_table("layers.0.self_attn.q_proj")
                    found = site.factors(slots[name])
                    assert found is not None
                    first = float(found.projections["linear"].lora_A[0, 0, 0])
                    assert_slot_holds(store, slots[name], whole[first])
            except AdapterError as error:
                assert "need a slot" in str(error)

    run_threads(work)
    assert_sound(store)
    for info in store.infos():
        store.remove(info.name)
    assert store.bank.memory.used == 0


def test_an_update_without_a_config_reads_that_of_the_version_it_replaces() -> None:
    """A load of the same name that began before it may bring another config."""
    store = AdapterStore(new_bank())
    add(store, "a", linear(0))
    reading, go = threading.Event(), threading.Event()

    class Slow(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> Any:
            reading.set()
            assert go.wait(WAIT)
            return super().__getitem__(name)

    other = {**CONFIG, "lora_alpha": 7 * CONFIG["r"]}  # type: ignore[operator]
    adapter = bound(make_source(linear(1), other), None)
    slow = replace(adapter, factors=Slow(adapter.factors))
    load = Running(lambda: store.add("a", slow, ReadAs.of(other, None)))
    assert reading.wait(WAIT)
    update = Running(lambda: AdapterUpdater(store, bound).update("a", linear(2)))
    assert not update.done(0.2), "the update overtook the load"
    go.set()
    assert load.done() and update.done() and not load.errors and not update.errors
    [site] = store.info("a").report.sites
    assert [p.scale for p in site.projections.values()] == [7.0]
    read_as = store.read_as("a")
    assert read_as is not None and read_as.config == other


def test_adapters_of_one_shape_and_two_configs_keep_a_plan_each() -> None:
    store = AdapterStore(new_bank(slots=2))
    readings = 0

    def reading(source: Any, options: Any) -> Any:
        nonlocal readings
        readings += 1
        return bound(source, options)

    updater = AdapterUpdater(store, reading)
    configs = {"a": CONFIG, "b": {**CONFIG, "lora_alpha": 9}}
    for name, config in configs.items():
        store.add(name, bound(make_source(linear(0), config), None), ReadAs.of(config, None))
    seen = []
    for seed in range(1, 6):
        for name, config in configs.items():
            info = updater.update(name, linear(seed))
            seen.append(readings)
            [site] = info.report.sites
            wanted = config["lora_alpha"] / config["r"]  # type: ignore[operator]
            assert [p.scale for p in site.projections.values()] == [wanted]
    assert seen == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4], "a config took the other's plan away"
    for alpha in range(20, 40):
        updater.update("a", linear(1), {**CONFIG, "lora_alpha": alpha})
    assert sum(map(len, updater._known.values())) == 8


def test_a_device_without_memory_to_pack_in_says_how_much_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = AdapterStore(new_bank(slots=2))
    add(store, "a", per_expert(0))
    with store.use(["a"]):
        before = store.info("a")
        update = StagedUpdate(plan_of(per_expert(1), store.bank), tuple(per_expert(1).values()))
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs:  # only what is staged names one
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(*args, **kwargs)

        monkeypatch.setattr(planned_module.torch, "empty", empty)
        size = update.plan.pack.elements * 4
        with pytest.raises(AdapterError, match=rf"'a' needs {size:,} bytes on cpu, .* CPU, or"):
            store.update_planned("a", update)
    assert store.info("a") == before
    assert_sound(store)
    assert_serves(store, "a", per_expert(0))
