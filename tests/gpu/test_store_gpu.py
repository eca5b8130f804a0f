"""The store on a GPU: copies by layer on their own stream, updates under graph replay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from store_cases import (
    BUSY,
    EXPERTS,
    SITES,
    SPEC,
    TOP_K,
    Model,
    adapter_of,
    assert_holds,
    bank_of,
    batch,
    make_store,
    on_gpu,
    run,
)

from moegraft.adapters import bind, flat_tensors, make_source
from moegraft.errors import AdapterError
from moegraft.graphs import GraphRunner, layer_inputs
from moegraft.testing import assert_bit_equal
from moegraft.types import TokenSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def model() -> Iterator[Model]:
    yield Model(make_store())
    torch.cuda.synchronize()


def test_batches_that_wait_by_layer_give_the_same_bits_while_every_one_of_them_evicts() -> None:
    model = Model(make_store(num_slots=1))
    inputs = batch(16)
    names = [f"n{i}" for i in range(4)]
    for i, name in enumerate(names):
        model.store.add(name, adapter_of(i, rank=(8, 64, 32, 16)[i]))
    expected = {}
    for name in names:
        expected[name] = run(model, inputs, name, by_layer=False)
        torch.cuda.synchronize()
    found = []
    for turn in range(60):
        name = names[turn * 3 % 4]
        found.append((name, run(model, inputs, name, by_layer=True)))
    torch.cuda.synchronize()
    for name, out in found:
        assert_bit_equal(out, expected[name], name)


def test_a_batch_begins_before_the_factors_of_its_last_layer_have_arrived(model: Model) -> None:
    store, copies = model.store, bank_of(model.store).copies
    inputs = batch(16)
    store.add("a", adapter_of(0, rank=64))
    expected = run(model, inputs, "a", by_layer=False)
    store.add("a", adapter_of(0, rank=64))  # a new version, so that it is copied again
    torch.cuda.synchronize()
    begun, arrived = torch.cuda.Event(), torch.cuda.Event()
    real = store._bank.copies.start

    def slowly(region: torch.Tensor, packed: object) -> None:
        real(region, packed)  # type: ignore[arg-type]
        # The last site's copy seems to take long: what it waits for is moved behind a sleep.
        stream = copies._own_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY)
            arrived.record(stream)
        copies._arrived[SITES[-1].name] = arrived
        copies._last = (copies._last[0] + 1 if copies._last else 1, arrived)

    copies.start = slowly  # type: ignore[method-assign]
    with store.use(["a"], by_layer=True) as slot_of:
        slots = TokenSlots.of([slot_of["a"]] * 16, "cuda")
        first = model.layers[0]
        assert first.table is not None and first.table.has_delta(slots)
        first(inputs["x"], inputs["topk_ids"], inputs["topk_weights"], slots)
        begun.record()
        begun.synchronize()
        assert not arrived.query(), "the first layer waited for the last one's factors"
        out = model.step(inputs, slots).clone()
        end = torch.cuda.Event()
        end.record()
        assert not end.query(), "the last layer did not wait for its factors"
        end.synchronize()
        assert arrived.query()
    assert_bit_equal(out, expected)


def test_without_by_layer_the_stream_waits_for_all_copies_and_for_none_when_they_are_done(
    model: Model,
) -> None:
    store, copies = model.store, bank_of(model.store).copies
    store.add("a", adapter_of(1))
    store.add("b", adapter_of(2))
    with store.use(["a", "b"]):  # makes the arena and page-locked rows, which waits for the GPU
        pass
    store.add("b", adapter_of(2))  # a new version, so that it is copied again
    torch.cuda.synchronize()
    with torch.cuda.stream(copies._own_stream()):
        torch.cuda._sleep(BUSY)
    with store.use(["b"]):
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query(), "the stream did not wait for the copies"
        behind.synchronize()
        assert copies._idle()
    with torch.cuda.stream(copies._own_stream()):
        torch.cuda._sleep(BUSY)  # not a copy
    with store.use(["b"]):
        free = torch.cuda.Event()
        free.record()
        free.synchronize()
        assert not copies._own_stream().query(), "the stream waited though nothing was copied"
    torch.cuda.synchronize()


def test_an_update_is_seen_by_the_next_replay_and_nothing_is_captured_again(model: Model) -> None:
    store = model.store
    store.add("policy", adapter_of(0))
    store.add("other", adapter_of(7))
    runner = GraphRunner(
        model.step,
        layer_inputs(model.layers[0], TOP_K, torch.int32),
        [16],
        before_capture=store.freeze,
    )
    inputs = batch(16)
    with store.use(["policy", "other"]):
        runner.warmup()
    graphs = runner.num_graphs
    arena = bank_of(store).site_table(SITES[0].name).arena.data.data_ptr()
    base = None
    for seed in range(1, 8):
        adapter = adapter_of(seed, rank=(32, 8, 16)[seed % 3])
        info = store.update("policy", on_gpu(adapter) if seed % 2 else adapter)
        assert info.version == 2 + seed
        with store.use(["policy", "other"], by_layer=True) as slot_of:
            slots = TokenSlots.of([slot_of["policy"], -1, slot_of["other"], -1] * 4, "cuda")
            store.wait_for_copies()
            out = runner(inputs, slots)
            assert isinstance(out, torch.Tensor)
            out = out.clone()
            assert_bit_equal(out, model.step(inputs, slots), f"version {info.version}")
            assert_holds(store, slot_of["policy"], adapter)
        others = out[2::4], out[1::2]
        if base is not None:
            for now, before in zip(others, base, strict=True):
                assert_bit_equal(now, before, "rows of others")
        base = others
    assert runner.num_graphs == graphs
    assert bank_of(store).site_table(SITES[0].name).arena.data.data_ptr() == arena
    runner.drop()


def test_factors_on_the_gpu_are_stored_as_those_on_the_host_are_and_come_back_after_eviction() -> (
    None
):
    store = make_store(num_slots=1)
    adapter = adapter_of(3)
    wanted = store.add("host", adapter)
    store.add("gpu", adapter_of(4))
    with store.use(["gpu"]):
        pass
    info = store.update("gpu", on_gpu(adapter))
    assert info.checksum == wanted.checksum and info.num_bytes == wanted.num_bytes
    for name in ("gpu", "host", "gpu"):
        with store.use([name]) as slot_of:
            torch.cuda.synchronize()
            assert_holds(store, slot_of[name], adapter)


def test_single_experts_on_the_gpu_update_an_adapter() -> None:
    store = make_store()
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

    def tensors(seed: int, device: str) -> dict[str, torch.Tensor]:
        return {
            f"layers.{i}.mlp.experts.{e}.{names[p]}.{leaf}.weight": getattr(f, leaf)[e].to(device)
            for i, site in enumerate(SITES)
            for p, f in adapter_of(seed, 8).factors[site.name].projections.items()
            for e in range(EXPERTS)
            for leaf in ("lora_A", "lora_B")
        }

    config = {"r": 8, "lora_alpha": 8}
    store.add("a", bind(make_source(tensors(0, "cpu"), config), SPEC))
    with store.use(["a"]):
        pass
    on_host = store.add("b", bind(make_source(tensors(1, "cpu"), config), SPEC))
    info = store.update("a", bind(make_source(tensors(1, "cuda"), config), SPEC))
    assert info.checksum == on_host.checksum
    index, end = {}, 0
    for name, tensor in tensors(1, "cpu").items():
        index[name] = (end, tuple(tensor.shape))
        end += tensor.numel()
    flat = torch.cat([tensor.flatten() for tensor in tensors(1, "cuda").values()])
    views = flat_tensors(flat, index, flat.device)
    assert all(view.is_cuda for view in views.values())
    assert store.update("a", bind(make_source(views, config), SPEC)).checksum == on_host.checksum
    broken = tensors(2, "cuda")
    next(iter(broken.values()))[0, 0] = torch.nan
    with pytest.raises(AdapterError, match=r"1 NaN or infinite values.*layers\.0\.experts"):
        store.update("a", bind(make_source(broken, config), SPEC))
    assert store.info("a").checksum == on_host.checksum


def test_a_hundred_updates_from_the_gpu_leak_no_device_memory() -> None:
    store = make_store(num_slots=2, arena_bytes=8 << 20)
    adapters = [on_gpu(adapter_of(seed, rank=16)) for seed in range(2)]
    store.add("a", adapter_of(5, rank=16))
    with store.use(["a"]):
        pass
    seen = []
    for turn in range(100):
        store.update("a", adapters[turn % 2])
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert seen[-1] == seen[10], "device memory grew"
    store.remove("a")
    assert bank_of(store).memory.used == 0


def test_batches_on_two_streams_that_wait_by_layer_do_not_disturb_each_other() -> None:
    model = Model(make_store(num_slots=2))
    inputs = batch(16, seed=3)
    names = [f"s{i}" for i in range(4)]
    for i, name in enumerate(names):
        model.store.add(name, adapter_of(20 + i))
    expected = {}
    for name in names:
        expected[name] = run(model, inputs, name, by_layer=False)
        torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for turn in range(60):
        name = names[turn * 3 % 4]
        with torch.cuda.stream(streams[turn % 2]):
            found.append((name, run(model, inputs, name, by_layer=True)))
    torch.cuda.synchronize()
    for name, out in found:
        assert_bit_equal(out, expected[name], name)
