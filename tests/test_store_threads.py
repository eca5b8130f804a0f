"""Threads that load, use and unload at once see whole adapters, their own, and leak nothing."""

from __future__ import annotations

import threading
from dataclasses import replace

from moegraft.adapters import BoundAdapter
from moegraft.errors import AdapterError
from moegraft.layer import MoeLoraLayer
from moegraft.testing import assert_bit_equal, constant_adapter, layer_case, random_adapter
from moegraft.types import TokenSlots
from store_tools import (
    SITES,
    assert_nothing_left,
    bank_of,
    make_store,
    run_threads,
    value_in,
)


def test_threads_that_load_use_and_unload_one_name_see_whole_adapters_only() -> None:
    store = make_store(8)  # each thread holds at most one slot, so there is always room
    store.add("same", constant_adapter(SITES, 1.0))

    def work(i: int) -> None:
        for step in range(15):
            value = float(1 + i * 100 + step)
            try:
                if step % 5 == 4:
                    store.remove("same")
                store.add("same", constant_adapter(SITES, value, rank=1 + step % 3))
                with store.use(["same"]) as slots:
                    first = value_in(store, slots["same"])
                    assert value_in(store, slots["same"]) == first
            except AdapterError as error:  # another thread may have removed the name
                assert "There is no adapter 'same'" in str(error)

    run_threads(work)
    assert_nothing_left(store)


def test_threads_that_update_and_use_one_name_see_whole_versions_in_order() -> None:
    store = make_store(9)
    store.add("policy", constant_adapter(SITES, 1.0))
    served: dict[int, float] = {store.info("policy").version: 1.0}

    def work(i: int) -> None:
        seen = 0
        for step in range(15):
            if i < 2:
                value = float(2 + i * 100 + step)
                info = store.update("policy", constant_adapter(SITES, value, rank=1 + step % 3))
                served[info.version] = value
                assert info.version > seen
                seen = info.version
            else:
                with store.use(["policy"]) as slots:
                    first = value_in(store, slots["policy"])
                    assert value_in(store, slots["policy"]) == first

    run_threads(work)
    newest = max(served)
    assert store.info("policy").version == newest and len(served) == 31
    with store.use(["policy"]) as slots:
        assert value_in(store, slots["policy"]) == served[newest]
    assert_nothing_left(store)


def test_threads_with_names_of_their_own_always_get_their_own_adapter() -> None:
    store = make_store(8)

    def work(i: int) -> None:
        name = f"mine-{i}"
        for step in range(15):
            value = float(1 + i * 100 + step)
            store.add(name, constant_adapter(SITES, value, rank=1 + (i + step) % 5))
            with store.use([name, None]) as slots:
                assert value_in(store, slots[name]) == value
            if step % 4 == 3:
                store.remove(name)

    run_threads(work)
    assert_nothing_left(store)


def test_threads_that_share_few_slots_never_see_another_adapter() -> None:
    store = make_store(4)
    adapters: dict[str, BoundAdapter] = {}
    for i in range(8):
        adapters[f"n{i}"] = constant_adapter(SITES, float(i + 1), rank=1 + i % 3)
        store.add(f"n{i}", adapters[f"n{i}"])
    permits = threading.Semaphore(4)  # a host admits no more batches than there are slots

    def work(i: int) -> None:
        for step in range(25):
            name = f"n{(i * 3 + step) % 8}"
            with permits, store.use([name]) as slots:
                assert value_in(store, slots[name]) == float(int(name[1:]) + 1)

    run_threads(work)
    assert_nothing_left(store)


def test_layers_run_right_while_other_threads_load_and_unload() -> None:
    store = make_store(8)
    site = SITES[0]
    case = layer_case(4, [], [-1], num_experts=4, hidden=8, intermediate=6)
    layer = MoeLoraLayer(case.weights, bank_of(store).site_table(site.name))
    adapters = [random_adapter(SITES, 1 + i, seed=i) for i in range(4)]
    ids, weights = case.routing.topk_ids, case.routing.topk_weights
    expected = []
    for adapter in adapters:
        alone = replace(case, adapters=(adapter.factors[site.name],), token_slots=(0,) * 4)
        expected.append(alone.run())

    def work(i: int) -> None:
        for step in range(12):
            if i < 4:
                store.add(f"other-{i}", random_adapter(SITES, 1 + step % 8, seed=step))
                with store.use([f"other-{i}"]):
                    pass
            else:
                which = (i + step) % 4
                store.add(f"mine-{i}", adapters[which])
                with store.use([f"mine-{i}"]) as slots:
                    rows = TokenSlots.of([slots[f"mine-{i}"]] * 4)
                    out = layer(case.x, ids, weights, rows)
                assert_bit_equal(out, expected[which], f"adapter {which}")

    run_threads(work)
    assert_nothing_left(store)
