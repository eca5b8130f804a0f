"""Updates by a plan on a GPU: one launch into the arena, refusals, running batches; and moves."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")

from store_cases import BUSY, Model, adapter_of, assert_holds, bank_of, batch, make_store, run

from moegraft.adapters import AdapterStore, AdapterUpdater, make_source
from moegraft.errors import AdapterError
from moegraft.testing import assert_bit_equal
from update_kinds import (
    CONFIG,
    KINDS,
    SITES,
    Tensors,
    bound,
    new_bank,
    per_expert,
    per_projection,
    plan_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def moved(tensors: Tensors) -> Tensors:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def make_updater(
    slots: int = 2, dtype: torch.dtype = torch.bfloat16, arena_bytes: int | None = None
) -> tuple[AdapterStore, AdapterUpdater]:
    store = AdapterStore(new_bank(dtype, slots, "cuda", arena_bytes))
    return store, AdapterUpdater(store, bound)


def add(store: AdapterStore, name: str, tensors: Tensors) -> None:
    store.add(name, bound(make_source(tensors, CONFIG), None))


def slot_bytes(store: AdapterStore, name: str) -> torch.Tensor:
    """What an adapter's region holds, on the host."""
    bank, slot = store.bank, store.info(name).slot
    assert slot is not None, f"{name} is in no slot"
    region = bank._space.regions[slot]
    assert region is not None
    torch.cuda.synchronize()
    first, last = (bank._space.element(unit) for unit in (region[0], sum(region)))
    return bank._space.arena.data[first:last].cpu()


