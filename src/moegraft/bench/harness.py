"""Timing by graph replay, and the limits of the machine as measured in the same run."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from moegraft.errors import MoegraftError

Run = Callable[[], None]
#: A moment: on a GPU an event of its stream, on a CPU seconds of its clock.
Mark: TypeAlias = "torch.cuda.Event | float"
#: Inputs are rotated so that this many times the L2 passes between two uses of the same bytes.
L2_TIMES = 4
#: Replays ahead of those that are timed.
_WARMUP = 10
_WARMUP_TURNS = 3
#: Tiles of the read kernel that are tried: elements per step, steps, warps.
_READ_TILES = ((4096, 16, 8), (4096, 8, 8), (2048, 16, 4), (8192, 8, 8))


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median of many, and where 80 % of them lie."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: list[float], parts: int = 1) -> Timing:
        """Summarise runs that each did ``parts`` equal parts; seconds per part."""
        ordered = sorted(second / parts for second in seconds)
        last = len(ordered) - 1
        return Timing(ordered[len(ordered) // 2], ordered[last // 10], ordered[last - last // 10])

    def record(self) -> dict[str, float]:
        """Return it for a record, in microseconds."""
        return {"us": self.median * 1e6, "us_low": self.low * 1e6, "us_high": self.high * 1e6}


@dataclass(frozen=True)
class MachineLimits:
    """What this device reached in this run.

    Attributes:
        read: bytes per second of the best pure read.
        copy: bytes read plus written per second of the best copy.
        dense: multiply-adds, counted as two, per second of the best dense bf16 product.
        l2_bytes: size of the L2.
        dense_fp8: as ``dense``, of FP8 products; None = not measured, or torch has none here.
    """

    read: float
    copy: float
    dense: float
    l2_bytes: int
    dense_fp8: float | None = None

    def seconds(self, num_bytes: float, flops: float = 0.0, fp8_flops: float = 0.0) -> float:
        """Return the least time for moving these bytes and doing this arithmetic."""
        arithmetic = flops / self.dense + fp8_flops / max(self.dense_fp8 or 0.0, self.dense)
        return max(num_bytes / self.read, arithmetic)

    def record(self) -> dict[str, float]:
        """Return them for a record."""
        return {
            "read_gb_s": self.read / 1e9,
            "copy_gb_s": self.copy / 1e9,
            "dense_tflops": self.dense / 1e12,
            "l2_mb": self.l2_bytes / 1e6,
            **({} if self.dense_fp8 is None else {"dense_fp8_tflops": self.dense_fp8 / 1e12}),
        }


def require_gpu() -> torch.device:
    """Return the current CUDA device; MoegraftError when there is none."""
    if not torch.cuda.is_available():
        raise MoegraftError(
            "There is no GPU here: torch sees no CUDA device, and these measurements need one. "
            "`moegraft doctor` says what torch sees."
        )
    return torch.device("cuda", torch.cuda.current_device())


def l2_bytes(device: torch.device) -> int:
    """Return the size of a device's L2; of a CPU, 0."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


