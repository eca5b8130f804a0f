"""Long random lives of a store: no overlap, no orphan bytes, no slot with two owners."""

from __future__ import annotations

import random
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moegraft.adapters import AdapterBank, AdapterStore, BoundAdapter
from moegraft.errors import AdapterError
from moegraft.sites import expert_site, linear_site
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

WIDE = (expert_site("experts", 4, 32, 16), linear_site("q_proj", 32, 32))


def weight_of(adapter: BoundAdapter) -> int:
    """Bytes of an adapter's own values, shared ones counted once."""
    found: dict[int, int] = {}
    for site in adapter.factors.values():
        for factor in site.projections.values():
            for tensor in (factor.lora_A, factor.lora_B):
                found[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(found.values())


@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_random_swaps_in_a_fixed_arena_keep_every_byte_accounted_for(seed: int) -> None:
    random_ = random.Random(seed)
    ranks = (1, 2, 3, 5, 8, 13, 16)
    adapters = [random_adapter(WIDE, rank, seed=i) for i, rank in enumerate(ranks * 3)]
    room = 3 * max(map(weight_of, adapters)) // 16 * 16
    bank = AdapterBank(WIDE, num_slots=6, max_rank=16, dtype=torch.float32, arena_bytes=room)
    store = AdapterStore(bank)
    loaded: dict[str, BoundAdapter] = {}
    smallest_range = room
    for step in range(1000):
        name = f"n{random_.randrange(12)}"
        adapter = random_.choice(adapters)
        change = store.update if name in loaded and random_.random() < 0.7 else store.add
        if random_.random() < 0.1 and name in loaded:
            store.remove(name)
            change = store.add
        change(name, adapter)
        loaded[name] = adapter
        batch = random_.sample(sorted(loaded), min(len(loaded), random_.choice((1, 1, 2, 3))))
        fits = sum(store.info(n).num_bytes for n in batch) <= room
        with nullcontext() if fits else pytest.raises(AdapterError, match="free"), store.use(batch):
            assert_sound(store)
        with store.use([name]):
            pass
        assert_sound(store)
        memory = bank.memory
        live = [loaded[i.name] for i in store.infos() if i.slot is not None]
        assert memory.arena == room
        assert memory.used <= 1.1 * sum(map(weight_of, live)), step
        assert memory.largest_free <= room - memory.used
        smallest_range = min(smallest_range, memory.largest_free)
    assert smallest_range < room // 4, "the arena was never full"
    for info in store.infos():
        store.remove(info.name)
    assert (bank.memory.used, bank.memory.largest_free) == (0, room)


@cache
def adapter_of(seed: int, rank: int) -> BoundAdapter:
    """One of a few adapters for the stateful test."""
    return random_adapter(SITES, rank, seed=seed)


@dataclass
class Running:
    """A batch that is inside ``use``, and what its slots must hold to its end."""

    stack: ExitStack
    holds: dict[int, BoundAdapter]


NAMES = st.sampled_from("abc")
ADAPTERS = st.builds(adapter_of, st.integers(0, 3), st.integers(1, 6))
#: The copy into the bank that fails, if any, and whether it has copied by then.
FAULTS = st.one_of(st.none(), st.tuples(st.integers(0, 5), st.booleans()))


class StoreMachine(RuleBasedStateMachine):
    """Random calls of a store with copies that fail at random, beside a plain dict."""

    @initialize(slots=st.integers(1, 3), sizes=st.sampled_from([None, 3, 5]))
    def begin(self, slots: int, sizes: int | None) -> None:
        size = make_store().add("a", adapter_of(0, 3)).num_bytes
        self.store = make_store(slots, arena_bytes=None if sizes is None else sizes * size // 2)
        self.loaded: dict[str, tuple[BoundAdapter, int, str]] = {}
        self.pinned: set[str] = set()
        self.running: list[Running] = []
        self.newest = 0
        for name in "abc":
            self.add(name, adapter_of(0, 2), None)
        self.use(["a"], None)

    def attempt(self, fault: tuple[int, bool] | None, call: Any) -> Any:
        """Call with a fault; None when it was refused or failed, which changes nothing loaded."""
        with nullcontext() if fault is None else failing_copy(*fault, bank_of(self.store)):
            try:
                return call()
            except AdapterError:
                return None
            except RuntimeError as error:
                assert "injected" in str(error)
                return None

    def replace(self, call: Any, name: str, adapter: BoundAdapter, fault: Any) -> None:
        info = self.attempt(fault, lambda: call(name, adapter))
        if info is not None:
            assert info.version > self.newest and info.pinned == (name in self.pinned)
            self.newest = info.version
            self.loaded[name] = (adapter, info.version, info.checksum)

    @rule(name=NAMES, adapter=ADAPTERS, fault=FAULTS)
    def add(self, name: str, adapter: BoundAdapter, fault: Any) -> None:
        self.replace(self.store.add, name, adapter, fault)

    @rule(name=NAMES, adapter=ADAPTERS, fault=FAULTS)
    def update(self, name: str, adapter: BoundAdapter, fault: Any) -> None:
        known = name in self.loaded
        self.replace(self.store.update, name, adapter, fault)
        assert known == (name in self.loaded), "an update made a name"

    @rule(name=NAMES, fault=FAULTS)
    def remove(self, name: str, fault: Any) -> None:
        if self.attempt(fault, lambda: self.store.remove(name) or True):
            del self.loaded[name]
            self.pinned.discard(name)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if self.attempt(None, lambda: self.store.pin(name, pinned) or True):
            (self.pinned.add if pinned else self.pinned.discard)(name)

    @rule(names=st.lists(NAMES, max_size=3, unique=True), fault=FAULTS)
    def use(self, names: list[str], fault: Any) -> None:
        stack = ExitStack()
        slots = self.attempt(fault, lambda: stack.enter_context(self.store.use(names)))
        if slots is not None:
            assert sorted(slots) == sorted(names)
            holds = {slot: self.loaded[name][0] for name, slot in slots.items()}
            assert len(holds) == len(names), "two adapters in one slot"
            self.running.append(Running(stack, holds))

    @rule(which=st.integers(0, 9), fault=FAULTS)
    def end(self, which: int, fault: Any) -> None:
        if self.running:
            batch = self.running.pop(which % len(self.running))
            self.attempt(fault, batch.stack.close)
            with self.store.use([]):  # frees what the end could not
                pass

    @rule()
    def clear(self) -> None:
        for name in list(self.loaded):
            self.remove(name, None)

    @invariant()
    def every_running_slot_keeps_its_bytes_and_every_byte_has_one_owner(self) -> None:
        if not hasattr(self, "store"):
            return
        assert_sound(self.store)
        for batch in self.running:
            for slot, adapter in batch.holds.items():
                assert_holds(bank_of(self.store), slot, adapter)
        users = sum(len(batch.holds) for batch in self.running)
        entries = {*self.store._residency.slots, *self.store._entries.values()} - {None}
        assert sum(entry.users for entry in entries if entry is not None) == users
        found = {info.name: info for info in self.store.infos()}
        assert set(found) == set(self.loaded)
        for name, (adapter, version, checksum) in self.loaded.items():
            info = found[name]
            assert (info.version, info.checksum) == (version, checksum)
            assert info.pinned == (name in self.pinned)
            if info.slot is not None:
                assert_holds(bank_of(self.store), info.slot, adapter)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for batch in self.running:
                batch.stack.close()
            assert_nothing_left(self.store)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, print_blob=True
)
