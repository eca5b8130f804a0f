"""Updates in place: one flip for all layers, versions, running batches, and failures."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from moegraft.errors import AdapterError
from moegraft.layer import MoeLoraLayer
from moegraft.testing import (
    assert_bit_equal,
    bound_adapter,
    constant_adapter,
    layer_case,
    random_adapter,
)
from store_tools import (
    SITES,
    assert_holds,
    assert_nothing_left,
    assert_sound,
    assert_state,
    bank_of,
    failing_copy,
    make_store,
    state_of,
)


def test_an_update_of_an_idle_adapter_takes_its_slot_at_once_and_raises_the_version() -> None:
    store = make_store(3)
    old, new = random_adapter(SITES, 3, seed=1), random_adapter(SITES, 5, seed=2)
    first = store.add("a", old)
    with store.use(["a"]) as slots:
        slot = slots["a"]
    second = store.update("a", new)
    assert second.slot == slot and second.version > first.version
    assert second.checksum != first.checksum and store.info("a") == second
    assert_holds(bank_of(store), slot, new)
    assert bank_of(store).memory.used == second.num_bytes
    assert store.update("a", old).checksum == first.checksum
    with store.use(["a"]) as slots:
        assert slots["a"] == slot
        assert_holds(bank_of(store), slot, old)
    assert_nothing_left(store)


def test_an_update_of_an_adapter_on_the_host_comes_with_its_next_use() -> None:
    store = make_store(1)
    store.add("a", random_adapter(SITES, 3, seed=1))
    new = random_adapter(SITES, 2, seed=2)
    assert store.update("a", new).slot is None
    with store.use(["a"]) as slots:
        assert_holds(bank_of(store), slots["a"], new)


def test_a_running_batch_keeps_its_version_and_the_next_gets_the_new_one_elsewhere() -> None:
    store = make_store(3)
    versions = [random_adapter(SITES, 2 + seed, seed=seed) for seed in range(4)]
    store.add("a", versions[0])
    with store.use(["a"]) as first:
        assert store.update("a", versions[1]).slot is None
        with store.use(["a"]) as second:
            assert second["a"] != first["a"]
            store.update("a", versions[2])
            with store.use(["a"]) as third:
                assert len({first["a"], second["a"], third["a"]}) == 3
                for slots, version in zip((first, second, third), versions, strict=False):
                    assert_holds(bank_of(store), slots["a"], version)
                assert_sound(store)
        assert_sound(store, slots_in_use=2)  # the second is gone; the newest may stay
        slot = store.info("a").slot
        assert store.update("a", versions[3]).slot == slot  # idle again: in place
        assert_holds(bank_of(store), first["a"], versions[0])
    assert bank_of(store).memory.used == store.info("a").num_bytes
    assert_nothing_left(store)


def test_without_another_slot_the_new_version_waits_for_the_last_user() -> None:
    store = make_store(1)
    old, new = random_adapter(SITES, 3, seed=1), random_adapter(SITES, 3, seed=2)
    store.add("a", old)
    with store.use(["a"]) as running:
        version = store.update("a", new).version
        with pytest.raises(AdapterError, match=r"only 0 of 1.*in use"), store.use(["a"]):
            pass
        assert_holds(bank_of(store), running["a"], old)
        assert store.info("a").version == version
    with store.use(["a"]) as slots:
        assert_holds(bank_of(store), slots["a"], new)


def test_without_room_for_both_the_new_version_waits_for_the_last_user() -> None:
    old, new = random_adapter(SITES, 3, seed=1), random_adapter(SITES, 3, seed=2)
    store = make_store(2, arena_bytes=make_store().add("a", old).num_bytes)
    store.add("a", old)
    with store.use(["a"]) as running:
        store.update("a", new)
        with pytest.raises(AdapterError, match=r"'a' needs .*free"), store.use(["a"]):
            pass
        assert_holds(bank_of(store), running["a"], old)
    with store.use(["a"]) as slots:
        assert_holds(bank_of(store), slots["a"], new)


def test_an_update_of_an_unknown_or_removed_name_is_refused() -> None:
    store = make_store()
    with pytest.raises(AdapterError, match="no adapter 'a'; loaded: none"):
        store.update("a", random_adapter(SITES))
    store.add("a", random_adapter(SITES))
    store.remove("a")
    with pytest.raises(AdapterError, match="no adapter 'a'"):
        store.update("a", random_adapter(SITES))
    assert len(store) == 0


def test_an_update_keeps_the_pin_and_the_order_of_eviction() -> None:
    store = make_store(2)
    for i, name in enumerate("abc"):
        store.add(name, random_adapter(SITES, 3, seed=i))
    for name in "ab":
        with store.use([name]):
            pass
    store.update("a", random_adapter(SITES, 3, seed=9))  # updated last, used first
    with store.use("c"):
        assert store.info("a").slot is None and store.info("b").slot is not None
    store.pin("b")
    assert store.update("b", random_adapter(SITES, 3, seed=8)).pinned


@pytest.mark.parametrize("running", [False, True])
def test_a_refused_update_leaves_everything_as_it_was(running: bool) -> None:
    store = make_store(2)
    old = random_adapter(SITES, 3, seed=1)
    store.add("a", old)
    with store.use(["a"]) as slots:
        pass
    with store.use(["a"]) if running else nullcontext():
        infos, state = store.infos(), state_of(bank_of(store))
        part = bound_adapter({SITES[0].name: old.factors[SITES[0].name]})
        large = constant_adapter(SITES, 1.0, rank=17)
        for bad, message in [
            (part, r"leaves out.*layers\.0\.q_proj \(linear: 0 of 1\).*load\(\) it"),
            (large, "rank 17, over the bank's maximum of 16"),
        ]:
            with pytest.raises(AdapterError, match=message):
                store.update("a", bad)
            assert store.infos() == infos
            assert_state(bank_of(store), state)
        assert_holds(bank_of(store), slots["a"], old)


def test_a_fixed_arena_that_holds_one_version_is_enough_for_updates() -> None:
    old, new = random_adapter(SITES, 4, seed=1), random_adapter(SITES, 4, seed=2)
    size = make_store().add("a", old).num_bytes
    store = make_store(1, arena_bytes=size)
    store.add("a", old)
    with store.use(["a"]):
        pass
    slot = store.info("a").slot
    assert slot is not None and store.update("a", new).slot == slot
    assert_holds(bank_of(store), slot, new)
    with pytest.raises(AdapterError, match="the whole arena has"):
        store.update("a", random_adapter(SITES, 5, seed=3))
    assert_holds(bank_of(store), slot, new)


def test_a_full_arena_makes_idle_adapters_go_and_refuses_when_they_are_pinned() -> None:
    small = [random_adapter(SITES, 2, seed=i) for i in range(3)]
    size = make_store().add("a", small[0]).num_bytes
    store = make_store(3, arena_bytes=3 * size)
    for name, adapter in zip("abc", small, strict=True):
        store.add(name, adapter)
        store.pin(name)
    with store.use("abc"):
        pass
    large = random_adapter(SITES, 3, seed=9)
    infos, state = store.infos(), state_of(bank_of(store))
    with pytest.raises(AdapterError, match=r"'a' needs .*free"):
        store.update("a", large)
    assert store.infos() == infos
    assert_state(bank_of(store), state)
    store.pin("b", False)
    slot = store.update("a", large).slot
    assert slot is not None and store.info("b").slot is None and store.info("c").slot is not None
    assert_holds(bank_of(store), slot, large)
    assert_sound(store)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_an_update_that_fails_at_any_copy_keeps_the_old_version(after: bool, full: bool) -> None:
    old, new = random_adapter(SITES, 3, seed=1), random_adapter(SITES, 3, seed=2)
    size = make_store().add("a", old).num_bytes
    store = make_store(2, arena_bytes=size if full else 4 * size)
    store.add("a", old)
    failed = 0
    for step in range(100):
        with store.use(["a"]):
            pass
        before = store.info("a")
        try:
            with failing_copy(step, after):
                store.update("a", new)
            break
        except RuntimeError:
            failed += 1
        assert_sound(store)
        found = store.info("a")
        assert (found.version, found.checksum) == (before.version, before.checksum)
        assert found.slot == before.slot or (full and found.slot is None)
        with store.use(["a"]) as slots:
            assert_holds(bank_of(store), slots["a"], old)
    assert failed > 2
    slot = store.info("a").slot
    assert slot is not None and store.info("a").version > before.version
    assert_holds(bank_of(store), slot, new)
    assert_nothing_left(store)


@pytest.mark.parametrize("after", [False, True])
def test_a_removal_or_a_batchs_end_that_fails_leaks_nothing(after: bool) -> None:
    store = make_store(1)
    adapter = random_adapter(SITES, 3, seed=1)
    store.add("a", adapter)
    store.pin("a")
    with store.use(["a"]):
        pass
    with pytest.raises(RuntimeError, match="injected"), failing_copy(0, after):
        store.remove("a")
    slot = store.info("a").slot
    assert slot is not None
    assert_holds(bank_of(store), slot, adapter)
    with pytest.raises(RuntimeError, match="injected"), store.use(["a"]):
        store.update("a", random_adapter(SITES, 3, seed=2))
        injected = failing_copy(0, after)
        injected.__enter__()
    injected.__exit__(None, None, None)
    with store.use(["a"]):  # the old version's slot is free again
        pass
    assert_nothing_left(store)


def test_a_layer_sees_an_update_at_its_next_run() -> None:
    store, site = make_store(2, arena_bytes=1 << 20), SITES[0]
    case = layer_case(4, [None], [0, 0, -1, 0], num_experts=4, hidden=8, intermediate=6)
    layer = MoeLoraLayer(case.weights, bank_of(store).site_table(site.name))
    store.add("a", random_adapter(SITES, 3, seed=0))
    table = bank_of(store).table.data_ptr()
    arena = bank_of(store).site_table(site.name).arena.data.data_ptr()
    for seed in range(1, 5):
        with store.use(["a"]) as slots:
            assert slots["a"] == 0
        adapter = random_adapter(SITES, 1 + seed, seed=seed)
        store.update("a", adapter)
        alone = replace(case, adapters=(adapter.factors[site.name],))
        assert_bit_equal(case.run(layer), alone.run(), f"update {seed}")
    assert bank_of(store).table.data_ptr() == table
    assert bank_of(store).site_table(site.name).arena.data.data_ptr() == arena


def test_a_hundred_updates_leak_nothing() -> None:
    store = make_store(2, arena_bytes=1 << 16)
    store.add("policy", constant_adapter(SITES, 0.5))
    versions = []
    for step in range(100):
        adapter = constant_adapter(SITES, float(step + 1), rank=1 + step % 4)
        if step % 3 == 0:
            with store.use(["policy"]):
                versions.append(store.update("policy", adapter).version)
        else:
            versions.append(store.update("policy", adapter).version)
        with store.use(["policy", None]) as slots:
            assert_holds(bank_of(store), slots["policy"], adapter)
            assert bank_of(store).memory.used == store.info("policy").num_bytes
        assert_sound(store, slots_in_use=1)
        assert len(store) == 1 and len(store._entries) == 1
    assert versions == sorted(set(versions))
    assert_nothing_left(store)


@pytest.mark.parametrize("name", [["a"], {}, None, 1, ""])
def test_an_update_of_what_is_no_name_is_refused(name: Any) -> None:
    store = make_store(2)
    store.add("a", constant_adapter(SITES, 1.0))
    with pytest.raises(AdapterError, match="is not an adapter name"):
        store.update(name, constant_adapter(SITES, 2.0))
    assert store.info("a").version == 1
