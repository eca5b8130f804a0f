"""``bench decode``: one MoE layer at decode sizes, beside its limit and its peers.

Whole layer from routing ids to the summed output, by graph replay; the router is not part of it.
Every figure of ours stands beside a passed check of the very graph that was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moegraft.bench import records
from moegraft.bench.cases import (
    DecodeCase,
    Made,
    check_memory,
    make_case,
)
from moegraft.bench.harness import MachineLimits, Timer, l2_bytes, measure_limits
from moegraft.bench.layer_runs import (
    CheckedBase,
    CheckedRun,
    Expected,
    LayerRun,
    WrongResultError,
    checked_mode,
    cold_us,
)
from moegraft.bench.options import AUTO, DecodeRequest
from moegraft.bench.peers import grouped_mm_seconds, live_peers, peers_of
from moegraft.bench.traffic import Traffic


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
    for request in requests:
        check_memory(request, device)
    say("measuring the limits of the device")
    limits = measure_limits(device)
    head = {**records.header(records.DECODE, settings.commit), "limits": limits.record()}
    timer = Timer(device, settings.repeats)
    inputs = Made(device)
    for request in requests:
        say(request.title())
        weights, table = inputs.get(request)
        case = make_case(request, weights, table, l2_bytes(device))
        record = {**head, **measure_case(case, limits, timer, settings.cold)}
        del case, weights, table  # so that the next ones find their memory free
        yield record


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
    plain = LayerRun.of_layer(case, "base", lora=False).call(0)
    mine["live_peers"] = live_peers(case, plain, timer)
    return mine


def limits_us(limits: MachineLimits, traffic: Traffic) -> dict[str, float]:
    """Return the least microseconds of a layer without and with the adapters."""
    base, both = traffic.base_bytes, traffic.base_bytes + traffic.factor_bytes
    return {
        "base": limits.seconds(base, traffic.base_flops) * 1e6,
        "lora": limits.seconds(both, traffic.base_flops + traffic.lora_flops) * 1e6,
    }


def case_record(case: DecodeCase, limits: MachineLimits) -> dict[str, Any]:
    """Return what a record says of a case before anything ran, with the stored peers."""
    request, shape = case.request, case.request.shape
    return {
        "model": shape.name,
        "shape": [shape.num_experts, shape.hidden, shape.intermediate, shape.top_k],
        "tokens": request.tokens,
        "rank": request.rank,
        "adapters": request.live,
        "live": len(case.live),
        "slots": request.slots,
        "kind": request.kind,
        "input_sets": len(case.sets),
        "reuse_bytes": case.reuse_bytes(),
        "modes": {},
        "peers": peers_of(
            shape.name, request.tokens, request.rank, request.live, request.kind, limits.copy
        ),
    }


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
    parts = [part for r in found for part in (r["base"], *r["modes"].values())]
    return [part["error"] for part in parts if "error" in part]
