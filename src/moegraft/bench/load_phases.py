"""Where the time of a load goes: its steps one by one, each by the clock and the processors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from moegraft.adapters import AdapterSource
from moegraft.adapters.checksum import checksum_of
from moegraft.adapters.config import AdapterConfig
from moegraft.adapters.file_policy import DEFAULT_POLICY
from moegraft.adapters.finite import check_finite
from moegraft.adapters.header import read_header
from moegraft.adapters.keys import parse_keys
from moegraft.adapters.tensor_file import TensorFile, reading
from moegraft.bench import records
from moegraft.bench.load import LoadBench
from moegraft.factors import PackedAdapter
from moegraft.gc_pause import gc_paused
from moegraft.pack_in_place import own_spans
from moegraft.packing import pack_adapter, plan_adapter

T = TypeVar("T")


def phases(bench: LoadBench) -> Iterator[records.Record]:
    """Yield a record per step, the fastest of several runs; together they are a load."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(bench.options.repeats + 1):  # the first one warms up
        gc.collect()
        _Load(bench, found).run()
    total = sum(min(seconds for seconds, _ in runs[1:]) for runs in found.values())
    for name, runs in found.items():
        seconds = min(seconds for seconds, _ in runs[1:])
        yield {
            "part": f"phase: {name}",
            "seconds": seconds,
            "all_seconds": [seconds for seconds, _ in runs[1:]],
            "cpu_seconds": min(cpu for _, cpu in runs[1:]),
            "ratio": seconds / total,
            "compared_with": "all phases",
        }


class _Load:
    """One load in steps.

    Args:
        bench: the adapter and the bank.
        found: name of a step -> (seconds, processor seconds) of each run; added to.
    """

    def __init__(self, bench: LoadBench, found: dict[str, list[tuple[float, float]]]) -> None:
        self._bench = bench
        self._found = found

    @gc_paused()
    def run(self) -> PackedAdapter:
        """Do all steps; returns what the store would keep."""
        bank, layout = self._bench.bank, self._bench.bank.layout
        self._step("header", self._header)
        memory = self._step("memory", self._bench._memory)
        del memory  # what follows gets the same again, if torch keeps page-locked memory
        file = self._step("read and name", self._read)
        self._step("finite", lambda: check_finite(file.tensors, "bench", file.runs))
        keys = self._step("keys", lambda: parse_keys(file.tensors))
        config = AdapterConfig.parse(self._bench.options.case.config)
        source = AdapterSource(file.tensors, keys, config, "bench", file.memory)
        bound = self._step("bind", lambda: self._bench.bind(source))
        plan = self._step("places", lambda: plan_adapter(bound.factors, layout, bank.dtype))
        assert own_spans(plan, file.memory, bank.dtype) is not None, "its memory can't be kept"
        packed = self._step(
            "order",
            lambda: pack_adapter(bound.factors, layout, bank.dtype, bank.pins, file.memory),
        )
        self._step("checksum", lambda: checksum_of(packed, layout))
        return packed

    def _step(self, name: str, step: Callable[[], T]) -> T:
        start, cpu = time.perf_counter(), time.process_time()
        result = step()
        spent = time.perf_counter() - start, time.process_time() - cpu
        self._found.setdefault(name, []).append(spent)
        return result

    def _header(self) -> object:
        with self._bench.file.open("rb") as file:
            return read_header(file, self._bench.num_bytes, "bench", DEFAULT_POLICY)

    def _read(self) -> TensorFile:
        with reading(self._bench.file, DEFAULT_POLICY, self._bench.bank.pins) as file:
            return file
