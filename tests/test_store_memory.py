"""Memory of the host: what is unloaded or replaced is freed, with its file and its threads."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moegraft.adapters import (
    AdapterBank,
    AdapterStore,
    bind,
    check_bound,
    make_source,
    read_adapter,
)
from moegraft.bench.load_case import LoadCase
from moegraft.errors import AdapterError

CASE = LoadCase(layers=2, experts=12, hidden=32, intermediate=16, rank=4)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


def _load(store: AdapterStore, name: str, folder: Path, own: bool) -> StorageWeakRef:
    """Load a file, in its own memory or in a copy; return what tells that the memory is free."""
    source = read_adapter(folder)
    assert source.memory is not None
    bound = bind(source, CASE.spec)
    check_bound(bound.report, CASE.spec)
    store.add(name, bound, memory=source.memory if own else None)
    return StorageWeakRef(source.memory.untyped_storage())


@pytest.mark.parametrize("own", [True, False], ids=["own memory", "copied"])
def test_a_hundred_loads_and_unloads_of_a_file_free_all_of_its_memory(
    tmp_path: Path, own: bool
) -> None:
    folder = CASE.write(tmp_path / "adapter")
    bank = AdapterBank(CASE.spec.sites, num_slots=2, max_rank=4, dtype=torch.bfloat16)
    store = AdapterStore(bank)
    _load(store, "first", folder, own)
    store.remove("first")
    gc.collect()
    before = (_open_files(), threading.active_count())
    memories = []
    for turn in range(100):
        memories.append(_load(store, "policy", folder, own))
        assert memories[-1].expired() != own, "an adapter that was copied keeps its file's memory"
        with store.use(["policy"]):
            if turn % 3 == 0:  # removed while a batch runs it
                store.remove("policy")
                assert memories[-1].expired() != own
        if turn % 3 == 1:
            store.remove("policy")
        alive = [not memory.expired() for memory in memories]
        assert sum(alive) == int(own and turn % 3 == 2), f"turn {turn}: {alive.count(True)} alive"
    if "policy" in store:
        store.remove("policy")
    gc.collect()
    assert all(memory.expired() for memory in memories)
    assert (_open_files(), threading.active_count()) == before
    assert bank.memory.used == 0


def test_a_load_that_is_refused_frees_what_it_read(tmp_path: Path) -> None:
    folder = CASE.write(tmp_path / "adapter")
    bank = AdapterBank(CASE.spec.sites, num_slots=1, max_rank=2, dtype=torch.bfloat16)
    store = AdapterStore(bank)
    source = read_adapter(folder)
    assert source.memory is not None
    memory = StorageWeakRef(source.memory.untyped_storage())
    with pytest.raises(AdapterError, match="rank 4, over the bank's maximum of 2"):
        store.add("x", bind(source, CASE.spec), memory=source.memory)
    del source
    gc.collect()
    assert memory.expired() and len(store) == 0


def test_a_hundred_updates_keep_one_version_in_memory() -> None:
    bank = AdapterBank(CASE.spec.sites, num_slots=2, max_rank=4, dtype=torch.bfloat16)
    store = AdapterStore(bank)
    memories = []
    for turn in range(100):
        found = {
            f"model.layers.{i}.mlp.experts": CASE.stacked(10 * turn + i) for i in range(CASE.layers)
        }
        tensors = {
            f"{path}.{name}_proj.{leaf}.weight": tensor
            for path, projections in found.items()
            for name, pair in projections.items()
            for leaf, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
        }
        bound = bind(make_source(tensors, CASE.config), CASE.spec)
        check_bound(bound.report, CASE.spec)
        (store.update if turn else store.add)("policy", bound)
        memories.append(StorageWeakRef(store._entries["policy"].packed.data.untyped_storage()))
        with store.use(["policy"]):
            pass
    gc.collect()
    assert [memory.expired() for memory in memories] == [True] * 99 + [False]
    assert bank.memory.used == store.info("policy").num_bytes
