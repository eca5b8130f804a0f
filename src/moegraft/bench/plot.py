"""Pictures of decode and prefill records: time, share of the limit, what LoRA keeps of the base.

Needs matplotlib: ``pip install -e '.[bench]'`` in the clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moegraft.bench.curves import (
    BASE,
    FAINT,
    INK,
    Curve,
    is_chosen,
    kept_curves,
    main_mode,
    share_curves,
    time_curves,
)
from moegraft.bench.options import UNQUANTIZED
from moegraft.bench.prefill_options import BASE_ONLY, INTERLEAVED
from moegraft.bench.records import Record
from moegraft.bench.report import name_of
from moegraft.bench.shapes import MODELS
from moegraft.errors import MoegraftError

_KINDS = {
    "separate": "separate A",
    "fused": "one A for gate and up",
    "shared_outer": "shared outer",
}
_MADE_BY = ("device", "commit")
#: Points between the names of two lines.
_LABEL_STEP = 11


def plot_layers(found: Sequence[Record], path: Path) -> tuple[Path, ...]:
    """Draw three pictures; returns their files.

    One panel per case that has several T; decode and prefill of one case share it. Of two records
    of the same case and T the later counts. ``path`` ``decode.png`` gives ``decode.png`` (time),
    ``decode-limit.png`` (share of the limit) and ``decode-retention.png`` (base over LoRA).

    Raises:
        MoegraftError: no matplotlib, nothing to draw, or a file name that matplotlib refuses.
    """
    panels = _panels(found)
    if not panels:
        raise MoegraftError("There is nothing to draw: no case was measured at two or more T.")
    plt = picture_library()
    with plt.rc_context(
        {"font.size": 10, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
         "xtick.color": INK, "ytick.color": INK, "font.family": "sans-serif"}
    ):  # fmt: skip
        return (
            _draw(plt, panels, time_curves, path, "microseconds per layer", True),
            _draw(plt, panels, share_curves, _named(path, "limit"), "% of the limit"),
            _draw(plt, panels, kept_curves, _named(path, "retention"), "% of the base's speed"),
        )


def check_picture(path: Path) -> None:
    """Raise :class:`MoegraftError` now rather than after a measurement: what a picture needs."""
    known = sorted(picture_library().figure().canvas.get_supported_filetypes())
    picture_library().close("all")
    if path.suffix[1:] not in known:
        raise MoegraftError(
            f"The picture can't be written to {path}: its name must end in one of "
            f"{', '.join('.' + name for name in known)}."
        )


def _named(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}-{word}{path.suffix}")


def picture_library() -> Any:
    """Return pyplot, drawing to files only; MoegraftError when matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise MoegraftError(
            "Pictures need matplotlib: pip install -e '.[bench]' in the clone of moegraft. The "
            "records can be drawn later, on any machine, with `moegraft bench plot`."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _panels(found: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Return title and records of each case by T: of one batch the last with the plan's choice."""
    cases: dict[tuple[Any, ...], dict[tuple[int, bool], Record]] = {}
    for record in found:
        if main_mode(record) is None or record.get("batch") == BASE_ONLY:
            continue
        names = ("model", "rank", "kind", "slots", "adapters")
        key = (*(record[name] for name in names), record.get("weight_format", UNQUANTIZED))
        known = cases.setdefault(key, {})
        where = (record["tokens"], record.get("batch") == INTERLEAVED)
        before = known.get(where)
        if before is None or not is_chosen(before) or is_chosen(record):
            known[where] = record
    panels = []
    for key, by_batch in cases.items():
        if len({tokens for tokens, _ in by_batch}) < 2:
            continue
        model, rank, kind, slots, live, weight_format = key
        title = name_of(MODELS[model].title if model in MODELS else model, weight_format)
        adapters = f"{live} of {slots} adapters" if live > 1 else f"one adapter of {slots}"
        panels.append(
            (
                f"{title}: rank {rank}, {_KINDS[kind]}, {adapters}",
                [by_batch[where] for where in sorted(by_batch)],
            )
        )
    return panels


def _draw(
    plt: Any, panels: Any, curves_of: Any, path: Path, unit: str, time_axis: bool = False
) -> Path:
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6.4 * columns, 4.0 * lines), squeeze=False, facecolor="white"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, rows) in zip(axes.flat, panels, strict=False):
        _panel(
            axis, title, rows, [c for c in curves_of(rows) if len(c.points) > 1], unit, time_axis
        )
    figure.text(0.01, 0.004, _footer(panels), fontsize=7.5, color=BASE)
    figure.tight_layout(rect=(0, 0.09 / lines, 1, 1))
    save_picture(plt, figure, path)
    return path


