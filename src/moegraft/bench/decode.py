"""``bench decode``: one MoE layer at decode sizes, beside its limit and its peers.

Whole layer from routing ids to the summed output, by graph replay; the router is not part of it.
Every figure of ours stands beside a passed check of the very graph that was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from moegraft.bench import records
from moegraft.bench.cases import (
    DecodeCase,
    Made,
    check_memory,
    make_case,
)
from moegraft.bench.harness import MachineLimits, Timer, l2_bytes, measure_limits
from moegraft.bench.layer_runs import CheckedRun, Expected, LayerRun, WrongResultError, cold_us
from moegraft.bench.options import AUTO, DecodeRequest
from moegraft.bench.peers import grouped_mm_seconds, live_peers, peers_of
from moegraft.call import Mode
from moegraft.errors import PlanError
from moegraft.testing.compare import assert_bit_equal

#: Modes that must give the same bits.
_TWINS = (("in_kernel", "fused_serial"), ("two_stream", "serial"))


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
    shape = request.shape
    limit = {
        "base": limits.seconds(traffic.base_bytes, traffic.base_flops) * 1e6,
        "lora": 1e6
        * limits.seconds(
            traffic.base_bytes + traffic.factor_bytes, traffic.base_flops + traffic.lora_flops
        ),
    }
    mine: dict[str, Any] = {
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
        "traffic": traffic.record(),
        "limit_us": limit,
        "modes": {},
        "peers": peers_of(
            shape.name, request.tokens, request.rank, request.live, request.kind, limits.copy
        ),
    }
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


def _measure_base(case: DecodeCase, expected: Expected, timer: Timer, cold: bool) -> dict[str, Any]:
    """Check and time the layer made for no adapters."""
    run = LayerRun.of_layer(case, "base", lora=False)
    eager = run.call(0).clone()
    try:
        checked = expected.check_base(eager)
        replay = timer.capture(run)
        replay()
        assert_bit_equal(run.outs[0], eager, "the graph and the eager call")
    except AssertionError as error:
        raise WrongResultError(f"{case.request.title()}, base: {error}") from error
    found: dict[str, Any] = timer.measure(replay, len(case.sets)).record()
    if cold:
        found["cold_us"] = cold_us(run, timer)
    return {**found, "checked": checked, "plan": run.plan}


def _measure_mode(
    case: DecodeCase,
    wanted: str,
    expected: Expected,
    timer: Timer,
    cold: bool,
    runs: dict[str, CheckedRun],
) -> tuple[str, dict[str, Any]]:
    """Check and time one mode; returns its name and figures, or ``note`` or ``error``."""
    try:
        run = LayerRun.of_layer(case, None if wanted == AUTO else cast(Mode, wanted))
    except PlanError as error:
        return wanted, {"note": str(error)}
    name = run.name
    try:
        checked = CheckedRun(run, expected, timer)
        for pair in _TWINS:
            twin = next((m for m in pair if m != name and name in pair), None)
            if twin in runs:
                try:
                    assert_bit_equal(checked.eager, runs[twin].eager, f"{name} and {twin}")
                except AssertionError as error:
                    raise WrongResultError(f"{case.request.title()}: {error}") from error
                checked.checked["bits"] += f"; equals {twin}"
    except WrongResultError as error:
        return name, {"error": str(error)}
    runs[name] = checked
    found = checked.measure(cold)
    if wanted == AUTO:
        found["chosen"] = True
    return name, found


def wrong(found: Sequence[records.Record]) -> list[str]:
    """Return what failed its check in some records."""
    parts = [part for r in found for part in (r["base"], *r["modes"].values())]
    return [part["error"] for part in parts if "error" in part]
