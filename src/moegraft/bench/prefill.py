"""``bench prefill``: one MoE layer at prefill sizes, where arithmetic is the limit.

As :mod:`moegraft.bench.decode`, with four differences: all rows are checked; base, LoRA and torch's
grouped products are timed in turns, for long arithmetic changes a GPU's clocks; rates of arithmetic
stand beside times; and there is a second limit that counts the rows between the layer's products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moegraft.bench import records
from moegraft.bench.case_records import case_record, least_us, limits_us, measure_each
from moegraft.bench.cases import DecodeCase
from moegraft.bench.every_row import EveryRow
from moegraft.bench.harness import MachineLimits, Run, Timer, l2_bytes
from moegraft.bench.layer_runs import (
    CheckedBase,
    CheckedRun,
    LayerRun,
    WrongResultError,
    checked_mode,
)
from moegraft.bench.made import Made
from moegraft.bench.options import AUTO
from moegraft.bench.peers import grouped_mm_run, live_peers
from moegraft.bench.prefill_case import make_prefill_case
from moegraft.bench.prefill_options import PrefillRequest
from moegraft.bench.traffic import Traffic

_BASE, _GROUPED, _BF16 = "base", "grouped_mm", "bf16_base"


@dataclass(frozen=True)
class PrefillSettings:
    """How to measure.

    Attributes:
        repeats: turns of which the median counts.
        commit: written to the records; None = asked from git.
    """

    repeats: int = 20
    commit: str | None = None


def run_prefill(
    requests: Sequence[PrefillRequest],
    device: torch.device,
    settings: PrefillSettings | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[records.Record]:
    """Measure requests one by one; yields a record for each.

    A mode that is wrong has an ``error`` in place of its figures. Requests that follow one another
    with the same model, rank, slots and kind share weights and adapters.
    """
    settings = settings or PrefillSettings()
    timer = Timer(device, settings.repeats)

    def measure(request: PrefillRequest, made: Made, limits: MachineLimits) -> records.Record:
        case = make_prefill_case(request, *made.get(request), l2_bytes(device))
        case = replace(case, plain=made.plain(request))
        return {"batch": request.batch, **measure_prefill(case, limits, timer)}

    head = records.header(records.PREFILL, settings.commit)
    yield from measure_each(requests, device, head, measure, say)


def measure_prefill(case: DecodeCase, limits: MachineLimits, timer: Timer) -> records.Record:
    """Check and time one case; returns the part of the record that is its own."""
    traffic = case.traffic()
    limit = {**limits_us(limits, traffic), **limits_with_rows_us(limits, traffic)}
    mine = {**case_record(case, limits), "traffic": traffic.record(), "limit_us": limit}
    if not case.live:  # nobody's figures with adapters belong beside a batch of base rows
        mine["peers"] = [{**peer, "lora_us": None} for peer in mine["peers"]]
    expected = EveryRow(case)
    try:
        base = CheckedBase(LayerRun.of_layer(case, "base", lora=False), expected, timer)
    except WrongResultError as error:
        return {**mine, "base": {"error": str(error)}, "grouped_mm_us": None}
    runs: dict[str, CheckedRun] = {}
    for wanted in case.request.modes:
        name, found = checked_mode(case, wanted, expected, timer, runs)
        if name in mine["modes"]:  # the plan's choice, asked for by its name too
            continue
        mine["modes"][name] = {} if isinstance(found, CheckedRun) else found
        if wanted == AUTO:
            mine["modes"][name]["chosen"] = True
    bases = {_BASE: base}
    plain = case.unquantised()
    if plain is not None:
        try:
            run = LayerRun.of_layer(plain, "base", lora=False)
            bases[_BF16] = CheckedBase(run, EveryRow(plain), timer)
        except WrongResultError as error:
            mine[_BF16] = {"error": str(error)}
    _time(case, traffic, limit, bases, runs, timer, mine)
    mine["live_peers"] = live_peers(case, base.eager, timer)
    return mine


def limits_with_rows_us(limits: MachineLimits, traffic: Traffic) -> dict[str, float]:
    """Return the least microseconds when x, the output and the rows of pairs move too."""
    least = least_us(limits, traffic, traffic.activation_bytes + traffic.row_bytes)
    return {f"{name}_with_rows": us for name, us in least.items()}


def _time(
    case: DecodeCase,
    traffic: Traffic,
    limit: dict[str, float],
    bases: dict[str, CheckedBase],
    runs: dict[str, CheckedRun],
    timer: Timer,
    record: records.Record,
) -> None:
    """Time what was checked, in turns, and write the figures into a record."""
    parts = len(case.sets)
    base = bases[_BASE]
    grouped = grouped_mm_run(case)
    checked: dict[str, CheckedBase | CheckedRun] = {**bases, **runs}
    turns: dict[str, Run] = {name: run.replay for name, run in checked.items()}
    record["grouped_mm_us"] = None
    try:
        if grouped is not None:
            turns[_GROUPED] = timer.capture(grouped)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass  # torch has no grouped products of these sizes or dtypes here
    timings = timer.measure_in_turns(turns, parts)
    if _GROUPED in timings:
        record["grouped_mm_us"] = timings[_GROUPED].median * 1e6

    def figures(name: str, which: str, flops: float) -> dict[str, Any]:
        seconds = timings[name].median
        return {
            **timings[name].record(),
            "tflops": flops / seconds / 1e12,
            "share_of_limit": limit[which] / (seconds * 1e6),
            "share_with_rows": limit[f"{which}_with_rows"] / (seconds * 1e6),
        }

    def eager_us(run: LayerRun) -> float:
        return timer.measure(run.eager(), parts).median * 1e6

    record["base"] = {
        **figures(_BASE, "base", traffic.base_flops),
        "eager_us": eager_us(base.run),
        "checked": base.checked,
        "plan": base.run.plan,
    }
    if _BF16 in bases:
        record[_BF16] = {**timings[_BF16].record(), "checked": bases[_BF16].checked}
    for name, run in runs.items():
        record["modes"][name] |= {
            **figures(name, "lora", traffic.base_flops + traffic.lora_flops),
            "retention": timings[_BASE].median / timings[name].median,
            "eager_us": eager_us(run.run),
            **_idle(run, base, timer, parts),
            "checked": run.checked,
            "plan": run.run.plan,
        }


def _idle(checked: CheckedRun, base: CheckedBase, timer: Timer, parts: int) -> dict[str, float]:
    """Time the graph with adapters when all rows are base rows, in turns with the base."""
    with checked.base_rows(slice(None)):
        found = timer.measure_in_turns({"base": base.replay, "idle": checked.replay}, parts)
    idle = found["idle"].median
    return {"idle_us": idle * 1e6, "idle_retention": found["base"].median / idle}
