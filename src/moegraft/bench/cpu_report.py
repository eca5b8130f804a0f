"""Records of ``bench cpu`` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from moegraft.bench.records import Record
from moegraft.bench.report import text_table


def cpu_table(found: Sequence[Record]) -> str:
    """Return layers, the model and the bars as text."""
    if not found:
        return "no records"
    first = found[0]
    kernels = f"compiled for {first['instructions']}" if first["instructions"] else "torch only"
    parts = [f"{first['device']}: {first['threads']} threads of {first['cores']} cores, {kernels}."]
    layers = [record for record in found if record["part"] == "layer"]
    if layers:
        parts.append(_layers(layers))
    parts += [_model(record) for record in found if record["part"] == "model"]
    rows = [
        [_case(record), bar["name"], f"{bar['value']:.2f}", f"{bar['of_least']:.2f}",
         f"{bar['bar_is']} {bar['bar']:g}", "met" if bar["met"] else "MISSED"]
        for record in found
        for bar in record["bars"]
    ]  # fmt: skip
    if rows:
        parts.append(text_table(("case", "figure", "medians", "least", "bar", ""), rows))
    return "\n\n".join(parts)


def _case(record: Record) -> str:
    if record["part"] == "model":
        return "model, decode"
    return f"{record['dtype']} T={record['tokens']}"


def _layers(found: Sequence[Record]) -> str:
    header = ("layer", "limit", "base", "LoRA", "grouped_mm", "eager", "torch base", "torch LoRA")
    rows = []
    for record in found:
        ours, ways = record["backends"][0], record["ways"]
        names = (f"{ours} base", f"{ours} lora", "grouped_mm", "eager", "cpu base", "cpu lora")
        rows.append([
            _case(record), f"{record['limit_us'] / 1e3:.2f} {record['limit_is']}",
            *(_ms(ways[name]) if name in ways else "" for name in names),
        ])  # fmt: skip
    limits = found[0]["limits"]
    note = (
        f"{found[0]['model']}, {found[0]['adapters']} adapters of rank {found[0]['rank']}. "
        "Milliseconds: median (least). The limit: the touched experts' bytes or the arithmetic, at "
        f"the rates of the run (the first case's: {limits['read_gb_s']:.0f} GB/s, "
        f"{limits['product_gflops']:.0f} GFLOP/s)."
    )
    return f"{note}\n\n{text_table(header, rows)}"


def _ms(way: Record) -> str:
    return f"{way['us'] / 1e3:.2f} ({way['us_least'] / 1e3:.2f})"


def _model(record: Record) -> str:
    shape = record["shape"]
    rows = [[name, _ms(way)] for name, way in record["ways"].items()]
    return (
        f"Decode of {shape['adapters']} rows, each with its own adapter of rank {shape['rank']}; "
        f"{shape['layers']} layers, H={shape['hidden']} I={shape['intermediate']} "
        f"E={shape['num_experts']} K={shape['top_k']}, fp32: milliseconds per step.\n\n"
        + text_table(("way", "median (least)"), rows)
    )


def cpu_line(record: Record) -> str:
    """Return a record in one line, for those who watch a run."""
    ways = ", ".join(f"{name} {way['us'] / 1e3:.2f}" for name, way in record["ways"].items())
    return f"  {_case(record)}, ms: {ways}"
