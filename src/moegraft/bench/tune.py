"""``tune``: find the tiles of the fused decode kernels for this GPU; all are checked before timed.

For every (shape, tokens, rank) it starts from the tiles that the backend would choose and changes
one field at a time as long as that helps. What counts is the geometric mean of base and LoRA time:
one configuration serves both.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.tiles import candidates, choose_config, config_ok
from moegraft.bench import records
from moegraft.bench.cases import DecodeCase, Inputs, make_case
from moegraft.bench.harness import Timer, l2_bytes
from moegraft.bench.layer_runs import (
    CheckedRun,
    Expected,
    LayerRun,
    WrongResultError,
    is_refusal,
)
from moegraft.bench.made import Made
from moegraft.bench.options import DecodeRequest
from moegraft.call import LayerCall
from moegraft.errors import MoegraftError
from moegraft.problem import Problem
from moegraft.types import TokenSlots

Config = TypeVar("Config")
Say = Callable[[str], None]
#: Values of each field, in order; the search goes one step up or down.
GEMM_STEPS: dict[str, tuple[Any, ...]] = {
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (32, 64, 128, 256),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 4, 5, 6),
    "swap": (False, True),
}
LAYER_STEPS: dict[str, tuple[Any, ...]] = {
    "block_m": (16, 32, 64, 128),
    "delta_programs": (132, 264, 528, 1056),
    "gate_up_splits": (1, 2, 4),
    "down_splits": (1, 2, 4),
    "merged": (False, True),
}
#: The gain below which a change is noise.
MIN_GAIN = 0.005


@dataclass(frozen=True)
class Cost:
    """Microseconds of one layer call."""

    base_us: float
    lora_us: float

    @property
    def mean(self) -> float:
        """What is minimised."""
        return math.sqrt(self.base_us * self.lora_us)


def neighbours(config: FusedConfig) -> Iterator[FusedConfig]:
    """Yield configurations that differ in one field by one step, GEMMs first."""
    for part in ("gate_up", "down", "delta"):
        for changed in _steps(getattr(config, part), GEMM_STEPS):
            yield dataclasses.replace(config, **{part: changed})
    yield from _steps(config, LAYER_STEPS)


def _steps(config: Config, table: dict[str, tuple[Any, ...]]) -> Iterator[Config]:
    for name, values in table.items():
        now = getattr(config, name, None)
        if now not in values:
            continue
        at = values.index(now)
        for value in (*values[at + 1 : at + 2], *values[max(at - 1, 0) : at]):
            yield dataclasses.replace(config, **{name: value})  # type: ignore[type-var]


def descend(
    start: Config,
    near: Callable[[Config], Iterable[Config]],
    cost: Callable[[Config], Cost | None],
    seconds: float,
) -> tuple[Config, Cost]:
    """Go to the best configuration in reach, for about this long.

    Args:
        start: must have a cost.
        near: the changes to try, in order; the first that helps is taken.
        cost: None = it can't run, or is wrong.
        seconds: after which no further change is tried.

    Raises:
        MoegraftError: ``start`` has no cost.
    """
    found = cost(start)
    if found is None:
        raise MoegraftError(f"The tiles to start from can't run: {start}.")
    best, seen, end = start, {start}, time.monotonic() + seconds
    improved = True
    while improved:
        improved = False
        for candidate in near(best):
            if candidate in seen or time.monotonic() > end:
                continue
            seen.add(candidate)
            new = cost(candidate)
            if new is not None and new.mean < found.mean * (1 - MIN_GAIN):
                best, found, improved = candidate, new, True
                break
    return best, found


def run_tune(
    requests: Sequence[DecodeRequest],
    device: torch.device,
    *,
    seconds: float = 60.0,
    wide: bool = False,
    repeats: int = 20,
    commit: str | None = None,
    say: Say = lambda text: None,
) -> Iterator[records.Record]:
    """Tune requests one by one; yields a record for each, with the time before and after.

    Args:
        requests: what to tune for; modes and kinds play no part.
        device: the GPU.
        seconds: search per request, about.
        wide: also try everything that the backend proposes, not only steps from what is best.
        repeats: replays of which the median counts.
        commit: written to the records; None = asked from git.
        say: told what runs.
    """
    head = records.header(records.TUNE, commit)
    timer, made = Timer(device, repeats), Made(device)
    for request in requests:
        weights, table = made.get(request)
        case = make_case(request, weights, table, l2_bytes(device))
        problem = Problem.of(weights, request.tokens, request.shape.top_k, request.rank)
        start = start_config(problem)
        tried: dict[FusedConfig, Cost | None] = {}
        measured = Measured(case, timer, tried, say)
        near = partial(_allowed_near, problem=problem, wide=wide)
        best, after = descend(start, near, measured, seconds)
        before = tried[start]
        assert before is not None
        wrong = measured.wrong
        del case, weights, table, measured  # so that the next ones find their memory free
        yield {
            **head,
            "model": request.shape.name,
            "problem": dataclasses.asdict(problem),
            "tried": len(tried),
            "wrong": wrong,
            "before": {"config": dataclasses.asdict(start), **dataclasses.asdict(before)},
            "after": {"config": dataclasses.asdict(best), **dataclasses.asdict(after)},
        }


class Measured:
    """Checks and times configurations of one case; remembers what it tried."""

    def __init__(
        self,
        case: DecodeCase,
        timer: Timer,
        tried: dict[FusedConfig, Cost | None],
        say: Say,
        run_of: Callable[[DecodeCase, FusedConfig, bool], LayerRun] | None = None,
    ) -> None:
        self._case = case
        self._timer = timer
        self._tried = tried
        self._say = say
        self._run_of = run_of or config_run
        self._expected = Expected(case)
        self.wrong: list[str] = []

    def __call__(self, config: FusedConfig) -> Cost | None:
        """Return its cost; None when it can't be compiled, launched, or is wrong."""
        self._say(f"{self._case.request.title()}: {len(self._tried)} tried")
        self._tried[config] = None
        parts = len(self._case.sets)
        try:
            lora = CheckedRun(self._run_of(self._case, config, True), self._expected, self._timer)
            base = self._timer.capture(self._run_of(self._case, config, False))
        except WrongResultError as error:
            self.wrong.append(f"{config}: {error}")
            return None
        except Exception as error:
            if not is_refusal(error):
                raise
            return None
        found = Cost(
            self._timer.measure(base, parts).median * 1e6,
            self._timer.measure(lora.replay, parts).median * 1e6,
        )
        self._tried[config] = found
        return found


def config_run(case: DecodeCase, config: FusedConfig, lora: bool) -> LayerRun:
    """Return the fused layer with exactly these tiles as a run."""
    from moegraft.backends.triton.fused import run_layer

    def function(inputs: Inputs, slots: TokenSlots | None) -> torch.Tensor:
        call = LayerCall(
            inputs.x, inputs.topk_ids, inputs.topk_weights, case.weights, case.table, slots
        )
        return run_layer(call, config)

    return LayerRun(case, function, "tiles", str(config), lora)


def start_config(problem: Problem) -> FusedConfig:
    """Return the tiles that the backend would choose, as its default mode runs them."""
    facts = device_facts()
    config, _ = choose_config(problem, facts)
    return config.overlapping(facts.has_dependent_launch)


def _allowed_near(config: FusedConfig, problem: Problem, wide: bool) -> Iterator[FusedConfig]:
    """Yield what fits the device: neighbours, then with ``wide`` all that the backend proposes."""
    facts = device_facts()
    for near in neighbours(config):
        if near == near.overlapping(near.pdl) and config_ok(near, problem, facts):
            yield near
    for proposed in candidates(problem, facts) if wide else ():
        yield proposed.overlapping(config.pdl)