class Timer:
    """Times what runs on one device; on a CPU without graphs, for tests of the measurements.

    Args:
        device: where.
        repeats: runs of which the median counts.
    """

    def __init__(self, device: torch.device, repeats: int = 50) -> None:
        self.device = device
        self.repeats = repeats

    def capture(self, run: Run) -> Run:
        """Run once to warm up, capture a graph, and return what replays it."""
        if self.device.type != "cuda":
            run()
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # graphs of earlier cases may not be freed during a capture
        try:
            with torch.cuda.graph(graph):
                run()
        finally:
            gc.enable()
        replay: Run = graph.replay
        return replay

    def measure(self, replay: Run, parts: int = 1) -> Timing:
        """Time replays that follow one another without a pause.

        Launching runs ahead of the device, so the cost of a launch shows only where the device
        would wait for it too.
        """
        for _ in range(_WARMUP):
            replay()
        if self.device.type != "cuda":
            seconds = []
            for _ in range(self.repeats):
                start = time.perf_counter()
                replay()
                seconds.append(time.perf_counter() - start)
            return Timing.of(seconds, parts)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats + 1)]
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        torch.cuda.synchronize()
        pairs = itertools.pairwise(events)
        return Timing.of([a.elapsed_time(b) * 1e-3 for a, b in pairs], parts)

    def measure_in_turns(self, replays: Mapping[str, Run], parts: int = 1) -> dict[str, Timing]:
        """Time several replays one after the other, over and over.

        Long arithmetic makes a GPU change its clocks; in turns all replays see the same ones, so
        that their ratios hold.
        """
        for _ in range(_WARMUP_TURNS):
            for replay in replays.values():
                replay()
        marks: dict[str, list[tuple[Mark, Mark]]] = {name: [] for name in replays}
        for _ in range(self.repeats):
            for name, replay in replays.items():
                before = self._mark()
                replay()
                marks[name].append((before, self._mark()))
        return {
            name: Timing.of([_seconds_between(*pair) for pair in pairs], parts)
            for name, pairs in marks.items()
        }

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measure_cold(self, replay: Run) -> Timing:
        """Time replays that each find the L2 full of other bytes."""
        size = max(L2_TIMES * l2_bytes(self.device), 1 << 20)
        other = torch.empty(size, dtype=torch.uint8, device=self.device)
        seconds, marks = [], []
        for turn in range(self.repeats):
            other.fill_(turn % 100)
            if self.device.type != "cuda":
                start = time.perf_counter()
                replay()
                seconds.append(time.perf_counter() - start)
                continue
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            replay()
            after.record()
            marks.append((before, after))
        if marks:
            torch.cuda.synchronize()
            seconds = [a.elapsed_time(b) * 1e-3 for a, b in marks]
        return Timing.of(seconds)

    def seconds(self, run: Run) -> float:
        """Capture and time in one go."""
        return self.measure(self.capture(run)).median


def _seconds_between(before: Mark, after: Mark) -> float:
    if isinstance(before, float) or isinstance(after, float):
        assert isinstance(before, float) and isinstance(after, float)
        return after - before
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e-3


def measure_limits(device: torch.device, fp8: bool = False) -> MachineLimits:
    """Measure read, copy and dense rates: over 4 GiB on a GPU, over little on a CPU.

    Args:
        device: where.
        fp8: also the rate of FP8 products.
    """
    timer = Timer(device, repeats=10)
    gpu = device.type == "cuda"
    read, copy = _memory_rates(timer, 1 << (30 if gpu else 20))
    sizes = (4096, 8192, 16384) if gpu else (128,)
    dense = max(_dense_rate(timer, size) for size in sizes)
    dense_fp8 = _dense_fp8_rate(timer, sizes) if fp8 else None
    return MachineLimits(read, copy, dense, l2_bytes(device), dense_fp8)


def _memory_rates(timer: Timer, elements: int) -> tuple[float, float]:
    """Return bytes per second read, and copied (read plus written), over int32 elements."""
    data = torch.randint(0, 1 << 30, (elements,), dtype=torch.int32, device=timer.device)
    source, target = data.chunk(2)

    # By a kernel: as a node of a graph, a plain copy may go to a slower copy engine.
    def run_copy() -> None:
        torch.bitwise_not(source, out=target)

    def run_sum() -> None:
        data.sum()

    gpu = timer.device.type == "cuda"
    read = _best_read(timer, data) if gpu else timer.seconds(run_sum)
    return 4 * elements / read, 4 * elements / timer.seconds(run_copy)


def _best_read(timer: Timer, data: torch.Tensor) -> float:
    from moegraft.bench.read_kernel import read_all

    best = float("inf")
    for block, turns, warps in _READ_TILES:
        programs = data.numel() // (block * turns)
        out = torch.empty(programs, dtype=torch.int32, device=data.device)

        def run(
            tile: tuple[int, int, int] = (block, turns, warps), out: torch.Tensor = out
        ) -> None:
            read_all(data, out, *tile)

        best = min(best, timer.seconds(run))
    return best


def _dense_rate(timer: Timer, size: int) -> float:
    """Return the rate of one square bf16 product."""
    a, b = (torch.randn(size, size, device=timer.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        torch.mm(a, b, out=out)

    return 2 * size**3 / timer.seconds(run)


def _dense_fp8_rate(timer: Timer, sizes: Sequence[int]) -> float | None:
    """Return the best rate of one square FP8 product; None where torch has none."""
    one, best = torch.ones((), device=timer.device), 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=timer.device) for _ in range(2))
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T

        def run(a: torch.Tensor = a8, b: torch.Tensor = b8) -> None:
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        try:
            best = max(best, 2 * size**3 / timer.seconds(run))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # no FP8 products on this device
            return None
    return best
