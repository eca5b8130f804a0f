"""``bench decode``: one MoE layer at decode sizes, beside its limit and its peers.

Whole layer from routing ids to the summed output, by graph replay; the router is not part of it.
Every figure of ours stands beside a passed check of the very graph that was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moegraft.bench import records
from moegraft.bench.case_records import case_record, limits_us, measure_each
from moegraft.bench.cases import DecodeCase, make_case
from moegraft.bench.harness import MachineLimits, Timer, l2_bytes
from moegraft.bench.layer_runs import (
    CheckedBase,
    CheckedRun,
    Expected,
    LayerRun,
    WrongResultError,
    checked_mode,
    cold_us,
)
from moegraft.bench.made import Made
from moegraft.bench.options import AUTO, DecodeRequest
from moegraft.bench.peers import grouped_mm_seconds, live_peers


@dataclass(frozen=True)
class DecodeSettings:
    """How to measure.

    Attributes:
        repeats: replays of which the median counts.
        cold: also time single calls after a flush of the L2.
        commit: written to the records; None = asked from git.
    """

    repeats: int = 50
    cold: bool = False
    commit: str | None = None


def run_decode(
    requests: Sequence[DecodeRequest],
    device: torch.device,
    settings: DecodeSettings | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[records.Record]:
    """Measure requests one by one; yields a record for each.

    A mode that is wrong has an ``error`` in place of its figures. Requests that follow one another
    with the same model, rank, slots and kind share weights and adapters.
    """
    settings = settings or DecodeSettings()
    timer, cold = Timer(device, settings.repeats), settings.cold

    def measure(request: DecodeRequest, made: Made, limits: MachineLimits) -> records.Record:
        case = make_case(request, *made.get(request), l2_bytes(device))
        return measure_case(replace(case, plain=made.plain(request)), limits, timer, cold)

    head = records.header(records.DECODE, settings.commit)
    yield from measure_each(requests, device, head, measure, say)


def measure_case(
    case: DecodeCase, limits: MachineLimits, timer: Timer, cold: bool
) -> records.Record:
    """Check and time one case; returns the part of the record that is its own."""
    request, traffic = case.request, case.traffic()
    limit = limits_us(limits, traffic)
    mine = {**case_record(case, limits), "traffic": traffic.record(), "limit_us": limit}
    expected = Expected(case)
    try:
        base = mine["base"] = _measure_base(case, expected, timer, cold)
    except WrongResultError as error:
        return {**mine, "base": {"error": str(error)}}
    base["share_of_limit"] = limit["base"] / base["us"]
    plain = case.unquantised()
    if plain is not None:
        try:
            mine["bf16_base"] = _measure_base(plain, Expected(plain), timer, cold=False)
        except WrongResultError as error:
            mine["bf16_base"] = {"error": str(error)}
    runs: dict[str, CheckedRun] = {}
    for wanted in request.modes:
        name, found = _measure_mode(case, wanted, expected, timer, cold, runs)
        if name in mine["modes"]:  # the plan's choice, asked for by its name too
            continue
        if "us" in found:
            found["share_of_limit"] = limit["lora"] / found["us"]
            found["retention"] = base["us"] / found["us"]
        mine["modes"][name] = found
    grouped = grouped_mm_seconds(case, timer)
    mine["grouped_mm_us"] = None if grouped is None else grouped * 1e6
    ours = LayerRun.of_layer(case, "base", lora=False).call(0)
    mine["live_peers"] = live_peers(case, ours, timer)
    return mine


def _measure_base(case: DecodeCase, expected: Expected, timer: Timer, cold: bool) -> dict[str, Any]:
    """Check and time the layer made for no adapters."""
    base = CheckedBase(LayerRun.of_layer(case, "base", lora=False), expected, timer)
    found: dict[str, Any] = timer.measure(base.replay, len(case.sets)).record()
    if cold:
        found["cold_us"] = cold_us(base.run, timer)
    return {**found, "checked": base.checked, "plan": base.run.plan}


def _measure_mode(
    case: DecodeCase,
    wanted: str,
    expected: Expected,
    timer: Timer,
    cold: bool,
    runs: dict[str, CheckedRun],
) -> tuple[str, dict[str, Any]]:
    """Check and time one mode; returns its name and figures, or ``note`` or ``error``."""
    name, checked = checked_mode(case, wanted, expected, timer, runs)
    if not isinstance(checked, CheckedRun):
        return name, checked
    found = checked.measure(cold)
    if wanted == AUTO:
        found["chosen"] = True
    return name, found


def wrong(found: Sequence[records.Record]) -> list[str]:
    """Return what failed its check in some records."""
    parts = [
        part for r in found for part in (r["base"], r.get("bf16_base", {}), *r["modes"].values())
    ]
    return [part["error"] for part in parts if "error" in part]
