"""Tables for people, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moegraft.bench.options import UNQUANTIZED
from moegraft.bench.records import Record


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns padded to their widest cell; the first left, the others right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            c.ljust(w) if not i else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)


def decode_table(found: Sequence[Record]) -> str:
    """Return decode records as a table: microseconds, and shares of the limit in per cent."""
    if not found:
        return "no records"
    header = (
        "model", "T", "rank", "adapters", "kind", "mode", "limit", "base", "%", "LoRA", "%",
        "idle", "kept", "grouped_mm", "best peer",
    )  # fmt: skip
    rows = [_row(record, mode) for record in found for mode in record["modes"]]
    return "\n".join([head_line(found), "", text_table(header, rows), *mode_notes(found)])


def name_of(model: str, weight_format: str) -> str:
    """Return what tables call a model: with its weight format where that is not bf16."""
    return model if weight_format == UNQUANTIZED else f"{model} {weight_format}"


def layer_name(record: Record) -> str:
    """Return what tables call a record's model."""
    return name_of(record["model"], record.get("weight_format", UNQUANTIZED))


def head_line(found: Sequence[Record]) -> str:
    """Return what stands above a table of layers: the device and what it reached."""
    limits = found[0]["limits"]
    fp8 = limits.get("dense_fp8_tflops")
    return (
        f"{found[0]['device']}: read {limits['read_gb_s']:,.0f} GB/s, copy "
        f"{limits['copy_gb_s']:,.0f} GB/s, dense bf16 {limits['dense_tflops']:,.0f} TFLOP/s"
        f"{'' if fp8 is None else f', fp8 {fp8:,.0f} TFLOP/s'}. "
        "Microseconds per layer; % = share of the limit."
    )


def mode_notes(found: Sequence[Record]) -> list[str]:
    """Return a line for each base or mode without figures: why; and how formats do beside bf16."""
    parts = [
        (r, name, figures)
        for r in found
        for name, figures in (
            ("base", r["base"]),
            *((name, r[name]) for name in ("bf16_base",) if name in r),
            *r["modes"].items(),
        )
    ]
    notes = [
        f"{layer_name(r)} T={r['tokens']} {name}: {m.get('note') or m.get('error')}"
        for r, name, m in parts
        if "us" not in m
    ]
    return notes + [
        f"{layer_name(r)} T={r['tokens']}: base {m['us'] / r['base']['us']:.2f} times as fast as "
        f"the same layer's in bf16, {m['us']:.1f} us"
        for r, name, m in parts
        if name == "bf16_base" and "us" in m
    ]


def decode_line(record: Record) -> str:
    """Return a record in one line, for those who watch a run."""
    parts = [f"{layer_name(record)} T={record['tokens']} rank {record['rank']}"]
    for name, figures in (("base", record["base"]), *record["modes"].items()):
        done = "us" in figures
        share = f" ({100 * figures['share_of_limit']:.0f} % of the limit)" if done else ""
        parts.append(f"{name} {figures['us']:.1f} us{share}" if done else f"{name} -")
    return "  " + ", ".join(parts)


def _row(record: Record, mode: str) -> list[str]:
    base, figures, limit = record["base"], record["modes"][mode], record["limit_us"]
    done = "us" in figures
    best = best_peer(record)
    return [
        layer_name(record),
        str(record["tokens"]),
        str(record["rank"]),
        f"{record['live']}/{record['slots']}",
        record["kind"],
        mode + ("*" if figures.get("chosen") else ""),
        f"{limit['base']:.1f}/{limit['lora']:.1f}",
        f"{base['us']:.1f}",
        f"{100 * base['share_of_limit']:.0f}",
        f"{figures['us']:.1f}" if done else "WRONG" if "error" in figures else "-",
        f"{100 * figures['share_of_limit']:.0f}" if done else "",
        f"{figures['idle_us']:.1f}" if done else "",
        f"{100 * figures['retention']:.0f}" if done else "",
        "-" if record["grouped_mm_us"] is None else f"{record['grouped_mm_us']:.0f}",
        "-" if best is None else f"{_us(best['base_us'])}/{best['lora_us']:.0f} {best['system']}",
    ]


def _us(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def best_peer(record: Record) -> dict[str, Any] | None:
    """Return the stored peer with the fastest LoRA of this case; None when there is none."""
    with_lora = [p for p in record["peers"] if p["lora_us"] is not None]
    return min(with_lora, key=lambda p: p["lora_us"], default=None)


def e2e_table(found: Sequence[Record]) -> str:
    """Return end-to-end records as a table."""
    if not found:
        return "no records"
    first = found[0]
    head = (
        f"{first['device']}: {first['model']['layers']} layers, rank {first['rank']}, "
        f"{first['adapter_bytes'] / 1e9:.2f} GB per adapter, prompts of {first['prompt']} tokens."
    )
    header = ("rows", "adapters", "ms/step", "tokens/s", "kept %", "prefill ms", "vLLM tokens/s")
    rows = []
    for r in found:
        peer = "-" if r["vllm_tokens_s"] is None else f"{r['vllm_tokens_s']:,}"
        figures = ["WRONG", "", "", ""]
        if "ms_per_step" in r:
            kept = f"{100 * r['retention']:.0f}" if "retention" in r else ""
            figures = [
                f"{r['ms_per_step']:.2f}", f"{r['tokens_s']:,.0f}", kept, f"{r['prefill_ms']:.0f}",
            ]  # fmt: skip
        rows.append([str(r["batch"]), r["mix"], *figures, peer])
    notes = [f"{r['batch']} rows, {r['mix']}: {r['error']}" for r in found if "error" in r]
    if any(r["vllm_tokens_s"] is not None for r in found):
        notes.append(
            "vLLM 0.26 on an H200, stored: output of a server with the same sizes, 256 tokens in "
            "and out, prompts and scheduling included; a guide, not the same measurement."
        )
    return "\n".join([head, "", text_table(header, rows), *notes])


def load_table(found: Sequence[Record]) -> str:
    """Return load records as a table, with the bar of each part that has one."""
    header = ("part", "seconds", "GB/s", "ratio", "bar", "", "compared with")
    rows = []
    for r in found:
        bar = f"{r['bar_is']} {r['bar']:g}" if "bar" in r else ""
        met = ("met" if r["met"] else "MISSED") if "met" in r else ""
        rows.append([
            r["part"], f"{r['seconds']:.4f}", f"{r['gb_s']:.2f}" if "gb_s" in r else "",
            f"{r['ratio']:.2f}" if "ratio" in r else "", bar, met, r.get("compared_with", ""),
        ])  # fmt: skip
    return text_table(header, rows) if rows else "no records"


def tune_table(found: Sequence[Record]) -> str:
    """Return what tuning changed, microseconds before and after."""
    header = ("model", "T", "rank", "tried", "base", "->", "LoRA", "->")
    rows = [
        [
            r["model"], str(r["problem"]["num_tokens"]), str(r["problem"]["max_rank"]),
            str(r["tried"]), f"{r['before']['base_us']:.1f}", f"{r['after']['base_us']:.1f}",
            f"{r['before']['lora_us']:.1f}", f"{r['after']['lora_us']:.1f}",
        ]
        for r in found
    ]  # fmt: skip
    notes = [f"wrong, so not timed: {text}" for r in found for text in r["wrong"]]
    return "\n".join([text_table(header, rows), *notes])
