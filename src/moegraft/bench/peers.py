"""What other systems reach on the same layer: figures measured before, and peers of this run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F

from moegraft.bench.cases import DecodeCase
from moegraft.bench.harness import Run, Timer
from moegraft.bench.options import UNQUANTIZED
from moegraft.bench.peer_figures import COPY_RATE, FIGURES, PeerFigure
from moegraft.testing.compare import relative_error

#: Weight format -> what stored figures call it.
_WEIGHTS = {UNQUANTIZED: "bf16", "fp8-block": "fp8", "fp8-block-w8a16": "fp8"}
#: Systems that are timed when they can be imported.
IMPORTABLE = ("vllm", "sglang")


def scaled_us(us: float | None, copy_rate: float) -> float | None:
    """Return a stored figure as it would be at this run's copy rate (bytes per second)."""
    return None if us is None else us * COPY_RATE / copy_rate


def peers_of(
    model: str,
    tokens: int,
    rank: int,
    live: int,
    kind: str,
    copy_rate: float,
    weight_format: str = UNQUANTIZED,
) -> list[dict[str, Any]]:
    """Return the stored figures of exactly this case, scaled to this run's copy rate."""
    return [
        {
            "system": figure.system,
            "kind": figure.kind,
            "base_us": scaled_us(figure.base_us, copy_rate),
            "lora_us": scaled_us(figure.lora_us, copy_rate),
            "stored_base_us": figure.base_us,
            "stored_lora_us": figure.lora_us,
        }
        for figure in matching(model, tokens, rank, live, kind, weight_format)
    ]


def matching(
    model: str, tokens: int, rank: int, live: int, kind: str, weight_format: str
) -> Iterator[PeerFigure]:
    """Return the stored figures of a case.

    One token uses one adapter, so there the number of adapters does not matter. Where the kind of
    a figure's adapters is not known it stands beside every kind.
    """
    weights = _WEIGHTS.get(weight_format)
    for figure in FIGURES:
        same = (figure.model, figure.tokens, figure.rank, figure.weights)
        adapters = tokens == 1 or figure.adapters == live
        kinds = figure.kind in (kind, "unknown")
        if same == (model, tokens, rank, weights) and adapters and kinds:
            yield figure


def grouped_mm_seconds(case: DecodeCase, timer: Timer) -> float | None:
    """Time torch's grouped products for the pairs of a case; None where torch refuses them."""
    run = grouped_mm_run(case)
    try:
        return None if run is None else timer.seconds(run) / len(case.sets)
    except RuntimeError:
        return None


def grouped_mm_run(case: DecodeCase) -> Run | None:
    """Return a run of torch's grouped products for the pairs of a case's input sets.

    Only the two products: no sort, activation, biases or finalize. Keep it while its graph lives.
    None for quantised weights, which they don't take.
    """
    w = case.weights
    if w.scales is not None:
        return None
    pairs = case.sets[0].topk_ids.numel()
    ends = [_ends(s.topk_ids, w.num_experts) for s in case.sets]
    x = torch.randn(pairs, w.hidden, device=w.device, dtype=w.dtype)
    h = torch.randn(pairs, w.intermediate, device=w.device, dtype=w.dtype)
    first, second = w.gate_up_oi.transpose(1, 2), w.down_oi.transpose(1, 2)

    def run() -> None:
        for offs in ends:
            F.grouped_mm(x, first, offs=offs)
            F.grouped_mm(h, second, offs=offs)

    return run


def _ends(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    counts = torch.bincount(topk_ids.reshape(-1).long(), minlength=num_experts)
    return counts.cumsum(0).to(torch.int32)


def live_peers(case: DecodeCase, base: torch.Tensor, timer: Timer) -> dict[str, Any]:
    """Time the base layer of every peer that can be imported and gets the first set right.

    Args:
        case: what to run.
        base: our base result of the first input set, ``[T, H]``; a peer must agree with it.
        timer: of the run.

    Returns:
        System -> ``{"base_us": ..}``, or ``{"note": why not}``. Empty where none is installed.
    """
    found: dict[str, Any] = {}
    for system in IMPORTABLE:
        if find_spec(system) is None:
            continue
        if case.weights.scales is not None:
            found[system] = {"note": "is timed with unquantised weights only"}
            continue
        try:
            call = _RUNNERS[system](case)
            error = relative_error(call(0), base)
            if not error <= 1e-2:
                found[system] = {"note": f"its result is off by {error:.1e}, so it is not timed"}
                continue

            def run(call: Callable[[int], torch.Tensor] = call) -> None:
                for i in range(len(case.sets)):
                    call(i)

            found[system] = {"base_us": timer.seconds(run) / len(case.sets) * 1e6}
        except Exception as error:
            # Other people's code in a version nobody knows here: whatever it raises is a note.
            found[system] = {"note": f"{type(error).__name__}: {error}"}
    return found


def _vllm(case: DecodeCase) -> Callable[[int], torch.Tensor]:
    fused_experts = import_module("vllm.model_executor.layers.fused_moe").fused_experts

    def call(i: int) -> torch.Tensor:
        s, w = case.sets[i], case.weights
        result: torch.Tensor = fused_experts(s.x, w.gate_up, w.down, s.topk_weights, s.topk_ids)
        return result

    return call


def _sglang(case: DecodeCase) -> Callable[[int], torch.Tensor]:
    raise NotImplementedError("its experts run only inside its server; see the stored figures")


_RUNNERS: dict[str, Callable[[DecodeCase], Callable[[int], torch.Tensor]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
}
