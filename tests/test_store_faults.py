"""Every step of a load, an update, an eviction may fail: nothing is lost, mixed up or leaked."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moegraft.adapters import AdapterStore, AdapterUpdater
from moegraft.errors import AdapterError, MoegraftError
from moegraft.testing import constant_adapter
from store_faults import Faults, InjectedError, faults
from store_tools import (
    SITES,
    assert_holds,
    assert_nothing_left,
    assert_sound,
    bank_of,
    bind_as_named,
    make_store,
    run_threads,
    tensors_of,
    value_in,
)

__all__ = ["faults"]

_Call = Callable[[AdapterStore], None]


def _update_by_plan(name: str) -> _Call:
    """An update of tensors whose kinds were seen before, so that there is a plan for them."""

    def call(store: AdapterStore) -> None:
        UPDATERS[store].update(name, tensors_of(constant_adapter(SITES, 5.0, rank=2)), {})

    return call


#: An updater per store that has one, with a plan for adapters of rank 2.
UPDATERS: WeakKeyDictionary[AdapterStore, AdapterUpdater] = WeakKeyDictionary()


def with_plan(store: AdapterStore, name: str, value: float) -> None:
    """Give a store an updater that has a plan for rank 2, by two updates of an adapter."""
    updater = UPDATERS[store] = AdapterUpdater(store, bind_as_named)
    for _ in range(2):
        updater.update(name, tensors_of(constant_adapter(SITES, value, rank=2)), {})
    assert [known.plan is not None for [known] in updater._known.values()] == [True]


def _use(*names: str) -> _Call:
    def call(store: AdapterStore) -> None:
        with store.use(names):
            pass

    return call


#: Each begins with "running" in use, "idle" resident and "host" in no slot, all of rank 2.
OPERATIONS: dict[str, _Call] = {
    "add": lambda store: void(store.add("new", constant_adapter(SITES, 5.0))),
    "replace idle": lambda store: void(store.add("idle", constant_adapter(SITES, 5.0))),
    "replace running": lambda store: void(store.add("running", constant_adapter(SITES, 5.0))),
    "update idle": lambda store: void(store.update("idle", constant_adapter(SITES, 5.0))),
    "update running": lambda store: void(store.update("running", constant_adapter(SITES, 5.0))),
    "update host": lambda store: void(store.update("host", constant_adapter(SITES, 5.0, rank=9))),
    "plan idle": _update_by_plan("idle"),
    "plan running": _update_by_plan("running"),
    "plan host": _update_by_plan("host"),
    "remove idle": lambda store: store.remove("idle"),
    "remove running": lambda store: store.remove("running"),
    "evict": _use("host"),
    "use": _use("idle", "running"),
}


def void(info: Any) -> None:
    """Drop a result."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("room", [None, 2, 3], ids=["growing", "room for two", "room for three"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_at_any_step_leaves_every_adapter_whole_and_every_byte_owned(
    faults: Faults, operation: str, room: int | None, after: bool
) -> None:
    size = make_store().add("x", constant_adapter(SITES, 1.0, rank=2)).num_bytes
    fired = []
    for step in range(100):
        store = make_store(2, None if room is None else room * size)
        values = {"running": 1.0, "idle": 2.0, "host": 3.0}
        for name, value in values.items():
            store.add(name, constant_adapter(SITES, value, rank=2))
        with_plan(store, "host", 3.0)
        with store.use(["running"]) as running:
            slot = running["running"]
            with store.use(["idle"]):
                pass
            before = {info.name: (info.version, info.checksum) for info in store.infos()}
            with faults.at(step, after) as armed, suppress(InjectedError, MoegraftError):
                OPERATIONS[operation](store)
            fired.append(armed.fired)
            assert_holds(bank_of(store), slot, constant_adapter(SITES, 1.0, rank=2))
            with store.use([]):  # frees what the operation could not
                pass
            assert_sound(store)
            newest = max(version for version, _ in before.values())
            for info in store.infos():
                version, checksum = before.get(info.name, (0, ""))
                assert (info.version, info.checksum) == (version, checksum) or info.version > newest
            assert_holds(bank_of(store), slot, constant_adapter(SITES, 1.0, rank=2))
        for info in store.infos():
            try:
                with store.use([info.name]) as slots:
                    new = info.version > newest
                    assert value_in(store, slots[info.name]) == (5.0 if new else values[info.name])
            except AdapterError as error:  # rank 9 does not fit every room
                assert room is not None and info.num_bytes > size, error
        assert_nothing_left(store)
        if not armed.fired:
            break
    assert fired[-1] == "", "faults at a hundred steps, and no end"
    if operation != "remove running":  # which only takes a name away
        assert len(fired) > 1, "no step could fail"


