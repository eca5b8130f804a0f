"""Prefill records as tables for people, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moegraft.bench.records import Record
from moegraft.bench.report import best_peer, head_line, layer_name, mode_notes, text_table

_HEADER = (
    "model", "T", "rank", "adapters", "kind", "batch", "mode", "limit", "with rows",
    "base", "%", "TFLOP/s", "LoRA", "%", "TFLOP/s", "idle", "kept", "eager", "grouped_mm",
    "best peer", "faster",
)  # fmt: skip


def prefill_table(found: Sequence[Record]) -> str:
    """Return prefill records as a table; a pair ``a/b`` is without and with LoRA."""
    if not found:
        return "no records"
    rows = [_row(record, mode) for record in found for mode in record["modes"]]
    return "\n".join([head_line(found), "", text_table(_HEADER, rows), *mode_notes(found)])


def _row(record: Record, mode: str) -> list[str]:
    base, figures, limit = record["base"], record["modes"][mode], record["limit_us"]
    done = "us" in figures
    return [
        layer_name(record),
        str(record["tokens"]),
        str(record["rank"]),
        f"{record['live']}/{record['slots']}",
        record["kind"],
        record["batch"],
        mode + ("*" if figures.get("chosen") else ""),
        f"{limit['base']:.0f}/{limit['lora']:.0f}",
        f"{limit['base_with_rows']:.0f}/{limit['lora_with_rows']:.0f}",
        *_speed(base),
        *(_speed(figures) if done else ["WRONG" if "error" in figures else "-", "", ""]),
        f"{figures['idle_us']:.0f}" if done else "",
        f"{100 * figures['retention']:.1f}" if done else "",
        f"{base['eager_us']:.0f}/{figures['eager_us']:.0f}" if done else "",
        "-" if record["grouped_mm_us"] is None else f"{record['grouped_mm_us']:.0f}",
        *_peer(record, figures),
    ]


def _speed(figures: dict[str, Any]) -> list[str]:
    share = f"{100 * figures['share_of_limit']:.0f}"
    return [f"{figures['us']:.0f}", share, f"{figures['tflops']:.0f}"]


def _peer(record: Record, figures: dict[str, Any]) -> list[str]:
    """Return the best peer's figures, and how many times faster LoRA is here."""
    best = best_peer(record)
    if best is None:
        return ["-", ""]
    base = "?" if best["base_us"] is None else f"{best['base_us']:.0f}"
    faster = f"{best['lora_us'] / figures['us']:.2f}" if "us" in figures else ""
    return [f"{base}/{best['lora_us']:.0f} {best['system']}", faster]