def packed_bytes(tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """What a plan makes of the same tensors on a CPU."""
    plan = plan_of(tensors, new_bank(dtype))
    data = torch.empty(plan.pack.elements, dtype=dtype)
    plan.fill(list(tensors.values()), data)
    return data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_by_a_plan_holds_the_very_bits_in_slot_and_on_the_host(
    kind: str, dtype: torch.dtype
) -> None:
    store, updater = make_updater(1, dtype)
    make = KINDS[kind]
    add(store, "a", make(0))
    add(store, "other", make(9))
    with store.use(["a"]):
        pass
    slot = store.info("a").slot
    for seed in range(1, 6):
        tensors = make(seed)
        info = updater.update("a", moved(tensors), CONFIG)
        assert info.slot == slot
        assert torch.equal(slot_bytes(store, "a"), packed_bytes(tensors, dtype)), seed
        fresh = AdapterStore(new_bank(dtype)).add("a", bound(make_source(tensors, CONFIG), None))
        assert info.checksum == fresh.checksum and info.num_bytes == fresh.num_bytes
        for name in ("other", "a"):  # evicted, and back from the host
            with store.use([name]):
                pass
        assert torch.equal(slot_bytes(store, "a"), packed_bytes(tensors, dtype)), seed


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_views_of_a_flat_buffer_at_any_offset(offset: int) -> None:
    store, updater = make_updater()
    add(store, "a", per_projection(0))
    with store.use(["a"]):
        pass
    for seed in range(1, 4):
        tensors = {name: tensor.bfloat16() for name, tensor in per_projection(seed).items()}
        flat = torch.zeros(offset + sum(t.numel() for t in tensors.values()), dtype=torch.bfloat16)
        flat = flat.cuda()
        views, begin = {}, offset
        for name, tensor in tensors.items():
            views[name] = flat[begin : begin + tensor.numel()].view(tensor.shape)
            views[name].copy_(tensor)
            begin += tensor.numel()
        updater.update("a", views, CONFIG)
        assert torch.equal(slot_bytes(store, "a"), packed_bytes(tensors, torch.bfloat16))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("running", [False, True])
def test_a_value_that_is_not_finite_is_refused_and_the_old_version_stays(
    value: float, running: bool
) -> None:
    store, updater = make_updater()
    add(store, "a", per_expert(0))
    with store.use(["a"]):
        pass
    for seed in (1, 2, 3):
        info = updater.update("a", moved(per_expert(seed)), CONFIG)
    broken = moved(per_expert(4))
    broken["layers.1.mlp.experts.7.up_proj.lora_B.weight"][3, 1] = value
    used = store.bank.memory.used
    with store.use(["a"] if running else []):
        with pytest.raises(AdapterError, match=r"1 NaN or infinite values.*layers\.1\.mlp\.exp"):
            updater.update("a", broken, CONFIG)
        assert store.info("a") == info and store.bank.memory.used == used
    assert torch.equal(slot_bytes(store, "a"), packed_bytes(per_expert(3), torch.bfloat16))
    with pytest.raises(AdapterError, match=r"NaN or infinite|beyond bfloat16"):
        name = "layers.0.self_attn.q_proj.lora_A.weight"
        updater.update("a", {**moved(per_expert(4)), name: broken[name] * 0 + 3.4e38}, CONFIG)
    assert store.info("a") == info


def test_a_running_batch_keeps_its_bytes_and_the_next_use_brings_the_new_ones() -> None:
    store, updater = make_updater(2)
    add(store, "a", per_expert(0))
    for seed in (1, 2, 3):
        updater.update("a", moved(per_expert(seed)), CONFIG)
    with store.use(["a"]) as first:
        assert store.info("a").slot == first["a"]
        before = slot_bytes(store, "a")
        old = store.bank._space.regions[first["a"]]
        info = updater.update("a", moved(per_expert(4)), CONFIG)
        assert info.slot is None
        with store.use(["a"]) as second:
            assert second["a"] != first["a"]
            assert torch.equal(slot_bytes(store, "a"), packed_bytes(per_expert(4), torch.bfloat16))
            assert store.bank._space.regions[first["a"]] == old
            assert old is not None
            begin, end = (store.bank._space.element(u) for u in (old[0], sum(old)))
            assert torch.equal(store.bank._space.arena.data[begin:end].cpu(), before)
    fresh = AdapterStore(new_bank(torch.bfloat16)).add(
        "a", bound(make_source(per_expert(4), CONFIG), None)
    )
    assert info.checksum == fresh.checksum


def test_an_arena_that_holds_one_version_is_enough() -> None:
    size = make_updater()[0].add("a", bound(make_source(per_expert(0), CONFIG), None)).num_bytes
    store, updater = make_updater(1, arena_bytes=size)
    add(store, "a", per_expert(0))
    with store.use(["a"]):
        pass
    for seed in range(1, 5):
        updater.update("a", moved(per_expert(seed)), CONFIG)
        assert torch.equal(slot_bytes(store, "a"), packed_bytes(per_expert(seed), torch.bfloat16))


def test_what_the_current_stream_still_writes_is_waited_for() -> None:
    store, updater = make_updater()
    add(store, "a", per_projection(0))
    with store.use(["a"]):
        pass
    tensors = moved(per_projection(1))
    for _ in range(3):
        updater.update("a", tensors, CONFIG)
    wanted = per_projection(2)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
        for name, tensor in tensors.items():
            tensor.copy_(wanted[name], non_blocking=True)
        updater.update("a", tensors, CONFIG)
        for tensor in tensors.values():
            tensor.fill_(7)  # the caller's again
    assert torch.equal(slot_bytes(store, "a"), packed_bytes(wanted, torch.bfloat16))


def test_two_hundred_updates_leak_nothing_and_a_checksum_is_there_when_asked_for() -> None:
    store, updater = make_updater()
    add(store, "a", per_expert(0))
    with store.use(["a"]):
        pass
    given = [moved(per_expert(seed)) for seed in (1, 2)]
    seen, checksums = [], set()
    for turn in range(200):
        info = updater.update("a", given[turn % 2], CONFIG)
        if turn % 10 < 2:
            checksums.add(info.checksum)
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert seen[-1] == seen[20], "device memory grew"
    assert len(checksums) == 2
    assert store.bank.memory.used == store.info("a").num_bytes


def test_an_update_from_the_host_by_a_plan_is_served_too() -> None:
    store, updater = make_updater()
    add(store, "a", per_expert(0))
    with store.use(["a"]):
        pass
    for seed in range(1, 5):
        updater.update("a", per_expert(seed), CONFIG)
        assert torch.equal(slot_bytes(store, "a"), packed_bytes(per_expert(seed), torch.bfloat16))


def test_sites_are_known_as_used_after_an_update() -> None:
    store, updater = make_updater()
    add(store, "a", per_expert(0))
    with store.use(["a"]):
        pass
    for seed in (1, 2, 3):
        updater.update("a", moved(per_expert(seed)), CONFIG)
    assert all(store.bank.site_table(site.name).ever_used for site in SITES)


def test_regions_move_while_earlier_batches_still_run_and_all_rows_keep_their_bits() -> None:
    ranks = {"a": 8, "b": 16, "c": 8, "d": 16}
    adapters = {name: adapter_of(i, rank=rank) for i, (name, rank) in enumerate(ranks.items())}
    size = make_store().add("a", adapters["a"]).num_bytes
    model = Model(make_store(num_slots=6, arena_bytes=6 * size))
    store, inputs = model.store, batch(16)
    expected: dict[str, torch.Tensor] = {}
    for turn in range(20):
        by_layer = bool(turn % 2)
        for name, adapter in adapters.items():  # they fill the arena in their order
            store.add(name, adapter)
            expected.setdefault(name, run(model, inputs, name, by_layer=False))
            run(model, inputs, name, by_layer)
        for name in ("b", "d"):
            store.pin(name)
        torch.cuda._sleep(BUSY // 20)
        found = [(name, run(model, inputs, name, by_layer)) for name in ("d", "b", "d")]
        for name in ("a", "c"):  # two gaps around b
            store.remove(name)
        start = region_start(store, "b")
        store.add("large", adapter_of(9, rank=16))
        run(model, inputs, "large", by_layer)
        assert region_start(store, "b") < start, "nothing was moved"
        found += [(name, run(model, inputs, name, by_layer)) for name in ("b", "d")]
        torch.cuda.synchronize()
        for name, out in found:
            assert_bit_equal(out, expected[name], f"{name}, turn {turn}")
        for name in ("b", "d"):
            slot = store.info(name).slot
            assert slot is not None, f"{name} has left its slot"
            assert_holds(store, slot, adapters[name])
        for info in store.infos():
            store.remove(info.name)


def region_start(store: AdapterStore, name: str) -> int:
    slot = store.info(name).slot
    assert slot is not None
    region = bank_of(store)._space.regions[slot]
    assert region is not None
    return region[0]


def test_others_go_on_while_an_update_waits_for_a_batch_that_still_runs() -> None:
    store, updater = make_updater(3)
    for i, name in enumerate(("a", "other")):
        add(store, name, per_expert(i))
    for seed in (2, 3, 4):
        updater.update("a", moved(per_expert(seed)), CONFIG)
    with store.use(["a", "other"]):
        pass
    store.freeze()  # an arena that grows waits for the GPU, and so does new page-locked memory
    add(store, "new", per_expert(6))
    store.remove("new")
    tensors = moved(per_expert(5))
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy), store.use(["other"]):
        torch.cuda._sleep(20 * BUSY)  # a batch on another stream, which ended on the host
    running = threading.Thread(target=lambda: updater.update("a", tensors, CONFIG))
    running.start()
    with torch.cuda.stream(torch.cuda.Stream()):
        while not store._filling and running.is_alive():
            pass
        assert store.info("other").slot is not None
        with store.use(["other"]):
            pass
        add(store, "new", per_expert(6))
        assert running.is_alive() and not busy.query(), "the others waited for the update"
    running.join()
    assert busy.query()
    assert torch.equal(slot_bytes(store, "a"), packed_bytes(per_expert(5), torch.bfloat16))


def test_staging_without_device_memory_says_what_it_takes_and_changes_nothing() -> None:
    store, updater = make_updater(2)
    add(store, "a", per_expert(0))
    for seed in (1, 2, 3):
        updater.update("a", moved(per_expert(seed)), CONFIG)
    tensors = moved(per_expert(4))
    with store.use(["a"]):  # so that the next version is packed beside the arena
        before = store.info("a")
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(used)
        try:
            kept = []
            while True:  # what the allocator still has
                kept.append(torch.empty(1 << 9, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
        try:
            with pytest.raises(AdapterError, match=r"'a' needs [\d,]+ bytes on cuda.* are free"):
                updater.update("a", tensors, CONFIG)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            kept.clear()
        assert store.info("a") == before
    updater.update("a", tensors, CONFIG)
    with store.use(["a"]):
        pass
    assert torch.equal(slot_bytes(store, "a"), packed_bytes(per_expert(4), torch.bfloat16))