def save_picture(plt: Any, figure: Any, path: Path) -> None:
    """Write a figure and close it; MoegraftError when it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise MoegraftError(f"The picture can't be written to {path}: {error}.") from error
    finally:
        plt.close(figure)


def _footer(panels: list[tuple[str, list[Record]]]) -> str:
    """Return what was measured where, for all runs that the records are of."""
    rows = [record for _, found in panels for record in found]
    devices, commits = (", ".join(dict.fromkeys(r[name] for r in rows)) for name in _MADE_BY)
    read = _range([r["limits"]["read_gb_s"] / 1e3 for r in rows], ".2f")
    dense = _range([r["limits"]["dense_tflops"] for r in rows], ".0f")
    return (
        f"{devices}, commit {commits}; limit: touched bytes at {read} TB/s or arithmetic at "
        f"{dense} TFLOP/s, measured in the same run;\ndashed: stored figures of peers, scaled by "
        "copy rate; grouped_mm: live, products only."
    )


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _panel(
    axis: Any, title: str, rows: Sequence[Record], curves: list[Curve], unit: str, time_axis: bool
) -> None:
    tokens = sorted({r["tokens"] for r in rows})
    axis.set_xscale("log", base=2)
    if time_axis:
        axis.set_yscale("log")
    for curve in curves:
        axis.plot(
            list(curve.points), list(curve.points.values()), curve.style, color=curve.colour,
            linewidth=2.4 if curve.bold else 1.4, marker="o", markersize=3.5 if curve.bold else 2.5,
        )  # fmt: skip
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xticks(tokens, [_short(t) for t in tokens], fontsize=8.5 if len(tokens) < 10 else 7)
    axis.minorticks_off()
    axis.set_xlabel("tokens in the batch")
    axis.set_ylabel(unit)
    if not time_axis:
        axis.set_ylim(0, max([105.0, *(1.05 * v for c in curves for v in c.points.values())]))
    else:
        _plain_ticks(axis, [v for c in curves for v in c.points.values()])
    axis.grid(color=FAINT, linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.set_xlim(tokens[0] * 0.9, tokens[-1] * (tokens[-1] / tokens[0]) ** 0.38)
    _label(axis, curves)


def _short(tokens: int) -> str:
    """Return 8192 as 8k."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}k"


def _plain_ticks(axis: Any, values: list[float]) -> None:
    marks = [m * 10**p for p in range(6) for m in (1, 2, 5)]
    inside = [m for m in marks if min(values) * 0.8 <= m <= max(values) * 1.25]
    axis.set_yticks(inside, [str(m) for m in inside])
    axis.set_ylim(min(values) * 0.85, max(values) * 1.15)


def _label(axis: Any, curves: list[Curve]) -> None:
    """Write each line's name at the right, at the height of its end, moved apart where close."""
    axis.figure.canvas.draw()
    height = axis.get_window_extent().height / axis.figure.dpi * 72  # points
    to_axis = axis.transScale.transform
    low, high = (to_axis((1, y))[1] for y in axis.get_ylim())
    ends = sorted(
        ((to_axis((1, c.points[max(c.points)]))[1] - low) / (high - low) * height, i)
        for i, c in enumerate(curves)
    )
    right = max(max(c.points) for c in curves)
    placed = _apart([where for where, _ in ends], height)
    for (where, index), at in zip(ends, placed, strict=True):
        curve = curves[index]
        axis.annotate(
            curve.label, (right, curve.points[max(curve.points)]),
            xytext=(6, at - where), textcoords="offset points", va="center", fontsize=8.5,
            color=curve.colour, fontweight="bold" if curve.bold else "normal",
            annotation_clip=False,
        )  # fmt: skip


def _apart(ends: list[float], height: float) -> list[float]:
    """Return ascending places at least a step apart, below ``height`` where there is room."""
    placed: list[float] = []
    for where in ends:
        placed.append(max(where, placed[-1] + _LABEL_STEP) if placed else where)
    top = height - 2.0
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], top)
        top = placed[i] - _LABEL_STEP
    return placed
