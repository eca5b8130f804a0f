"""What ``bench cpu`` does, for ``moegraft bench`` and for ``python -m moegraft.bench`` alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from moegraft.bench import records
from moegraft.bench.commands import Result, collect
from moegraft.bench.cpu import BAR_SHAPE, CpuOptions, run_cpu
from moegraft.bench.cpu_model import SmallModel
from moegraft.bench.cpu_plot import plot_cpu
from moegraft.bench.cpu_report import cpu_line, cpu_table
from moegraft.bench.plot import check_picture
from moegraft.bench.shapes import model_shape


def cpu_options(model: str | None, small_model: bool, **options: Any) -> CpuOptions:
    """Return checked options; ``model`` None = the shape that has bars."""
    return CpuOptions(
        shape=BAR_SHAPE if model is None else model_shape(model),
        model=SmallModel() if small_model else None,
        **options,
    )


def measure_cpu(
    options: CpuOptions, *, out: Path | None = None, plot: Path | None = None
) -> Result:
    """Measure layers and a small model on this machine's CPU; write records as they come.

    Raises:
        MoegraftError: transformers or PEFT is missing, a wrong result, or a file that can't be
            written.
    """
    if plot is not None:
        check_picture(plot)
    found = collect(partial(run_cpu, options), out, cpu_line)
    text = cpu_table(found)
    missed = [
        {"part": record["part"], "dtype": record["dtype"], "tokens": record.get("tokens"), **bar}
        for record in found
        for bar in record["bars"]
        if not bar["met"]
    ]
    document: dict[str, Any] = records.rounded({"records": found, "missed": missed})
    if plot is not None:
        document["pictures"] = [str(plot_cpu(found, plot))]
        text += f"\nPicture: {plot}"
    return Result(document, text)
