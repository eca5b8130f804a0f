"""What prefill on one H200 should reach; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from moegraft.bench.bars import Bar, Outcome, against_peer_base, of_base, of_lora, outcomes, ratio
from moegraft.bench.prefill_options import INTERLEAVED, SEQUENCES
from moegraft.bench.records import Record
from moegraft.bench.report import best_peer


def _base_against_grouped(record: Record) -> float | None:
    return ratio(record["grouped_mm_us"], of_base(record, "us"))


def _against_limit(record: Record) -> float | None:
    return ratio(1.0, of_lora(record, "share_with_rows"))


def _against_peer(record: Record) -> float | None:
    best = best_peer(record)
    return None if best is None else ratio(best["lora_us"], of_lora(record, "us"))


def _base_tflops(record: Record) -> float | None:
    return of_base(record, "tflops")


def _kept(record: Record) -> float | None:
    return of_lora(record, "retention")


_BASE = "base, TFLOP/s"
_PEER = "best peer's LoRA over ours"
_LIMIT = "LoRA over its limit with rows"
_KEPT = "base over LoRA"
_MODELS = ("q30", "q35")
_bar = partial(Bar, batch=SEQUENCES)
BARS = (
    _bar(_BASE, ("q30",), (8192,), _base_tflops, 560, 610, of_base=True),
    _bar("grouped_mm over base", ("q30",), (8192,), _base_against_grouped, 1.10, of_base=True),
    _bar(_BASE, ("q35",), (8192,), _base_tflops, 470, 530, of_base=True),
    _bar(_KEPT, ("q30",), (8192, 32768), _kept, 0.93, 0.96, on_base=True),
    _bar(_KEPT, ("q35",), (8192, 32768), _kept, 0.91, 0.94, on_base=True),
    _bar(_KEPT, _MODELS, (8192,), _kept, 0.91, 0.94, batch=INTERLEAVED, on_base=True),
    _bar(_KEPT, ("q30",), (8192,), _kept, 0.80, 0.85, rank=64, on_base=True),
    _bar(_PEER, ("q30",), (8192,), _against_peer, 1.5, 1.7, rank=64),
    _bar(_LIMIT, _MODELS, (512, 1024, 2048), _against_limit, 1.25, 1.15, at_most=True),
    _bar(_PEER, _MODELS, (512,), _against_peer, 1.10, 1.2),
    _bar(_PEER, _MODELS, (1024,), _against_peer, 1.20, 1.3),
    _bar(_PEER, ("q30",), (2048,), _against_peer, 1.30, 1.45),
    _bar(_PEER, ("q35",), (2048,), _against_peer, 1.20, 1.35),
    _bar(_PEER, _MODELS, (8192,), _against_peer, 1.50, 1.8),
    _bar(_PEER, _MODELS, (32768,), _against_peer, 1.30, 1.5),
    _bar(
        "LoRA over the best peer without LoRA",
        _MODELS, (8192,), against_peer_base, 0.9, 0.75, at_most=True,
    ),
    _bar(_BASE, ("q30",), (8192,), _base_tflops, 600, 800, weight_format="fp8-block", of_base=True),
    _bar(_KEPT, ("q30",), (8192,), _kept, 0.88, weight_format="fp8-block", on_base=True),
)  # fmt: skip


def prefill_bars(found: Sequence[Record]) -> list[Outcome]:
    """Return the bars of prefill records, as :func:`moegraft.bench.bars.outcomes`."""
    return outcomes(BARS, found)
