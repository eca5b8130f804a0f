"""Changes of one name come in order, those of several names side by side; copies layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from moegraft.adapters import BoundAdapter
from moegraft.adapters.finite import check_packed
from moegraft.adapters.layer_copies import LayerCopies, _chunks
from moegraft.adapters.name_locks import NameLocks
from moegraft.adapters.streams import StreamOrder
from moegraft.errors import AdapterError
from moegraft.factors import PackedAdapter, TableLayout
from moegraft.packing import pack_adapter
from moegraft.sites import expert_site
from moegraft.testing import constant_adapter, random_adapter
from moegraft.types import SiteFactors
from store_tools import SITES, assert_nothing_left, make_store, value_in

WAIT = 20.0


class SlowFactors(Mapping[str, SiteFactors]):
    """Factors that are not there until an event says so: a load that takes its time."""

    def __init__(self, factors: Mapping[str, SiteFactors]) -> None:
        self._factors = factors
        self.asked, self.there = threading.Event(), threading.Event()

    def __getitem__(self, name: str) -> SiteFactors:
        self.asked.set()
        assert self.there.wait(WAIT), "nobody let the load go on"
        return self._factors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)


def slow(value: float) -> tuple[BoundAdapter, SlowFactors]:
    adapter = constant_adapter(SITES, value)
    factors = SlowFactors(adapter.factors)
    return replace(adapter, factors=factors), factors


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_slow_load_holds_up_neither_other_loads_nor_batches() -> None:
    store = make_store()
    store.add("served", constant_adapter(SITES, 1.0))
    adapter, factors = slow(2.0)
    thread = in_thread(lambda: store.add("slow", adapter))
    assert factors.asked.wait(WAIT)
    store.add("other", constant_adapter(SITES, 3.0))
    store.update("served", constant_adapter(SITES, 4.0))
    with store.use(["served", "other"]) as slots:
        assert [value_in(store, slots[n]) for n in ("served", "other")] == [4.0, 3.0]
    store.remove("other")
    assert "slow" not in store
    factors.there.set()
    thread.join(WAIT)
    with store.use(["slow"]) as slots:
        assert value_in(store, slots["slow"]) == 2.0
    assert_nothing_left(store)


@pytest.mark.parametrize("second", ["add", "update", "remove"])
def test_a_later_change_of_a_name_comes_after_a_slow_earlier_one(second: str) -> None:
    store = make_store()
    store.add("policy", constant_adapter(SITES, 1.0))
    adapter, factors = slow(2.0)
    first = in_thread(lambda: store.update("policy", adapter))
    assert factors.asked.wait(WAIT)
    done = threading.Event()

    def change() -> None:
        if second == "remove":
            store.remove("policy")
        else:
            getattr(store, second)("policy", constant_adapter(SITES, 3.0))
        done.set()

    later = in_thread(change)
    assert not done.wait(0.2), "the later change overtook the earlier one"
    assert store.info("policy").version == 1, "the old version is known meanwhile"
    factors.there.set()
    first.join(WAIT)
    later.join(WAIT)
    assert done.is_set() and ("policy" in store) == (second != "remove")
    if second != "remove":
        assert store.info("policy").version == 3
        with store.use(["policy"]) as slots:
            assert value_in(store, slots["policy"]) == 3.0
    assert_nothing_left(store)


def test_a_lock_of_a_name_goes_with_its_last_holder_also_after_an_error() -> None:
    locks = NameLocks()
    with suppress(KeyError), locks.hold("a"):
        with locks.hold("b"):
            assert len(locks) == 2
        raise KeyError
    assert len(locks) == 0
    waits = threading.Event()
    with locks.hold("a"):

        def wait() -> None:
            with locks.hold("a"):
                waits.set()

        thread = in_thread(wait)
        assert not waits.wait(0.1)
        assert len(locks) == 1
    assert waits.wait(WAIT)
    thread.join(WAIT)
    assert len(locks) == 0


def test_chunks_cover_all_data_in_the_order_of_the_model() -> None:
    sites = tuple(expert_site(f"layers.{i}.experts", 8, 256, 128) for i in range(12))
    layout = TableLayout.of(sites)
    packed = pack_adapter(random_adapter(sites, 16, seed=1).factors, layout, torch.float32)
    chunks = list(_chunks(packed))
    names = [name for _, _, found in chunks for name in found]
    assert names == [site.name for site in sites] and len(chunks) > 1
    assert [chunks[0][0], chunks[-1][1]] == [0, packed.data.numel()]
    for begin, end, found in chunks:
        assert (begin, end) == (packed.spans[found[0]][0], packed.spans[found[-1]][1])
        assert (end - begin) * 4 <= 4 << 20 or len(found) == 1
    size = packed.data.numel() // 12
    apart = {site.name: (size * (11 - i), size * (12 - i)) for i, site in enumerate(sites)}
    moved = PackedAdapter(packed.data, packed.row, packed.max_rank, apart)
    assert [(end, [name]) for name, (_, end) in apart.items()] == [
        (end, found) for _, end, found in _chunks(moved)
    ]
    assert list(_chunks(pack_adapter({}, layout, torch.float32))) == []


def test_a_copy_on_the_cpu_is_done_at_once() -> None:
    cpu = torch.device("cpu")
    copies = LayerCopies(cpu, StreamOrder(cpu))
    packed = pack_adapter(random_adapter(SITES, 2).factors, TableLayout.of(SITES), torch.float32)
    region = torch.full_like(packed.data, torch.nan)
    copies.start(region, packed)
    copies.wait()
    copies.wait_for(SITES[0].name)
    assert torch.equal(region, packed.data)


def test_a_packed_adapter_with_nan_is_refused_by_its_site() -> None:
    packed = pack_adapter(random_adapter(SITES, 2).factors, TableLayout.of(SITES), torch.float32)
    check_packed("x", packed)
    begin, end = packed.spans["layers.1.experts"]
    packed.data[begin] = torch.nan
    packed.data[end - 1] = -torch.inf
    with pytest.raises(AdapterError, match=r"'x' holds 2 NaN or infinite .* at layers\.1\.experts"):
        check_packed("x", packed)
