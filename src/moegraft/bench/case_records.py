"""What records of layers have in common, at decode and at prefill sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from moegraft.bench import records
from moegraft.bench.cases import DecodeCase, Made, check_memory
from moegraft.bench.harness import MachineLimits, measure_limits
from moegraft.bench.options import DecodeRequest
from moegraft.bench.peers import peers_of
from moegraft.bench.traffic import Traffic
from moegraft.factor_table import SiteTable
from moegraft.types import ExpertWeights

_Request = TypeVar("_Request", bound=DecodeRequest)


def measure_each(
    requests: Sequence[_Request],
    device: torch.device,
    head: records.Record,
    measure: Callable[[_Request, ExpertWeights, SiteTable, MachineLimits], records.Record],
    say: Callable[[str], None],
) -> Iterator[records.Record]:
    """Measure the device's limits, then requests one by one; yields a record for each.

    Args:
        requests: those that follow one another with the same model, rank, slots and kind share
            weights and adapters.
        device: where.
        head: what every record begins with.
        measure: returns a record's own part.
        say: is told what runs now.

    Raises:
        MoegraftError: a request needs too much memory; said before anything is measured.
    """
    for request in requests:
        check_memory(request, device)
    say("measuring the limits of the device")
    limits = measure_limits(device)
    inputs = Made(device)
    for request in requests:
        say(request.title())
        mine = measure(request, *inputs.get(request), limits)
        _free_graphs(device)
        yield {**head, "limits": limits.record(), **mine}


def _free_graphs(device: torch.device) -> None:
    """Give the memory of graphs back: other sizes can't use it, and a capture can't free it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
