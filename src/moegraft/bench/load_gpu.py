"""The parts of ``bench load`` that need a GPU: into slots, and updates from tensors there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from moegraft.adapters import AdapterUpdater
from moegraft.bench import records
from moegraft.bench.load import LoadBench, compared


def to_slots(bench: LoadBench) -> Iterator[records.Record]:
    """From the host store into a slot, beside a bare copy of a page-locked buffer."""
    packed = bench.packed()
    bench.bank.reserve(3 * packed.num_bytes)
    repeats = bench.options.repeats
    bare = _seconds_of_copies([packed.data], bench.bank.device, repeats)
    seconds = _fastest(lambda: bench.bank.write(0, "large", packed), repeats)
    site = next(iter(packed.spans))

    def first_layer() -> None:
        bench.bank.write(0, "large", packed, wait=False)
        bench.bank.copies.wait_for(site)

    first = _fastest(first_layer, repeats)
    bench.bank.clear(0)
    yield {"part": "host to device", "seconds": bare, "gb_s": packed.num_bytes / bare / 1e9}
    yield {
        "part": "to a slot",
        "seconds": seconds,
        "gb_s": packed.num_bytes / seconds / 1e9,
        "ratio": bare / seconds,
        "compared_with": "host-to-device bandwidth",
        "bar": 0.6,
        "bar_is": "at least",
        "met": bare / seconds >= 0.6,
    }
    yield {
        "part": "first layer in a slot",
        "seconds": first,
        "ratio": first / seconds,
        "compared_with": "all layers",
    }


def updates(bench: LoadBench) -> Iterator[records.Record]:
    """Update a resident adapter from tensors on the GPU, beside bare copies of the same tensors."""
    stacked = bench.options.case.stacked_tensors(bench.bank.device)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stacked.values())
    repeats = bench.options.repeats
    flat = torch.cat([tensor.flatten() for tensor in stacked.values()])
    one = _seconds_of_copies([flat], bench.bank.device, repeats)
    del flat
    yield {"part": "one copy on the device", "seconds": one, "gb_s": num_bytes / one / 1e9}
    single = bench.options.case.single_experts(stacked)
    for part, tensors in (
        ("update from the device", stacked),
        ("update of single experts from the device", single),
    ):
        yield from _update(bench, part, tensors, one)


def _update(
    bench: LoadBench, part: str, tensors: dict[str, torch.Tensor], one: float
) -> Iterator[records.Record]:
    """Measure updates by a plan, until they are served; and until the host has them, too."""
    repeats, config, store = bench.options.repeats, bench.options.case.config, bench.store
    each = _seconds_of_copies(list(tensors.values()), bench.bank.device, repeats)
    updater = AdapterUpdater(store, bench.bind)
    with store.use(["large"]):
        pass
    start = time.perf_counter()
    updater.update("large", tensors, config)
    torch.cuda.synchronize()
    first = time.perf_counter() - start

    def update() -> None:
        updater.update("large", tensors, config)
        store.wait_for_copies()

    def update_and_read_back() -> None:
        _ = updater.update("large", tensors, config).checksum

    seconds = _fastest(update, repeats)
    with_checksum = _fastest(update_and_read_back, repeats)
    num_bytes = store.info("large").num_bytes
    yield {
        "part": part,
        "seconds": seconds,
        "gb_s": num_bytes / seconds / 1e9,
        "tensors": len(tensors),
        "times_one_copy": seconds / one,
        "seconds_of_copies": each,
        "seconds_of_the_first": first,
        "seconds_with_checksum_and_host_copy": with_checksum,
        **compared(seconds, each, "copies of the same tensors", 1.5),
    }


def _seconds_of_copies(
    sources: Sequence[torch.Tensor], device: torch.device, repeats: int
) -> float:
    """Return the seconds that bare copies of these tensors to a device take."""
    targets = [torch.empty_like(source, device=device) for source in sources]

    def copy_all() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    return _fastest(copy_all, repeats)


def _fastest(run: Callable[[], object], repeats: int) -> float:
    """Return the seconds until a call's work is done on the current stream, the fastest of several.

    What goes on beside it on other streams, such as copies to the host, is not waited for.
    """
    seconds = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.current_stream().synchronize()
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return min(seconds)
