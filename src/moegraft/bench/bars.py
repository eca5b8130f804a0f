"""Bars: what layers on one H200 should reach, and whether records of them did; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moegraft.bench.curves import main_mode
from moegraft.bench.options import UNQUANTIZED
from moegraft.bench.peer_figures import GROUPED_MM
from moegraft.bench.records import Record
from moegraft.bench.report import name_of, text_table

#: The device that the bars are for, as it appears in its name.
DEVICE = "H200"
#: What a case must share with a bar: 8 adapters, with one A each for gate and up.
_ADAPTERS, _KIND = 8, "separate"

Measure = Callable[[Record], float | None]


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        what: is measured.
        models, tokens, rank, batch, weight_format: the cases it is for; ``batch`` None = decode.
        measure: record -> value; None = the record does not say.
        bar, stretch: must be reached, and would be good.
        at_most: True when less is better.
        of_base: True for a bar of the base.
        on_base: True when it counts only where the model's base reached its own bars.
    """

    what: str
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    measure: Measure
    bar: float
    stretch: float | None = None
    rank: int = 16
    batch: str | None = None
    at_most: bool = False
    of_base: bool = False
    on_base: bool = False
    weight_format: str = UNQUANTIZED

    def is_for(self, record: Record) -> bool:
        """True for the records of its cases."""
        return (
            record["model"] in self.models
            and record["tokens"] in self.tokens
            and (record["rank"], record.get("batch")) == (self.rank, self.batch)
            and record.get("weight_format", UNQUANTIZED) == self.weight_format
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
            "weight_format": bar.weight_format,
            "value": self.value,
            "bar_is": "at most" if bar.at_most else "at least",
            "bar": bar.bar,
            "stretch": bar.stretch,
            "met": self.met,
        }


def of_base(record: Record, name: str) -> float | None:
    """Return a figure of the base."""
    return record["base"].get(name)


def of_lora(record: Record, name: str) -> float | None:
    """Return a figure of the plan's own mode."""
    mode = main_mode(record)
    return None if mode is None else float(record["modes"][mode][name])


def ratio(a: float | None, b: float | None) -> float | None:
    """Return ``a / b``; None where one is missing."""
    return None if a is None or b is None else a / b


def against_peer_base(record: Record) -> float | None:
    """Return our time with LoRA over the fastest stored peer's without."""
    known = [
        p["base_us"]
        for p in record["peers"]
        if p["base_us"] is not None and p["system"] != GROUPED_MM  # which is no whole layer
    ]
    return ratio(of_lora(record, "us"), min(known, default=None))


def outcomes(bars: Sequence[Bar], found: Sequence[Record]) -> list[Outcome]:
    """Return each bar beside the records it is for; of two records of one case the later counts."""
    return [outcome for bar in bars for outcome in _of_bar(bar, bars, found)]


def _of_bar(bar: Bar, bars: Sequence[Bar], found: Sequence[Record]) -> Iterator[Outcome]:
    latest = {
        (r["model"], r["tokens"]): r for r in found if DEVICE in r["device"] and bar.is_for(r)
    }
    for (model, tokens), record in latest.items():
        value = bar.measure(record)
        met: bool | None = value is not None and bar.reached(value)
        if met and bar.on_base and not _base_is_met(bar, model, bars, found):
            met = None
        yield Outcome(bar, model, tokens, value, met)


def _base_is_met(bar: Bar, model: str, bars: Sequence[Bar], found: Sequence[Record]) -> bool:
    """True when the model's base in a bar's weight format was measured and is at its bars."""
    own = [
        outcome.met
        for other in bars
        if other.of_base and other.weight_format == bar.weight_format and model in other.models
        for outcome in _of_bar(other, bars, found)
        if outcome.model == model
    ]
    return bool(own) and all(own)


def bars_table(found: Sequence[Outcome]) -> str:
    """Return bars as a table; empty when there are none."""
    if not found:
        return ""
    header = ("bar", "model", "T", "rank", "batch", "value", "wanted", "stretch", "")
    words = {True: "met", False: "MISSED", None: "base below its bar"}
    rows = [
        [
            o.bar.what, name_of(o.model, o.bar.weight_format), str(o.tokens), str(o.bar.rank),
            o.bar.batch or "-",
            "-" if o.value is None else f"{o.value:.3g}",
            f"{'<=' if o.bar.at_most else '>='} {o.bar.bar:g}",
            "" if o.bar.stretch is None else f"{o.bar.stretch:g}",
            words[o.met],
        ]
        for o in found
    ]  # fmt: skip
    return text_table(header, rows)
