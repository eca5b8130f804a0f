"""``bench load``: from a file in the page cache to the host store, and on into slots.

Each part is compared with the bare movement of the same bytes on the same machine, in the same run.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from moegraft.adapters import (
    AdapterBank,
    AdapterSource,
    AdapterStore,
    BoundAdapter,
    ReadOptions,
    bind,
    check_bound,
    make_source,
    read_adapter,
)
from moegraft.adapters.config import AdapterConfig
from moegraft.adapters.file_policy import DEFAULT_POLICY
from moegraft.adapters.keys import parse_keys
from moegraft.adapters.read import WEIGHTS_FILE
from moegraft.adapters.tensor_file import reading
from moegraft.bench import records
from moegraft.bench.load_case import LoadCase
from moegraft.errors import MoegraftError
from moegraft.factors import PackedAdapter
from moegraft.gc_pause import gc_paused
from moegraft.host_copy import usable_cores
from moegraft.packing import pack_adapter

Say = Callable[[str], None]


@dataclass(frozen=True)
class LoadOptions:
    """What to measure.

    Attributes:
        case: sizes of the model and the large adapter.
        adapters: how many small ones are added.
        repeats: runs of each part; the fastest counts, for other processes only ever add.
        folder: where the file is made, in a temporary folder; None = the system's place.
        commit: written to the records; None = asked from git.
    """

    case: LoadCase = field(default_factory=LoadCase)
    adapters: int = 200
    repeats: int = 5
    folder: Path | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise MoegraftError(f"--repeats must be at least 1, got {self.repeats}.")
        if self.adapters < 40:
            raise MoegraftError(
                f"--adapters must be at least 40, got {self.adapters}: the first 20 are compared "
                "with the last 20."
            )


def run_load(options: LoadOptions, say: Say = lambda text: None) -> Iterator[records.Record]:
    """Measure every part that this machine can; yields a record for each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = {
        **records.header(records.LOAD, options.commit),
        "case": asdict(options.case),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "repeats": options.repeats,
    }
    say("Writing the adapter")
    try:
        folder = tempfile.TemporaryDirectory(dir=options.folder)
    except OSError as error:
        raise MoegraftError(f"There is no room for the adapter: {error}.") from error
    from moegraft.bench.load_phases import phases

    with folder as name:
        bench = LoadBench(options, device, options.case.write(Path(name) / "adapter"))
        parts = [bench.files, lambda: phases(bench), bench.small]
        if device.type == "cuda":
            from moegraft.bench.load_gpu import to_slots, updates

            parts += [lambda: to_slots(bench), lambda: updates(bench)]
        for part in parts:
            for found in part():
                record = {**head, **found}
                say(load_line(record))
                yield record


def load_line(record: records.Record) -> str:
    """Return one part in one line."""
    text = f"{record['part']}: {record['seconds']:.4f} s"
    if "gb_s" in record:
        text += f", {record['gb_s']:.2f} GB/s"
    if "ratio" in record:
        text += f", {record['ratio']:.2f} x {record['compared_with']}"
    if "bar" in record:
        sign = "<=" if record["bar_is"] == "at most" else ">="
        text += f" (bar {sign} {record['bar']:g}: {'met' if record['met'] else 'MISSED'})"
    return text


