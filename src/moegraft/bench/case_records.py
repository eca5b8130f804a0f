"""What records of layers have in common, at decode and at prefill sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from moegraft.bench import records
from moegraft.bench.cases import DecodeCase
from moegraft.bench.harness import MachineLimits, measure_limits
from moegraft.bench.made import Made, check_format, check_memory
from moegraft.bench.options import DecodeRequest
from moegraft.bench.peers import peers_of
from moegraft.bench.traffic import Traffic
from moegraft.quant.formats import format_of

_Request = TypeVar("_Request", bound=DecodeRequest)


def measure_each(
    requests: Sequence[_Request],
    device: torch.device,
    head: records.Record,
    measure: Callable[[_Request, Made, MachineLimits], records.Record],
    say: Callable[[str], None],
) -> Iterator[records.Record]:
    """Measure the device's limits, then requests one by one; yields a record for each.

    Args:
        requests: those that follow one another with the same model, rank, slots and kind share
            weights and adapters.
        device: where.
        head: what every record begins with.
        measure: returns a record's own part, given what makes the weights and adapters.
        say: is told what runs now.

    Raises:
        MoegraftError: a request needs too much memory; said before anything is measured.
        PlanError: no backend runs a request's weight format; likewise, with each one's reason.
    """
    for request in requests:
        check_memory(request, device)
        check_format(request, device)
    say("measuring the limits of the device")
    limits = measure_limits(device, fp8=any(_multiplies_fp8(r) for r in requests))
    inputs = Made(device)
    for request in requests:
        say(request.title())
        mine = measure(request, inputs, limits)
        _free_graphs(device)
        yield {**head, "limits": limits.record(), **mine}


def _multiplies_fp8(request: DecodeRequest) -> bool:
    """True when the base's activations are FP8 too."""
    return request.quantised and format_of(request.weight_format).activation_group is not None


def _free_graphs(device: torch.device) -> None:
    """Give the memory of graphs back: other sizes can't use it, and a capture can't free it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def limits_us(limits: MachineLimits, traffic: Traffic) -> dict[str, float]:
    """Return the least microseconds of a layer without and with the adapters."""
    return least_us(limits, traffic, 0.0)


def least_us(limits: MachineLimits, traffic: Traffic, row_bytes: float) -> dict[str, float]:
    """As :func:`limits_us`, with bytes of rows beside those of weights and factors."""
    base, fp8 = traffic.base_bytes + row_bytes, traffic.base_fp8_flops
    flops = traffic.base_flops - fp8
    both = base + traffic.factor_bytes
    return {
        "base": limits.seconds(base, flops, fp8) * 1e6,
        "lora": limits.seconds(both, flops + traffic.lora_flops, fp8) * 1e6,
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
        "weight_format": request.weight_format,
        "input_sets": len(case.sets),
        "reuse_bytes": case.reuse_bytes(),
        "modes": {},
        "peers": peers_of(
            shape.name,
            request.tokens,
            request.rank,
            request.live,
            request.kind,
            limits.copy,
            request.weight_format,
        ),
    }
