"""What the tests of bank and store share: three sites, small banks, exact checks of a slot."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moegraft.adapters import (
    AdapterBank,
    AdapterSource,
    AdapterStore,
    BoundAdapter,
    ReadOptions,
)
from moegraft.adapters.bank import BankMemory
from moegraft.factors import UNIT_BYTES, PackedAdapter
from moegraft.packing import pack_adapter
from moegraft.sites import expert_site, linear_site
from moegraft.testing import assert_same_factors, bound_adapter
from moegraft.types import LoraFactor, SiteFactors
from start_threads import start_all

SITES = (
    expert_site("layers.0.experts", 4, 8, 6),
    linear_site("layers.0.q_proj", 8, 8),
    expert_site("layers.1.experts", 3, 8, 10),
)


def make_bank(
    num_slots: int = 3, max_rank: int = 16, arena_bytes: int | None = None
) -> AdapterBank:
    return AdapterBank(
        SITES, num_slots=num_slots, max_rank=max_rank, dtype=torch.float32, arena_bytes=arena_bytes
    )


def make_store(num_slots: int = 3, arena_bytes: int | None = None) -> AdapterStore:
    return AdapterStore(make_bank(num_slots, arena_bytes=arena_bytes))


def bank_of(store: AdapterStore) -> AdapterBank:
    return store._bank


def pack(bank: AdapterBank, adapter: BoundAdapter) -> PackedAdapter:
    return pack_adapter(adapter.factors, bank.layout, bank.dtype)


def assert_holds(bank: AdapterBank, slot: int, adapter: BoundAdapter | None) -> None:
    """Every site of the bank holds the adapter's very values in this slot, or nothing."""
    for site in SITES:
        found = bank.site_table(site.name).factors(slot)
        if adapter is None or site.name not in adapter.factors:
            assert found is None, f"slot {slot} holds factors for {site.name}"
        else:
            assert_same_factors(found, adapter.factors[site.name], site)


def state_of(bank: AdapterBank) -> tuple[BankMemory, torch.Tensor, torch.Tensor]:
    arena = bank.site_table(SITES[0].name).arena.data
    return bank.memory, bank.table.clone(), arena.clone()


def assert_state(bank: AdapterBank, before: tuple[BankMemory, torch.Tensor, torch.Tensor]) -> None:
    memory, table, arena = state_of(bank)
    assert memory == before[0]
    assert torch.equal(table, before[1])
    assert torch.equal(arena, before[2])


def assert_nothing_left(store: AdapterStore) -> None:
    """Remove everything; the bank must be as empty as a new one."""
    for info in store.infos():
        store.remove(info.name)
    bank = bank_of(store)
    assert len(store) == 0
    assert bank.memory.used == 0
    assert bank.memory.largest_free == bank.memory.arena
    for slot in range(bank.num_slots):
        assert_holds(bank, slot, None)


def assert_sound(store: AdapterStore, slots_in_use: int | None = None) -> None:
    """Regions don't overlap, free + used = capacity, every slot and region has the one owner."""
    bank = bank_of(store)
    held = store._residency.slots
    space = bank._space
    regions = {slot: region for slot, region in enumerate(space.regions) if region is not None}
    ranges = sorted([(s, s + n) for s, n in regions.values() if n] + space.free._free)
    for (_, end), (start, _) in itertools.pairwise(ranges):
        assert end <= start, f"ranges overlap: {ranges}"
    assert sum(end - start for start, end in ranges) == space.free.capacity, "orphan bytes"
    for slot, entry in enumerate(held):
        assert (entry is None) == (slot not in regions), f"slot {slot} has no owner or no region"
        if entry is not None:
            assert entry.slot == slot and regions[slot][1] * UNIT_BYTES == entry.packed.num_bytes
            assert entry.users >= 0
            assert not entry.retired or entry.users, f"slot {slot} is held by nobody"
    for entry in store._entries.values():
        assert entry.slot is None or held[entry.slot] is entry, f"{entry.name} is not in its slot"
        assert not entry.retired
    assert bank.memory.used == sum(e.packed.num_bytes for e in held if e is not None)
    if slots_in_use is not None:
        assert len(regions) == slots_in_use


@contextmanager
def failing_copy(step: int, after: bool = False, bank: AdapterBank | None = None) -> Iterator[None]:
    """Within the block the copy number ``step`` raises, before or after it has copied.

    ``bank``: only copies into its memory count.
    """
    real, seen = torch.Tensor.copy_, itertools.count()

    def counts(target: torch.Tensor) -> bool:
        if bank is None:
            return True
        places = (bank.table, bank._ranks, bank._arena.data)
        return target.untyped_storage().data_ptr() in [
            p.untyped_storage().data_ptr() for p in places
        ]

    def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        fails = counts(self) and next(seen) == step
        if not fails or after:
            real(self, *args, **kwargs)
        if fails:
            raise RuntimeError("injected: a copy fails")
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        yield


def run_threads(work: Callable[[int], None], count: int = 8) -> None:
    """Run ``work(i)`` in threads that start together; raise the first error."""
    barrier, errors = threading.Barrier(count), []

    def run(i: int) -> None:
        barrier.wait(timeout=60)
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many interleavings as possible
    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    start_all(threads)
    for thread in threads:
        thread.join(timeout=60)
    sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def value_in(store: AdapterStore, slot: int) -> float:
    """The one value that all factors of a slot have, over all sites; fails on a mixture."""
    values = set()
    for site in SITES:
        factors = bank_of(store).site_table(site.name).factors(slot)
        assert factors is not None, f"slot {slot} is empty while it is in use"
        for f in factors.projections.values():
            values |= set(f.lora_A.unique().tolist()) | set(f.lora_B.unique().tolist())
    assert len(values) == 1, f"slot {slot} mixes adapters: {values}"
    return float(values.pop())


def tensors_of(adapter: BoundAdapter) -> dict[str, torch.Tensor]:
    """An adapter's factors under names that :func:`bind_as_named` reads."""
    return {
        f"{site}.{name}.{leaf}": getattr(factor, leaf)
        for site, found in adapter.factors.items()
        for name, factor in found.projections.items()
        for leaf in ("lora_A", "lora_B")
    }


def bind_as_named(source: AdapterSource, options: ReadOptions | None = None) -> BoundAdapter:
    """Bind what :func:`tensors_of` returns, all scales 1; equal copies stay as they are."""
    factors: dict[str, dict[str, LoraFactor]] = {}
    for name in source.tensors:
        path, _, leaf = name.rpartition(".")
        site, _, projection = path.rpartition(".")
        if leaf == "lora_A":
            pair = source.tensors[name], source.tensors[f"{path}.lora_B"]
            factors.setdefault(site, {})[projection] = LoraFactor(*pair, 1.0)
    return bound_adapter({site: SiteFactors(found) for site, found in factors.items()})
