"""Bank and store: slots, memory, versions, eviction; a failure leaves the previous state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moegraft.adapters import AdapterStore
from moegraft.errors import AdapterError
from moegraft.factors import TableLayout
from moegraft.packing import pack_adapter
from moegraft.sites import expert_site, linear_site
from moegraft.testing import assert_same_factors, bound_adapter, random_adapter, random_factors
from store_tools import (
    SITES,
    assert_holds,
    assert_state,
    bank_of,
    make_bank,
    make_store,
    pack,
    state_of,
)


def enter(store: AdapterStore, names: Iterable[str]) -> None:
    """Use adapters for an empty batch."""
    with store.use(names):
        pass


@pytest.mark.parametrize(("num_slots", "max_rank"), [(0, 8), (2.5, 8), (2, 0), (2, "8"), (None, 8)])
def test_a_bank_of_no_size_is_refused(num_slots: Any, max_rank: Any) -> None:
    with pytest.raises(AdapterError, match=r"one slot \(max_adapters\) and rank 1.*num_slots="):
        make_bank(num_slots, max_rank=max_rank)


def test_a_new_bank_is_empty_and_takes_no_arena() -> None:
    bank = make_bank(5)
    assert (bank.memory.arena, bank.memory.used) == (0, 0)
    assert bank.memory.table == bank.table.numel() * 8
    for slot in range(5):
        assert_holds(bank, slot, None)


@pytest.mark.parametrize(("num_slots", "max_rank"), [(0, 4), (3, 0)])
def test_a_bank_without_slots_or_ranks_is_refused(num_slots: int, max_rank: int) -> None:
    with pytest.raises(AdapterError, match=rf"num_slots={num_slots}.*max_rank={max_rank}"):
        make_bank(num_slots, max_rank)


def test_growth_keeps_every_adapters_values_and_the_tables_address() -> None:
    bank = make_bank(6)
    table_address = bank.table.data_ptr()
    views = [bank.site_table(site.name) for site in SITES]
    kinds = ("fused", "separate", "shared_outer")
    adapters = [random_adapter(SITES, 1 + 3 * i, kinds[i % 3], seed=i) for i in range(6)]
    arenas = set()
    for slot, adapter in enumerate(adapters):
        bank.write(slot, f"a{slot}", pack(bank, adapter))
        arenas.add(bank.memory.arena)
        for earlier in range(slot + 1):
            assert_holds(bank, earlier, adapters[earlier])
        for later in range(slot + 1, 6):
            assert_holds(bank, later, None)
    assert len(arenas) > 2, "the arena never grew"
    assert bank.table.data_ptr() == table_address
    for view, site in zip(views, SITES, strict=True):  # views taken before the growth see it
        assert view.records.untyped_storage().data_ptr() == table_address
        assert_same_factors(view.factors(5), adapters[5].factors[site.name], site)
    assert bank.memory.used == sum(pack(bank, adapter).num_bytes for adapter in adapters)


def test_a_slot_costs_what_its_adapter_weighs() -> None:
    bank = make_bank(100, 256)
    small = pack(bank, bound_adapter({SITES[1].name: random_factors(SITES[1], 1)}))
    bank.write(7, "small", small)
    assert bank.memory.used == small.num_bytes == 2 * 8 * 4


def test_a_full_frozen_arena_refuses_and_stays_as_it_was() -> None:
    bank = make_bank(3)
    first = random_adapter(SITES, 4, seed=1)
    bank.write(0, "first", pack(bank, first))
    bank.freeze()
    large = pack(bank, random_adapter(SITES, 16, seed=2))
    before = state_of(bank)
    with pytest.raises(AdapterError, match=rf"'large' needs {large.num_bytes:,} bytes.*free"):
        bank.write(1, "large", large)
    assert_state(bank, before)
    assert_holds(bank, 0, first)
    assert_holds(bank, 1, None)


def test_a_rank_over_the_maximum_is_refused_and_changes_nothing() -> None:
    bank = make_bank(2, max_rank=8)
    before = state_of(bank)
    with pytest.raises(AdapterError, match=r"'big' has rank 9.*maximum of 8.*max_rank=9"):
        bank.write(0, "big", pack(bank, random_adapter(SITES, 9)))
    store = AdapterStore(bank)
    with pytest.raises(AdapterError, match=r"'big' has rank 9"):
        store.add("big", random_adapter(SITES, 9))
    assert len(store) == 0
    assert_state(bank, before)


def test_a_write_that_fails_halfway_gives_its_region_back() -> None:
    bank = make_bank(2)
    first = random_adapter(SITES, 4, seed=1)
    bank.write(0, "first", pack(bank, first))
    bank.write(1, "room", pack(bank, first))
    bank.clear(1)
    memory, table = bank.memory, bank.table.clone()
    foreign = pack_adapter(
        first.factors, TableLayout.of((*SITES, linear_site("x", 8, 8))), bank.dtype
    )
    with pytest.raises(RuntimeError):
        bank.write(1, "foreign", foreign)
    assert bank.memory == memory
    assert torch.equal(bank.table, table)
    assert_holds(bank, 0, first)


def test_clearing_or_overwriting_a_slot_frees_its_region() -> None:
    bank = make_bank(2)
    one, two = random_adapter(SITES, 4, seed=1), random_adapter(SITES, 6, seed=2)
    bank.write(0, "one", pack(bank, one))
    bank.write(0, "two", pack(bank, two))
    assert_holds(bank, 0, two)
    assert bank.memory.used == pack(bank, two).num_bytes
    bank.clear(0)
    bank.clear(0)
    assert_holds(bank, 0, None)
    assert (bank.memory.used, bank.memory.largest_free) == (0, bank.memory.arena)


def test_an_adapter_without_any_factor_fits_even_a_full_arena() -> None:
    nothing = bound_adapter({SITES[0].name: random_factors(SITES[0], 0)})
    bank = make_bank(2, arena_bytes=0)
    bank.write(1, "nothing", pack(bank, nothing))
    assert_holds(bank, 1, None)
    store = make_store()
    store.add("nothing", nothing)
    with store.use(["nothing"]) as slots:
        assert_holds(bank_of(store), slots["nothing"], None)


def test_use_brings_adapters_into_distinct_slots_with_their_values() -> None:
    store = make_store(3)
    adapters = {name: random_adapter(SITES, 2 + i, seed=i) for i, name in enumerate("abc")}
    for name, adapter in adapters.items():
        store.add(name, adapter)
    assert all(info.slot is None for info in store.infos())
    with store.use(["b", None, "a", "b", "c"]) as slots:
        assert sorted(slots) == ["a", "b", "c"]
        assert sorted(slots.values()) == [0, 1, 2]
        for name, slot in slots.items():
            assert_holds(bank_of(store), slot, adapters[name])
            assert store.info(name).slot == slot
    with store.use([None, None]) as none:
        assert none == {}


def test_the_least_recently_used_adapter_is_evicted_and_comes_back_from_the_host() -> None:
    store = make_store(2)
    adapters = {name: random_adapter(SITES, 3, seed=i) for i, name in enumerate("abcd")}
    for name, adapter in adapters.items():
        store.add(name, adapter)
    for name, resident in [
        ("a", "a"),
        ("b", "ab"),
        ("a", "ab"),
        ("c", "ac"),
        ("d", "cd"),
        ("a", "ad"),
    ]:
        with store.use([name]) as slots:
            assert_holds(bank_of(store), slots[name], adapters[name])
        assert {i.name for i in store.infos() if i.slot is not None} == set(resident)


def test_a_pinned_adapter_stays_and_pins_are_limited_to_the_slots() -> None:
    store = make_store(2)
    for i, name in enumerate("abcd"):
        store.add(name, random_adapter(SITES, 3, seed=i))
    store.pin("a")
    with store.use(["a"]) as slots:
        pinned_slot = slots["a"]
    for name in "bcdb":
        with store.use([name]) as slots:
            assert slots[name] != pinned_slot
    assert store.info("a").slot == pinned_slot and store.info("a").pinned
    store.pin("b")
    with pytest.raises(AdapterError, match=r"'c'.*2 adapters are pinned.*2 slots"):
        store.pin("c")
    with (
        pytest.raises(AdapterError, match="1 adapters need a slot, but only 0 of 2"),
        store.use(["c"]),
    ):
        pass
    store.pin("b", False)
    with store.use(["c"]):
        assert store.info("b").slot is None


def test_a_replaced_adapter_keeps_its_pin() -> None:
    store = make_store(2)
    store.add("a", random_adapter(SITES, 3, seed=1))
    store.pin("a")
    assert store.add("a", random_adapter(SITES, 3, seed=2)).pinned


def test_more_adapters_than_slots_are_refused_with_both_numbers() -> None:
    store = make_store(2)
    for i, name in enumerate("abc"):
        store.add(name, random_adapter(SITES, 3, seed=i))
    with (
        pytest.raises(AdapterError, match=r"3 different adapters \(a, b, c\).*2 slots"),
        store.use("abc"),
    ):
        pass
    with (
        pytest.raises(AdapterError, match="no adapter 'x'; loaded: a, b, c"),
        store.use(["a", "x"]),
    ):
        pass
    assert all(info.slot is None for info in store.infos())
    with store.use(["a", "b"]):
        with (
            pytest.raises(AdapterError, match="1 adapters need a slot, but only 0 of 2"),
            store.use(["c"]),
        ):
            pass
        with store.use(["b", "a"]):  # nested, nothing new needed
            pass
    with store.use(["c"]):
        pass


def test_nested_use_holds_a_slot_until_the_last_user_is_done() -> None:
    store = make_store(1)
    store.add("a", random_adapter(SITES, 3, seed=1))
    store.add("b", random_adapter(SITES, 3, seed=2))
    with store.use(["a"]) as outer:
        with store.use(["a"]) as inner:
            assert inner == outer
        with pytest.raises(AdapterError, match="in use"):
            enter(store, ["b"])
    with store.use(["b"]) as slots:
        assert slots == {"b": 0}


def test_an_error_inside_use_gives_the_slots_back() -> None:
    store = make_store(1)
    store.add("a", random_adapter(SITES, 3, seed=1))
    store.add("b", random_adapter(SITES, 3, seed=2))
    with pytest.raises(KeyError), store.use(["a"]):
        raise KeyError("a failing batch")
    with store.use(["b"]):
        pass


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "\x1b[31m", "x" * 257, 7, None])
def test_names_that_are_not_printable_labels_are_refused(name: object) -> None:
    store = make_store()
    with pytest.raises(AdapterError, match="not an adapter name"):
        store.add(name, random_adapter(SITES))  # type: ignore[arg-type]
    assert len(store) == 0
    store.add("../x", random_adapter(SITES))  # a label, never a path
    assert "../x" in store and "x" not in store


def test_factors_for_another_model_are_refused_and_change_nothing() -> None:
    store = make_store()
    store.add("a", random_adapter(SITES, 3, seed=1))
    before = store.infos()
    other = (replace(SITES[0], name="elsewhere"), expert_site(SITES[0].name, 4, 16, 6))
    for site in other:
        with pytest.raises(AdapterError, match=site.name):
            store.add("a", random_adapter([site]))
    assert store.infos() == before
