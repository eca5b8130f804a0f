"""The store over time: versions, replacing, removing, reloading, and no leak anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraft.adapters import BoundAdapter
from moegraft.backends.cpu import CpuStages, LoraMethod
from moegraft.errors import AdapterError, MoegraftError
from moegraft.layer import MoeLoraLayer
from moegraft.testing import (
    assert_bit_equal,
    bound_adapter,
    constant_adapter,
    layer_case,
    random_adapter,
)
from moegraft.types import LoraFactor, SiteFactors, TokenSlots
from store_tools import (
    SITES,
    assert_holds,
    assert_nothing_left,
    bank_of,
    make_bank,
    make_store,
    pack,
    state_of,
)


def test_every_load_gets_a_new_version_even_of_equal_content() -> None:
    store = make_store()
    adapter = random_adapter(SITES, 3, seed=1)
    versions = [store.add("a", adapter).version for _ in range(3)]
    store.remove("a")
    versions.append(store.add("a", adapter).version)
    versions.append(store.add("b", adapter).version)
    assert versions == sorted(set(versions))
    assert store.info("a").version == versions[3]


def test_the_checksum_tells_contents_apart_and_nothing_else() -> None:
    store = make_store()
    base = random_adapter(SITES, 3, seed=1)
    checksum = store.add("a", base).checksum
    assert store.add("b", random_adapter(SITES, 3, seed=1)).checksum == checksum
    with store.use(["a"]):
        assert store.info("a").checksum == checksum
    site = SITES[0]
    factors = dict(base.factors[site.name].projections)
    f = factors["gate"]
    nudged = f.lora_B.clone()
    nudged[-1, -1, -1] += 1e-6
    some_experts = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    changes = [
        SiteFactors({**factors, "gate": LoraFactor(f.lora_A, f.lora_B, f.scale * 2)}),
        SiteFactors({**factors, "gate": LoraFactor(f.lora_A, nudged, f.scale)}),
        SiteFactors({k: v for k, v in factors.items() if k != "gate"}),
        SiteFactors({**factors, "gate": factors["up"], "up": f}),
        SiteFactors(factors, some_experts),
    ]
    found = {checksum}
    for changed in changes:
        adapter = bound_adapter({**base.factors, site.name: changed})
        found.add(store.add("c", adapter).checksum)
    assert len(found) == len(changes) + 1


def test_removing_an_adapter_in_use_takes_its_name_at_once_and_its_slot_when_done() -> None:
    store = make_store(2)
    adapter = random_adapter(SITES, 3, seed=1)
    store.add("a", adapter)
    with store.use(["a"]) as outer:
        with store.use(["a"]):
            store.remove("a")
            assert "a" not in store and len(store) == 0
            with pytest.raises(AdapterError, match="no adapter 'a'; loaded: none"):
                store.info("a")
            with pytest.raises(AdapterError, match="no adapter 'a'"):
                store.remove("a")
        assert_holds(bank_of(store), outer["a"], adapter)  # one user is left
    assert bank_of(store).memory.used == 0
    assert_holds(bank_of(store), outer["a"], None)


def test_replacing_an_adapter_in_use_keeps_the_running_batchs_values() -> None:
    store = make_store(2)
    old, new = random_adapter(SITES, 3, seed=1), random_adapter(SITES, 5, seed=2)
    store.add("a", old)
    with store.use(["a"]) as running:
        version = store.info("a").version
        assert store.add("a", new).version > version
        assert_holds(bank_of(store), running["a"], old)
        with store.use(["a"]) as following:
            assert following["a"] != running["a"]
            assert_holds(bank_of(store), following["a"], new)
            assert_holds(bank_of(store), running["a"], old)
    with store.use(["a"]) as later:
        assert_holds(bank_of(store), later["a"], new)
    assert bank_of(store).memory.used == store.info("a").num_bytes


def test_replacing_in_a_bank_of_one_slot_waits_for_the_running_batch() -> None:
    store = make_store(1)
    store.add("a", random_adapter(SITES, 3, seed=1))
    new = random_adapter(SITES, 3, seed=2)
    with store.use(["a"]):
        store.add("a", new)
        with pytest.raises(AdapterError, match="in use"), store.use(["a"]):
            pass
    with store.use(["a"]) as slots:
        assert_holds(bank_of(store), slots["a"], new)


def test_a_layer_sees_every_write_and_every_clear_of_its_bank() -> None:
    site = SITES[0]
    bank = make_bank(2, arena_bytes=1 << 20)  # no growth, which would also renew what is cached
    case = layer_case(4, [None, None], [0, 1, -1, 0], num_experts=4, hidden=8, intermediate=6)
    layer = MoeLoraLayer(case.weights, bank.site_table(site.name))
    held: list[BoundAdapter | None] = [None, None]
    writes = [(0, 1), (1, 2), (0, 3), (0, None), (1, 4), (0, 5), (1, None)]
    assert_bit_equal(case.run(layer), case.run(), "an empty bank")
    for slot, seed in writes:
        held[slot] = None if seed is None else random_adapter(SITES, 3, seed=seed)
        adapter = held[slot]
        if adapter is None:
            bank.clear(slot)
        else:
            bank.write(slot, "a", pack(bank, adapter))
        now = tuple(None if a is None else a.factors[site.name] for a in held)
        assert_bit_equal(case.run(layer), replace(case, adapters=now).run(), f"{slot}: {seed}")


@pytest.mark.parametrize("method", ["gathered", "segments"])
def test_what_a_batch_keeps_does_not_grow_with_the_writes_of_the_bank(method: LoraMethod) -> None:
    stages = CpuStages(method)
    bank = make_bank(2, arena_bytes=1 << 20)
    experts, linear = (bank.site_table(site.name) for site in SITES[:2])
    slots = TokenSlots.of([0, 1, -1, 0])
    perm = stages.permute(torch.tensor([[0], [1], [2], [3]]), slots, 4, 0)
    sizes = []
    for seed in range(5):
        bank.write(seed % 2, "a", pack(bank, random_adapter(SITES, 3, seed=seed)))
        x = torch.ones(4, 8)
        out = torch.zeros(4, 2 * SITES[0].projection("up").out_features)
        stages.lora_shrink_expand(x, experts, ("gate", "up"), perm, slots, out)
        stages.linear_lora(x, linear, slots, torch.zeros(4, SITES[1].projections[0].out_features))
        sizes.append(len(slots.cache))
    assert len(set(sizes)) == 1, sizes


def test_unloading_gives_the_bytes_back() -> None:
    store = make_store(3)
    for i, name in enumerate("abc"):
        store.add(name, random_adapter(SITES, 3 + i, seed=i))
    with store.use(["a", "c"]):
        pass
    before = bank_of(store).memory
    with store.use(["b"]):
        assert bank_of(store).memory.used == before.used + store.info("b").num_bytes
    store.remove("b")
    assert bank_of(store).memory.used == before.used
    assert {info.name for info in store.infos()} == {"a", "c"}
    assert_nothing_left(store)


def test_a_failed_add_changes_nothing() -> None:
    store = make_store(2)
    store.add("a", random_adapter(SITES, 3, seed=1))
    with store.use(["a"]):
        infos, state = store.infos(), state_of(bank_of(store))
        with pytest.raises(AdapterError, match="rank 17"):
            store.add("a", random_adapter(SITES, 17, seed=2))
        assert store.infos() == infos
        assert torch.equal(bank_of(store).table, state[1])


def test_an_adapter_larger_than_a_fixed_arena_is_refused_when_it_is_loaded() -> None:
    store = make_store(2, arena_bytes=4096)
    with pytest.raises(AdapterError, match=r"needs .* bytes, the whole arena has 4,096"):
        store.add("a", random_adapter(SITES, 8))
    assert len(store) == 0


def test_a_full_fixed_arena_evicts_more_than_one_and_refuses_while_all_are_in_use() -> None:
    small = [random_adapter(SITES, 2, seed=i) for i in range(3)]
    large = random_adapter(SITES, 4, seed=9)
    probe = make_store()
    size = probe.add("p", small[0]).num_bytes
    assert probe.add("q", large).num_bytes > size
    store = make_store(4, arena_bytes=3 * size)
    for name, adapter in zip("abc", small, strict=True):
        store.add(name, adapter)
    store.add("z", large)
    with store.use("abc") as slots:
        with pytest.raises(AdapterError, match=r"'z' needs .*free"), store.use(["z"]):
            pass
        for name, adapter in zip("abc", small, strict=True):
            assert_holds(bank_of(store), slots[name], adapter)
    with store.use(["z"]) as slots:
        assert_holds(bank_of(store), slots["z"], large)
    with store.use("abc") as slots:
        for name, adapter in zip("abc", small, strict=True):
            assert_holds(bank_of(store), slots[name], adapter)
    assert_nothing_left(store)


def test_a_batch_that_a_fixed_arena_cannot_hold_leaves_all_adapters_on_the_host() -> None:
    adapters = {name: random_adapter(SITES, 2, seed=i) for i, name in enumerate("abc")}
    size = make_store().add("p", adapters["a"]).num_bytes
    store = make_store(4, arena_bytes=2 * size)
    for name, adapter in adapters.items():
        store.add(name, adapter)
    with store.use("a"):
        pass
    with pytest.raises(AdapterError, match=r"needs .*free"), store.use("bca"):
        pass
    for name, adapter in adapters.items():  # as use() says: slots may have changed, no content has
        with store.use([name]) as slots:
            assert_holds(bank_of(store), slots[name], adapter)
    for pair in ("ab", "bc", "ca"):  # nobody holds a slot
        with store.use(pair):
            pass
    assert_nothing_left(store)


def test_memory_that_runs_out_while_growing_leaks_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(1)
    store.add("a", random_adapter(SITES, 3, seed=1))
    store.add("b", random_adapter(SITES, 8, seed=2))

    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with store.use(["a"]):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", no_memory)
        with pytest.raises(MoegraftError, match="out of memory"), store.use(["b"]):
            pass
    for name in "aba":  # nobody holds the slot
        with store.use([name]):
            pass
    assert_nothing_left(store)


def test_a_hundred_reloads_under_one_name_leak_nothing_and_serve_the_newest() -> None:
    store = make_store(2)
    arenas = set()
    for step in range(100):
        adapter = constant_adapter(SITES, float(step + 1), rank=1 + step % 4)
        if step % 3 == 0 and step:
            store.remove("policy")
        store.add("policy", adapter)
        with store.use(["policy", None]) as slots:
            assert_holds(bank_of(store), slots["policy"], adapter)
            resident = sum(info.slot is not None for info in store.infos())
            assert resident == 1 and bank_of(store).memory.used == store.info("policy").num_bytes
        arenas.add(bank_of(store).memory.arena)
    assert len(store) == 1 and len(arenas) <= 4
    assert_nothing_left(store)


def test_one_slot_serves_four_registered_adapters_in_rotation() -> None:
    store = make_store(1)
    adapters = {name: random_adapter(SITES, 2 + i, seed=i) for i, name in enumerate("abcd")}
    for name, adapter in adapters.items():
        store.add(name, adapter)
    for _ in range(3):
        for name, adapter in adapters.items():
            with store.use([name]) as slots:
                assert_holds(bank_of(store), slots[name], adapter)
    adapters["a"] = random_adapter(SITES, 2, seed=99)
    store.add("a", adapters["a"])
    with store.use(["a"]) as slots:
        assert_holds(bank_of(store), slots["a"], adapters["a"])


def test_a_later_adapter_of_a_larger_rank_is_not_cut() -> None:
    store = make_store(2)
    small, large = random_adapter(SITES, 2, seed=1), random_adapter(SITES, 16, seed=2)
    store.add("small", small)
    with store.use(["small"]):
        store.add("large", large)
        with store.use(["large", "small"]) as slots:
            assert_holds(bank_of(store), slots["large"], large)
            assert_holds(bank_of(store), slots["small"], small)