NAMES = st.sampled_from("abcd")
VALUES = st.integers(1, 1000).map(float)
FAULT = st.one_of(st.none(), st.tuples(st.integers(0, 12), st.booleans()))
STEPS = st.one_of(
    st.tuples(st.just("add"), NAMES, VALUES, FAULT),
    st.tuples(st.just("update"), NAMES, VALUES, FAULT),
    st.tuples(st.just("remove"), NAMES, st.none(), FAULT),
    st.tuples(st.just("pin"), NAMES, st.booleans(), st.none()),
    st.tuples(st.just("use"), NAMES, st.integers(1, 3), FAULT),
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    programs=st.lists(st.lists(STEPS, min_size=3, max_size=12), min_size=8, max_size=8),
    slots=st.integers(2, 4),
    room=st.sampled_from([None, 2, 3, 5]),
)
def test_eight_threads_of_mixed_operations_with_faults_keep_every_invariant(
    faults: Faults, programs: list[list[Any]], slots: int, room: int | None
) -> None:
    size = make_store().add("x", constant_adapter(SITES, 1.0, rank=2)).num_bytes
    store = make_store(slots, None if room is None else room * size)
    updater = AdapterUpdater(store, bind_as_named)
    served: dict[str, dict[int, float]] = defaultdict(dict)  # name -> version -> value
    for name in "abcd":
        served[name][store.add(name, constant_adapter(SITES, 1.0, rank=2)).version] = 1.0

    def one(step: Any, seen: dict[str, int]) -> None:
        kind, name, what, _ = step
        if kind in ("add", "update"):
            adapter = constant_adapter(SITES, what, rank=1 + int(what) % 2)
            if kind == "update" and what % 3:
                info = updater.update(name, tensors_of(adapter), {})
            else:
                info = (store.add if kind == "add" else store.update)(name, adapter)
            served[name][info.version] = what
            assert info.version > seen.get(name, 0), "a version was used twice or went back"
            seen[name] = info.version
        elif kind == "remove":
            store.remove(name)
        elif kind == "pin":
            store.pin(name, what)
        else:
            with ExitStack() as stack:
                held = stack.enter_context(store.use("abcd"["abcd".index(name) :][:what]))
                assert len(set(held.values())) == len(held), "two adapters in one slot"
                first = {other: value_in(store, slot) for other, slot in held.items()}
                for other, slot in held.items():
                    assert value_in(store, slot) == first[other], "a running version changed"

    def work(i: int) -> None:
        seen: dict[str, int] = {}
        for step in programs[i]:
            at, after = step[3] or (None, False)
            # Refused, or failed on purpose.
            with faults.at(at, after), suppress(InjectedError, MoegraftError):
                one(step, seen)

    run_threads(work)
    with store.use([]):
        pass
    assert_sound(store)
    versions = [version for found in served.values() for version in found]
    assert len(versions) == len(set(versions)), "a version was used twice"
    for info in store.infos():  # one that stays pinned may lie in the middle of the arena
        store.pin(info.name, False)
    for info in store.infos():
        assert info.version == max(served[info.name]), f"{info.name} is not the newest version"
        with store.use([info.name]) as held:
            assert value_in(store, held[info.name]) == served[info.name][info.version]
    assert_nothing_left(store)


@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_loads_and_unloads_with_faults_leave_nothing(faults: Faults, seed: int) -> None:
    choose = random.Random(seed)
    store = make_store(2)
    for turn in range(100):
        at, after = choose.randrange(14), choose.random() < 0.5
        with faults.at(at, after), suppress(InjectedError, MoegraftError):
            store.add("a", constant_adapter(SITES, float(turn + 1), rank=1 + turn % 3))
            with store.use(["a"]):
                pass
        with store.use([]):
            pass
        assert_sound(store)
        if "a" in store and choose.random() < 0.5:
            store.remove("a")
            assert bank_of(store).memory.used == 0
    assert_nothing_left(store)


def test_no_memory_for_an_arena_that_never_moves_says_what_to_do(faults: Faults) -> None:
    store = make_store(2)
    num_bytes = store.add("a", constant_adapter(SITES, 1.0)).num_bytes
    with (
        faults.at(0) as armed,
        pytest.raises(AdapterError, match=rf"2 adapters of {num_bytes:,} bytes .* max_adapters"),
    ):
        store.freeze()
    assert armed.fired == "_new_arena" and not bank_of(store).frozen
    store.freeze()
    assert bank_of(store).frozen and bank_of(store).memory.arena == 2 * num_bytes
