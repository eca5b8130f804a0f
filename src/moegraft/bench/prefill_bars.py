"""What prefill on one H200 should reach, and whether records of one did; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moegraft.bench.curves import main_mode
from moegraft.bench.peer_figures import GROUPED_MM
from moegraft.bench.prefill_options import INTERLEAVED, SEQUENCES
from moegraft.bench.records import Record
from moegraft.bench.report import best_peer, text_table

#: The device that the bars are for, as it appears in its name.
DEVICE = "H200"
#: What a case must share with a bar: 8 adapters, with one A each for gate and up.
_ADAPTERS, _KIND = 8, "separate"
_MODELS = ("q30", "q35")

Measure = Callable[[Record], float | None]


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        what: is measured.
        models, tokens, rank, batch: the cases it is for.
        measure: record -> value; None = the record does not say.
        bar, stretch: must be reached, and would be good.
        at_most: True when less is better.
        on_base: True when it counts only where the model's base reached its own bars.
    """

    what: str
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    measure: Measure
    bar: float
    stretch: float | None = None
    rank: int = 16
    batch: str = SEQUENCES
    at_most: bool = False
    on_base: bool = False

    def is_for(self, record: Record) -> bool:
        """True for the records of its cases."""
        return (
            record["model"] in self.models
            and record["tokens"] in self.tokens
            and (record["rank"], record["batch"]) == (self.rank, self.batch)
            and (record["adapters"], record["kind"]) == (_ADAPTERS, _KIND)
        )

    def reached(self, value: float) -> bool:
        """True when a value is as good as the bar."""
        return value <= self.bar if self.at_most else value >= self.bar


@dataclass(frozen=True)
class Outcome:
    """A bar beside the value of one record.

    Attributes:
        bar: which.
        model, tokens: of the record.
        value: measured; None = the record has no such figure, for it was wrong.
        met: None = the value is good, but the base is below its bars or was not measured.
    """

    bar: Bar
    model: str
    tokens: int
    value: float | None
    met: bool | None

    def record(self) -> dict[str, Any]:
        """Return it for a document."""
        bar = self.bar
        return {
            "what": bar.what,
            "model": self.model,
            "tokens": self.tokens,
            "rank": bar.rank,
            "batch": bar.batch,
            "value": self.value,
            "bar_is": "at most" if bar.at_most else "at least",
            "bar": bar.bar,
            "stretch": bar.stretch,
            "met": self.met,
        }


def _base(record: Record, name: str) -> float | None:
    return record["base"].get(name)


def _lora(record: Record, name: str) -> float | None:
    mode = main_mode(record)
    return None if mode is None else float(record["modes"][mode][name])


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _base_against_grouped(record: Record) -> float | None:
    return _ratio(record["grouped_mm_us"], _base(record, "us"))


def _against_limit(record: Record) -> float | None:
    return _ratio(1.0, _lora(record, "share_with_rows"))


def _against_peer(record: Record) -> float | None:
    best = best_peer(record)
    return None if best is None else _ratio(best["lora_us"], _lora(record, "us"))


def _against_peer_base(record: Record) -> float | None:
    known = [
        p["base_us"]
        for p in record["peers"]
        if p["base_us"] is not None and p["system"] != GROUPED_MM  # which is no whole layer
    ]
    return _ratio(_lora(record, "us"), min(known, default=None))


def _base_tflops(record: Record) -> float | None:
    return _base(record, "tflops")


def _kept(record: Record) -> float | None:
    return _lora(record, "retention")


_PEER = "best peer's LoRA over ours"
_LIMIT = "LoRA over its limit with rows"
_KEPT = "base over LoRA"
_BASE_BARS = (
    Bar("base, TFLOP/s", ("q30",), (8192,), _base_tflops, 560, 610),
    Bar("grouped_mm over base", ("q30",), (8192,), _base_against_grouped, 1.10),
    Bar("base, TFLOP/s", ("q35",), (8192,), _base_tflops, 470, 530),
)
BARS = (
    *_BASE_BARS,
    Bar(_KEPT, ("q30",), (8192, 32768), _kept, 0.93, 0.96, on_base=True),
    Bar(_KEPT, ("q35",), (8192, 32768), _kept, 0.91, 0.94, on_base=True),
    Bar(_KEPT, _MODELS, (8192,), _kept, 0.91, 0.94, batch=INTERLEAVED, on_base=True),
    Bar(_KEPT, ("q30",), (8192,), _kept, 0.80, 0.85, rank=64, on_base=True),
    Bar(_PEER, ("q30",), (8192,), _against_peer, 1.5, 1.7, rank=64),
    Bar(_LIMIT, _MODELS, (512, 1024, 2048), _against_limit, 1.25, 1.15, at_most=True),
    Bar(_PEER, _MODELS, (512,), _against_peer, 1.10, 1.2),
    Bar(_PEER, _MODELS, (1024,), _against_peer, 1.20, 1.3),
    Bar(_PEER, ("q30",), (2048,), _against_peer, 1.30, 1.45),
    Bar(_PEER, ("q35",), (2048,), _against_peer, 1.20, 1.35),
    Bar(_PEER, _MODELS, (8192,), _against_peer, 1.50, 1.8),
    Bar(_PEER, _MODELS, (32768,), _against_peer, 1.30, 1.5),
    Bar(
        "LoRA over the best peer without LoRA",
        _MODELS, (8192,), _against_peer_base, 0.9, 0.75, at_most=True,
    ),
)  # fmt: skip


def bars_of(found: Sequence[Record]) -> list[Outcome]:
    """Return each bar beside the records it is for; of two records of one case the later counts."""
    return [outcome for bar in BARS for outcome in _outcomes(bar, found)]


def _outcomes(bar: Bar, found: Sequence[Record]) -> Iterator[Outcome]:
    latest = {
        (r["model"], r["tokens"]): r for r in found if DEVICE in r["device"] and bar.is_for(r)
    }
    for (model, tokens), record in latest.items():
        value = bar.measure(record)
        met: bool | None = value is not None and bar.reached(value)
        if met and bar.on_base and not _base_is_met(model, found):
            met = None
        yield Outcome(bar, model, tokens, value, met)


def _base_is_met(model: str, found: Sequence[Record]) -> bool:
    own = [o.met for bar in _BASE_BARS if model in bar.models for o in _outcomes(bar, found)]
    return bool(own) and all(own)


def bars_table(outcomes: Sequence[Outcome]) -> str:
    """Return bars as a table; empty when there are none."""
    if not outcomes:
        return ""
    header = ("bar", "model", "T", "rank", "batch", "value", "wanted", "stretch", "")
    words = {True: "met", False: "MISSED", None: "base below its bar"}
    rows = [
        [
            o.bar.what, o.model, str(o.tokens), str(o.bar.rank), o.bar.batch,
            "-" if o.value is None else f"{o.value:.3g}",
            f"{'<=' if o.bar.at_most else '>='} {o.bar.bar:g}",
            "" if o.bar.stretch is None else f"{o.bar.stretch:g}",
            words[o.met],
        ]
        for o in outcomes
    ]  # fmt: skip
    return text_table(header, rows)
