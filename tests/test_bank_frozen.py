"""A bank whose arena must not move, and what the host knows of the device's table."""

from __future__ import annotations

import pytest
import torch

from moegraft.adapters import AdapterBank, AdapterStore
from moegraft.errors import AdapterError, MoegraftError
from moegraft.testing import bound_adapter, random_adapter, random_factors
from moegraft.types import TokenSlots
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


def add(store: AdapterStore, *ranks: int) -> list[str]:
    """Load adapters of these ranks as r0, r1, .."""
    names = [f"r{i}" for i in range(len(ranks))]
    for i, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        store.add(name, random_adapter(SITES, rank, seed=i))
    return names


def arena_address(bank: AdapterBank) -> int:
    return bank.site_table(SITES[0].name).arena.data.data_ptr()


def test_freezing_reserves_room_for_the_largest_adapter_in_every_slot() -> None:
    store = make_store(3)
    names = add(store, 2, 5, 3, 1)
    store.freeze()
    bank = bank_of(store)
    assert bank.frozen
    assert bank.memory.arena == 3 * store.info("r1").num_bytes
    address = arena_address(bank)
    for batch in (names[:3], names[1:], [names[0], names[3]]):
        with store.use(batch):
            pass
    store.add("r1", random_adapter(SITES, 5, seed=9))
    with store.use(["r1", "r2", "r0"]):
        pass
    assert arena_address(bank) == address
    store.freeze()  # again: nothing


def test_a_frozen_arena_refuses_a_larger_adapter_with_both_numbers() -> None:
    store = make_store(1)
    add(store, 2)
    store.freeze()
    with pytest.raises(AdapterError, match=r"needs [\d,]+ bytes, the whole arena.*graphs"):
        store.add("big", random_adapter(SITES, 16, seed=3))
    with store.use(["r0"]):
        pass


def test_an_arena_that_finds_no_memory_stays_as_it_was() -> None:
    store = make_store(3)
    [name] = add(store, 2)
    with store.use([name]):
        pass
    bank = bank_of(store)
    before, memory = state_of(bank), bank._arena
    version = memory.version
    with pytest.raises(MoegraftError, match=r"no memory for an arena of 1,000,000,000,000,000 byt"):
        bank.reserve(10**15)
    assert_state(bank, before)
    assert memory.version == version and not bank.frozen


def test_an_arena_that_moves_is_seen_when_its_copy_is_done_and_goes_when_its_kernels_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank = make_bank(2)
    bank.write(0, "a", pack(bank, random_adapter(SITES, 3)))
    memory, old = bank._arena, bank._arena.data
    seen: list[tuple[bool, int]] = []

    def synchronize() -> None:  # which does nothing on a CPU
        seen.append((memory.data is old, memory.version))

    monkeypatch.setattr(bank.order, "synchronize", synchronize)
    version = memory.version
    bank.reserve(100_000)
    # For the copies into the old one; for the copy to the new one; for readers of the old one.
    assert seen == [(True, version), (True, version), (False, version + 1)]


def test_reserving_keeps_what_is_there_and_a_fixed_arena_refuses() -> None:
    bank = make_bank(2)
    adapter = random_adapter(SITES, 3)
    bank.write(1, "a", pack(bank, adapter))
    bank.reserve(100_000)
    assert bank.memory.arena == 100_000
    assert_holds(bank, 1, adapter)
    bank.reserve(10)
    assert bank.memory.arena == 100_000
    with pytest.raises(AdapterError, match=r"fixed size of 1,008 bytes, 2,000 were asked for"):
        make_bank(2, arena_bytes=1008).reserve(2000)


def test_the_host_knows_which_sites_have_a_delta_after_every_write_and_clear() -> None:
    bank = make_bank(3)
    table, other = bank.site_table(SITES[1].name), bank.site_table(SITES[0].name)
    slots = TokenSlots.of([0, 2])
    assert not table.has_delta(slots)
    adapter = bound_adapter({SITES[1].name: random_factors(SITES[1], 2)})
    bank.write(1, "elsewhere", pack(bank, adapter))
    assert not table.has_delta(slots)
    bank.write(2, "here", pack(bank, adapter))
    assert table.has_delta(slots) and not other.has_delta(slots)
    assert not table.has_delta(TokenSlots.of([0, -1]))
    bank.clear(2)
    assert not table.has_delta(slots)


def test_a_captured_batch_has_a_delta_where_any_adapter_ever_had_one() -> None:
    bank = make_bank(3)
    captured = TokenSlots.captured(torch.full((4,), -1, dtype=torch.int32))
    assert captured.live and captured.in_graph and captured.num_tokens == 4
    tables = [bank.site_table(site.name) for site in SITES]
    adapter = bound_adapter({SITES[1].name: random_factors(SITES[1], 2)})
    before = bank.sites_version
    bank.write(1, "a", pack(bank, adapter))
    assert bank.sites_version > before
    assert [table.has_delta(captured) for table in tables] == [False, True, False]
    before = bank.sites_version
    bank.clear(1)
    bank.write(0, "again", pack(bank, adapter))
    bank.clear(0)
    assert bank.sites_version == before
    assert [table.has_delta(captured) for table in tables] == [False, True, False]


def test_updates_move_nothing_that_a_graph_holds() -> None:
    store = make_store(2)
    names = [site.name for site in SITES]
    part = random_adapter(SITES[:1], 6, seed=0)
    store.add("a", part)
    with store.use(["a"]):
        pass
    store.freeze()
    bank = bank_of(store)
    tables = [bank.site_table(name) for name in names]
    before = (bank.sites_version, bank.table.data_ptr(), tables[0].arena.data.data_ptr())
    for seed in range(20):
        store.update("a", random_adapter(SITES[:1], 1 + seed % 6, seed=seed))
        with store.use(["a"]) as slots:
            assert slots["a"] == 0
    assert (bank.sites_version, bank.table.data_ptr(), tables[0].arena.data.data_ptr()) == before
    last = store.info("a")
    with pytest.raises(AdapterError, match=r"whole arena has .*CUDA graphs hold its address"):
        store.update("a", random_adapter(SITES[:1], 16, seed=1))
    assert store.info("a") == last
    store.update("a", random_adapter(SITES[:2], 1, seed=2))  # a site that never had an adapter
    assert bank.sites_version > before[0] and tables[1].ever_used
