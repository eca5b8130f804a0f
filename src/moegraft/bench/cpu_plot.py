"""The picture of ``bench cpu``: one MoE layer by T, beside its limit and Transformers' experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moegraft.bench.curves import BASE, FAINT, INK
from moegraft.bench.plot import picture_library, save_picture
from moegraft.bench.records import Record
from moegraft.errors import MoegraftError

_COLOURS = {
    "limit": BASE, "grouped_mm": "#b3592d", "eager": "#d9a441", "base": INK, "LoRA": "#2a7f62",
}  # fmt: skip


def plot_cpu(found: Sequence[Record], path: Path) -> Path:
    """Draw a panel per dtype: milliseconds per layer over T, both logarithmic; returns ``path``.

    Of two records of the same dtype and T the later counts.

    Raises:
        MoegraftError: no matplotlib, nothing to draw, or a file that can't be written.
    """
    panels: dict[str, dict[int, Record]] = {}
    for record in found:
        if record["part"] == "layer":
            panels.setdefault(record["dtype"], {})[record["tokens"]] = record
    panels = {dtype: rows for dtype, rows in panels.items() if len(rows) > 1}
    if not panels:
        raise MoegraftError("There is nothing to draw: no layer was measured at two or more T.")
    plt = picture_library()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.6 * len(panels), 4.0), squeeze=False, facecolor="white"
    )
    for axis, (dtype, rows) in zip(axes.flat, panels.items(), strict=True):
        _panel(axis, dtype, [rows[tokens] for tokens in sorted(rows)])
    last = next(iter(reversed(panels[next(iter(panels))].values())))
    figure.text(
        0.01, 0.01,
        f"{last['device']}, {last['threads']} threads, {last['instructions'] or 'no compiler'}, "
        f"commit {last['commit']}; {last['model']}, {last['adapters']} adapters of rank "
        f"{last['rank']}; medians. Limit: touched bytes or arithmetic at rates of the same run.",
        fontsize=6.5, color=BASE,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    save_picture(plt, figure, path)
    return path


def _panel(axis: Any, dtype: str, rows: Sequence[Record]) -> None:
    tokens = [row["tokens"] for row in rows]
    ours = rows[0]["backends"][0]
    lines = {
        "grouped_mm": [row["ways"]["grouped_mm"]["us"] for row in rows],
        "eager": [row["ways"]["eager"]["us"] for row in rows],
        "LoRA": [row["ways"][f"{ours} lora"]["us"] for row in rows],
        "base": [row["ways"][f"{ours} base"]["us"] for row in rows],
        "limit": [row["limit_us"] for row in rows],
    }
    for name, values in lines.items():
        axis.plot(
            tokens, [value / 1e3 for value in values], "--" if name == "limit" else "-",
            color=_COLOURS[name], marker="o", markersize=3, label=name,
            linewidth=2.2 if name in ("base", "LoRA") else 1.4,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [str(t) for t in tokens])
    axis.minorticks_off()
    axis.set_title(dtype, fontsize=10, loc="left")
    axis.set_xlabel("tokens in the batch")
    axis.set_ylabel("milliseconds per layer")
    axis.grid(color=FAINT, linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(frameon=False, fontsize=8.5)