class LoadBench:
    """The parts for every machine, and what they share.

    Args:
        options: what to measure.
        device: where the bank is.
        folder: the large adapter.
    """

    def __init__(self, options: LoadOptions, device: torch.device, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.spec = options.case.spec
        self.file = folder / WEIGHTS_FILE
        self.num_bytes = self.file.stat().st_size
        self.bank = AdapterBank(
            self.spec.sites,
            num_slots=4,
            max_rank=options.case.rank,
            dtype=torch.bfloat16,
            device=device,
        )
        self.store = AdapterStore(self.bank)

    def files(self) -> Iterator[records.Record]:
        """From the page cache to host memory: the bare read, a load without checks, a load."""
        runs: dict[str, list[_Spent]] = {"read": [], "read again": [], "unchecked": [], "load": []}
        for _ in range(self.options.repeats + 1):  # the first one warms up
            runs["read"].append(_spent(self._read))
            runs["read again"].append(self._read_again())
            runs["unchecked"].append(_spent(self.packed))
            runs["load"].append(_spent(self.load))
        fastest = {part: min(found[1:]) for part, found in runs.items()}
        cpu = {part: min(run.cpu for run in found[1:]) for part, found in runs.items()}
        read = fastest["read"].seconds
        for part, bar in (("read", None), ("read again", None), ("unchecked", 2.0), ("load", 3.0)):
            seconds = fastest[part].seconds
            yield {
                "part": part,
                "seconds": seconds,
                "all_seconds": [run.seconds for run in runs[part][1:]],
                "cpu_seconds": cpu[part],
                "cpu_ratio": cpu[part] / cpu["read"],
                "gb_s": self.num_bytes / seconds / 1e9,
                **({} if bar is None else compared(seconds, read, "the read", bar)),
            }

    def load(self) -> None:
        """Load the large adapter as a graft does: bound in full, checked, with a checksum."""
        source = read_adapter(self.folder, pin_memory=self.bank.pins)
        bound = self.bind(source)
        if "large" in self.store:
            self.store.remove("large")
        self.store.add("large", bound, memory=source.memory)

    def bind(self, source: AdapterSource, options: ReadOptions | None = None) -> BoundAdapter:
        """Bind an adapter in full."""
        bound = bind(source, self.spec, options)
        check_bound(bound.report, self.spec)
        return bound

    def small(self) -> Iterator[records.Record]:
        """Add small adapters from memory; the time of each must not grow with their number."""
        config = self.options.case.config
        tensors = [self.options.case.small(seed) for seed in range(8)]
        seconds = []
        for i in range(self.options.adapters):
            start = time.perf_counter()
            source = make_source(tensors[i % len(tensors)], config)
            self.store.add(f"small-{i}", bind(source, self.spec))
            seconds.append(time.perf_counter() - start)
        first, last = statistics.median(seconds[:20]), statistics.median(seconds[-20:])
        for i in range(self.options.adapters):
            self.store.remove(f"small-{i}")
        yield {
            "part": "small adapters",
            "seconds": statistics.median(seconds),
            "adapters": self.options.adapters,
            "tensors": len(tensors[0]),
            **compared(last, first, "the first 20", 1.25),
        }

    def _memory(self) -> torch.Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self.bank.pins)

    def _read(self) -> None:
        """Get memory and read the file into it once; large blocks begin at a page."""
        self._fill(self._memory())

    def _read_again(self) -> _Spent:
        """Return what a read into memory that is in use already takes."""
        memory = self._memory()
        self._fill(memory)
        return _spent(lambda: self._fill(memory))

    def _fill(self, memory: torch.Tensor) -> None:
        with self.file.open("rb", buffering=0) as file:
            view = memory.numpy().data
            done = 0
            while done < self.num_bytes:
                done += file.readinto(view[done:])

    @gc_paused()
    def packed(self) -> PackedAdapter:
        """Load the large adapter without a look at its values, and without a checksum."""
        with reading(self.file, DEFAULT_POLICY, self.bank.pins) as file:
            keys = parse_keys(file.tensors)
        config = AdapterConfig.parse(self.options.case.config)
        source = AdapterSource(file.tensors, keys, config, "bench", file.memory)
        bound = self.bind(source)
        bank = self.bank
        return pack_adapter(bound.factors, bank.layout, bank.dtype, bank.pins, source.memory)


class _Spent(NamedTuple):
    """What a run took: by the clock, and of all threads together."""

    seconds: float
    cpu: float


def _spent(run: Callable[[], object]) -> _Spent:
    """Run it, with the garbage of before out of the way; what it returns is dropped."""
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    result = run()
    found = _Spent(time.perf_counter() - start, time.process_time() - cpu)
    del result
    return found


def compared(seconds: float, base: float, name: str, bar: float) -> records.Record:
    """Return a record's part for "at most ``bar`` times as long as ``base``"."""
    ratio = seconds / base
    return {
        "ratio": ratio,
        "compared_with": name,
        "bar": bar,
        "bar_is": "at most",
        "met": ratio <= bar,
    }
