"""Free bytes that don't lie together: regions are moved, but none that a running batch reads."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from moegraft.adapters import AdapterStore, BoundAdapter
from moegraft.adapters import layer_copies as layer_copies_module
from moegraft.errors import AdapterError
from moegraft.testing import random_adapter
from store_tools import (
    SITES,
    assert_holds,
    assert_nothing_left,
    assert_sound,
    bank_of,
    failing_copy,
    make_store,
)

SMALL = {name: random_adapter(SITES, 3, seed=i) for i, name in enumerate("abcd")}
LARGE = random_adapter(SITES, 6, seed=9)  # as large as two of them


def full_store(num_slots: int = 5) -> AdapterStore:
    """Four pinned adapters that fill the arena in their order."""
    size = make_store().add("a", SMALL["a"]).num_bytes
    store = make_store(num_slots, arena_bytes=4 * size)
    for name, adapter in SMALL.items():
        store.add(name, adapter)
        store.pin(name)
        with store.use([name]):
            pass
    assert [start_of(store, name) for name in "abcd"] == [i * size // 16 for i in range(4)]
    return store


def start_of(store: AdapterStore, name: str) -> int:
    slot = store.info(name).slot
    assert slot is not None, f"{name} is in no slot"
    region = bank_of(store)._space.regions[slot]
    assert region is not None
    return region[0]


def assert_all_hold(store: AdapterStore, adapters: dict[str, BoundAdapter]) -> None:
    for name, adapter in adapters.items():
        slot = store.info(name).slot
        assert slot is not None, f"{name} has left its slot"
        assert_holds(bank_of(store), slot, adapter)
    assert_sound(store)


def without(store: AdapterStore, names: Iterable[str]) -> dict[str, BoundAdapter]:
    """Remove some of the small ones; returns those that are left."""
    for name in names:
        store.remove(name)
    return {name: adapter for name, adapter in SMALL.items() if name not in names}


@pytest.mark.parametrize("gone", ["ac", "ad", "bd", "bc"])
def test_two_gaps_are_made_one_and_nobody_leaves_a_slot(gone: str) -> None:
    store = full_store()
    left = without(store, gone)
    slots = {name: store.info(name).slot for name in left}
    store.add("large", LARGE)
    with store.use(["large"]):
        assert_all_hold(store, {**left, "large": LARGE})
    assert {name: store.info(name).slot for name in left} == slots
    assert bank_of(store).memory.largest_free == 0
    assert_nothing_left(store)


def test_an_update_that_grows_moves_others_and_keeps_its_slot() -> None:
    store = full_store(4)
    left = without(store, "ac")
    size = store.info("b").num_bytes
    slot = store.info("d").slot
    grown = random_adapter(SITES, 5, seed=4)  # does not fit into one gap
    assert size < store.update("d", grown).num_bytes <= 2 * size
    assert store.info("d").slot == slot
    assert_all_hold(store, {**left, "d": grown})


def test_a_region_that_a_running_batch_reads_stays_and_the_refusal_says_so() -> None:
    store = full_store()
    left = without(store, "ac")
    store.add("large", LARGE)
    before = start_of(store, "b"), start_of(store, "d")
    with store.use(["b"]):
        with (
            pytest.raises(AdapterError, match=r"needs .* free .*running batches read can't be m"),
            store.use(["large"]),
        ):
            pass
        assert (start_of(store, "b"), start_of(store, "d")) == before, "moved for nothing"
        assert_all_hold(store, left)
    with store.use(["large"]):
        assert start_of(store, "b") != before[0]
        assert_all_hold(store, {**left, "large": LARGE})


def test_regions_beside_a_running_one_are_moved() -> None:
    store = full_store()
    left = without(store, "bd")
    store.add("large", LARGE)
    with store.use(["a"]):
        start = start_of(store, "a")
        with store.use(["large"]):
            assert start_of(store, "a") == start
            assert_all_hold(store, {**left, "large": LARGE})


def test_a_batch_moves_what_it_has_brought_itself() -> None:
    store = full_store()
    left = without(store, "ac")
    for name in left:
        store.pin(name, False)
    store.add("large", LARGE)
    with store.use(["b", "d", "large"]):
        assert_all_hold(store, {**left, "large": LARGE})


def test_what_overlaps_its_new_place_is_moved_through_a_small_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_copies_module, "_BOUNCE_BYTES", 64)
    size = make_store().add("a", SMALL["a"]).num_bytes
    store = make_store(4, arena_bytes=4 * size)
    thin = random_adapter(SITES, 1, seed=3)
    for name, adapter in {"thin": thin, "large": LARGE, "thin2": thin}.items():
        store.add(name, adapter)
        store.pin(name)
    with store.use(["thin", "large", "thin2"]):
        pass
    store.remove("thin")
    free = bank_of(store).memory.arena - bank_of(store).memory.used
    assert bank_of(store).memory.largest_free < free
    middle = random_adapter(SITES, 4, seed=5)
    assert store.add("middle", middle).num_bytes <= free
    with store.use(["middle"]):
        assert start_of(store, "large") == 0
        assert_all_hold(store, {"large": LARGE, "thin2": thin, "middle": middle})


@pytest.mark.parametrize("after", [False, True])
def test_a_move_that_fails_at_any_copy_loses_no_adapter(after: bool) -> None:
    failed = 0
    for step in range(100):
        store = full_store()
        left = without(store, "ac")
        store.add("large", LARGE)
        try:
            with failing_copy(step, after, bank_of(store)), store.use(["large"]):
                pass
            break
        except RuntimeError:
            failed += 1
        assert_sound(store)
        with store.use(["b", "d"]):
            assert_all_hold(store, left)
        with store.use(["large"]):
            assert_all_hold(store, {"large": LARGE})
        assert_nothing_left(store)
    assert failed > 5


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_swaps_of_pinned_adapters_are_refused_only_for_bytes_that_are_not_free(
    seed: int,
) -> None:
    choose = random.Random(seed)
    adapters = {rank: random_adapter(SITES, rank, seed=rank) for rank in range(1, 9)}
    unit = make_store().add("a", adapters[1]).num_bytes
    store = make_store(12, arena_bytes=20 * unit)
    bank, held, moved = bank_of(store), dict[str, BoundAdapter](), 0
    lost, worst = 0.0, 0.0
    for step in range(1000):
        if held and choose.random() < 0.5:
            name = choose.choice(sorted(held))
            store.remove(name)
            del held[name]
        memory = bank.memory
        free = memory.arena - memory.used
        if free:
            share = 1 - memory.largest_free / free  # of the free bytes, outside the largest range
            lost, worst = lost + share, max(worst, share)
        if len(held) == 12:
            continue
        name, adapter = f"n{step}", adapters[choose.randint(1, 8)]
        num_bytes = store.add(name, adapter).num_bytes
        if num_bytes > free:
            store.remove(name)
            continue
        moved += num_bytes > memory.largest_free
        store.pin(name)
        with store.use([name]):
            pass
        held[name] = adapter
        assert_sound(store)
        live = sum(store.info(name).num_bytes for name in held)
        assert bank.memory.used == live and bank.memory.arena == 20 * unit
        if step % 25 == 0:
            assert_all_hold(store, held)
    assert_all_hold(store, held)
    print(f"fragmentation: mean {lost / 1000:.2f}, worst {worst:.2f}; {moved} loads moved regions")
    assert moved > 10 and worst > 0.4, "the arena was never fragmented"


def test_a_growing_arena_closes_its_gaps_before_it_grows() -> None:
    store = make_store(5)
    store.add("a", SMALL["a"])
    bank = bank_of(store)
    bank.reserve(4 * store.info("a").num_bytes)
    for name in "abcd":
        store.add(name, SMALL[name])
        with store.use([name]):
            pass
    arena = bank.memory.arena
    left = without(store, "ac")
    store.add("large", LARGE)
    with store.use(["large"]):
        assert_all_hold(store, {**left, "large": LARGE})
    assert bank.memory.arena == arena
    assert torch.isfinite(bank.site_table(SITES[0].name).arena.data).all()
