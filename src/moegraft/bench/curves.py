"""The lines of the pictures: what of the records they show; needs no matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moegraft.bench.peer_figures import SGLANG, SGLANG_VIRTUAL, VLLM
from moegraft.bench.prefill_options import INTERLEAVED
from moegraft.bench.records import Record

INK, FAINT = "#1f2328", "#d0d7de"
_LIMIT, BASE, _LORA, _TORCH = "#8c959f", "#57606a", "#0969da", "#bf8700"
#: One hue per peer, so that a peer looks the same in every picture.
_PEERS = {VLLM: "#cf222e", SGLANG: "#8250df", SGLANG_VIRTUAL: "#1a7f37"}


@dataclass(frozen=True)
class Curve:
    """One line: its label, T -> value, colour, and how it is drawn (``-``, ``--``, ``:``)."""

    label: str
    points: dict[int, float]
    colour: str
    style: str = "-"
    bold: bool = False


def main_mode(record: Record) -> str | None:
    """Return the plan's own choice, else the first mode with figures; None when none has."""
    timed = [name for name, m in record["modes"].items() if "us" in m]
    chosen = [name for name in timed if record["modes"][name].get("chosen")]
    return next(iter(chosen + timed), None)


def is_chosen(record: Record) -> bool:
    """True when the record has figures of the plan's own choice."""
    return any(m.get("chosen") and "us" in m for m in record["modes"].values())


def _ours(record: Record) -> dict[str, Any]:
    mode = main_mode(record)
    assert mode is not None
    figures: dict[str, Any] = record["modes"][mode]
    return figures


def split(found: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return the records of the main lines, and those of interleaved prefill batches beside them.

    At decode sizes adapters always come in turn; at prefill sizes the main lines are those of
    adapters in sequences. Where there is nothing else, interleaved batches are the main lines.
    """
    mixed = [r for r in found if r.get("batch") == INTERLEAVED]
    rest = [r for r in found if r.get("batch") != INTERLEAVED]
    return (rest, mixed) if rest else (mixed, [])


def _mixed_curves(mixed: Sequence[Record], value: Callable[[Record], float]) -> list[Curve]:
    points = {r["tokens"]: value(r) for r in mixed}
    return [Curve("LoRA, interleaved", points, _LORA, "-.")] if points else []


def time_curves(found: Sequence[Record]) -> list[Curve]:
    """Return the lines of the first picture: limit, base, LoRA, torch's products, peers."""
    rows, mixed = split(found)
    curves = [
        Curve("limit with LoRA", {r["tokens"]: r["limit_us"]["lora"] for r in rows}, _LIMIT, ":"),
        Curve("moegraft base", {r["tokens"]: r["base"]["us"] for r in rows}, BASE),
        Curve("moegraft LoRA", {r["tokens"]: _ours(r)["us"] for r in rows}, _LORA, bold=True),
        Curve(
            "grouped_mm",
            {r["tokens"]: r["grouped_mm_us"] for r in rows if r["grouped_mm_us"]},
            _TORCH,
            "--",
        ),
    ]
    mixed_curves = _mixed_curves(mixed, lambda r: float(_ours(r)["us"]))
    return curves + mixed_curves + _peer_curves(rows, "lora_us")


def share_curves(found: Sequence[Record]) -> list[Curve]:
    """Return the lines of the second picture: shares of the limit, in per cent."""
    rows, mixed = split(found)
    peers = [
        Curve(
            c.label,
            {t: 100 * r["limit_us"]["lora"] / c.points[t]
             for r in rows if (t := r["tokens"]) in c.points},
            c.colour,
            c.style,
        )
        for c in _peer_curves(rows, "lora_us")
    ]  # fmt: skip
    return [
        Curve(
            "moegraft base", {r["tokens"]: 100 * r["base"]["share_of_limit"] for r in rows}, BASE
        ),
        Curve(
            "LoRA", {r["tokens"]: 100 * _ours(r)["share_of_limit"] for r in rows}, _LORA, "-", True
        ),
        *_mixed_curves(mixed, lambda r: 100 * float(_ours(r)["share_of_limit"])),
        *peers,
    ]


def kept_curves(found: Sequence[Record]) -> list[Curve]:
    """Return the lines of the third picture: a system's base time over its LoRA time."""
    rows, mixed = split(found)
    peers = [
        Curve(
            c.label,
            {t: 100 * base.points[t] / c.points[t] for t in c.points if t in base.points},
            c.colour,
            c.style,
        )
        for c, base in zip(
            _peer_curves(rows, "lora_us"), _peer_curves(rows, "base_us"), strict=True
        )
    ]
    ours = {r["tokens"]: 100 * _ours(r)["retention"] for r in rows}
    bound = {r["tokens"]: 100 * r["limit_us"]["base"] / r["limit_us"]["lora"] for r in rows}
    return [
        Curve("limit", bound, _LIMIT, ":"),
        Curve("moegraft LoRA", ours, _LORA, "-", True),
        *_mixed_curves(mixed, lambda r: 100 * float(_ours(r)["retention"])),
        *(c for c in peers if c.points),
    ]


def _peer_curves(rows: Sequence[Record], which: str) -> list[Curve]:
    """Return a line per stored peer with LoRA figures here; the same peers for every ``which``."""
    systems = dict.fromkeys(
        p["system"] for r in rows for p in r["peers"] if p["lora_us"] is not None
    )
    curves = []
    for system in systems:
        points = {
            r["tokens"]: p[which]
            for r in rows
            for p in r["peers"]
            if p["system"] == system and p[which] is not None
        }
        curves.append(Curve(system, points, _PEERS.get(system, INK), "--"))
    return curves
