"""What the commands do, for ``moegraft bench`` and for ``python -m moegraft.bench`` alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegraft.bench import records
from moegraft.bench.options import DecodeRequest, decode_requests, parse_ints
from moegraft.bench.prefill_options import PrefillRequest
from moegraft.errors import MoegraftError

if TYPE_CHECKING:
    import torch

    from moegraft.bench.bars import Outcome

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        document: for ``--json``.
        text: for people.
        exit_code: 0, or 1 when something failed its check.
    """

    document: dict[str, Any]
    text: str
    exit_code: int = 0


@contextmanager
def progress() -> Iterator[Say]:
    """Yield what shows on stderr what runs now: a spinner on a terminal with rich, else lines."""
    try:
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    except ImportError:
        console = None
    if console is None or not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update


def collect(
    run: Callable[[Say], Iterator[records.Record]],
    out: Path | None,
    line: Callable[[records.Record], str] | None = None,
) -> list[records.Record]:
    """Return a measurement's records; each is appended to ``out`` when it is there.

    Args:
        run: makes them; what it is given shows what runs now.
        out: JSON lines; MoegraftError before anything runs if it can't be written.
        line: a record for people, shown when it is there.
    """
    if out is not None:
        records.check_writable(out)
    found: list[records.Record] = []
    with progress() as say:
        for record in run(say):
            found.append(record)
            if out is not None:
                records.append(out, record)
            if line is not None:
                say(line(record))
    return found


def decode(
    requests: Sequence[DecodeRequest],
    *,
    repeats: int = 50,
    cold: bool = False,
    commit: str | None = None,
    out: Path | None = None,
    plot: Path | None = None,
) -> Result:
    """Measure decode requests; write records as they come, and pictures at the end.

    On an H200 with the bars of its cases.

    Raises:
        MoegraftError: no GPU, too little memory, or a file that can't be written.
        PlanError: no backend runs a weight format.
    """
    from moegraft.bench.decode import DecodeSettings, run_decode
    from moegraft.bench.decode_bars import decode_bars
    from moegraft.bench.report import decode_table

    def run(device: torch.device, say: Say) -> Iterator[records.Record]:
        return run_decode(requests, device, DecodeSettings(repeats, cold, commit), say)

    return _measure_layers(run, decode_table, decode_bars, repeats, out, plot)


def prefill(
    requests: Sequence[PrefillRequest],
    *,
    repeats: int = 20,
    commit: str | None = None,
    out: Path | None = None,
    plot: Path | None = None,
) -> Result:
    """Measure prefill requests; otherwise as :func:`decode`.

    Raises:
        MoegraftError: no GPU, too little memory, or a file that can't be written.
        PlanError: no backend runs a weight format.
    """
    from moegraft.bench.prefill import PrefillSettings, run_prefill
    from moegraft.bench.prefill_bars import prefill_bars
    from moegraft.bench.prefill_report import prefill_table

    def run(device: torch.device, say: Say) -> Iterator[records.Record]:
        return run_prefill(requests, device, PrefillSettings(repeats, commit), say)

    return _measure_layers(run, prefill_table, prefill_bars, repeats, out, plot)


def _measure_layers(
    run: Callable[[torch.device, Say], Iterator[records.Record]],
    table: Callable[[Sequence[records.Record]], str],
    bars: Callable[[Sequence[records.Record]], list[Outcome]],
    repeats: int,
    out: Path | None,
    plot: Path | None,
) -> Result:
    """Run a measurement of layers on the GPU: records to ``out``, pictures to ``plot``."""
    from moegraft.bench.bars import bars_table
    from moegraft.bench.decode import wrong
    from moegraft.bench.harness import require_gpu
    from moegraft.bench.plot import check_picture
    from moegraft.bench.report import decode_line

    if repeats < 1:
        raise MoegraftError(f"--repeats must be at least 1, got {repeats}.")
    device = require_gpu()
    if plot is not None:
        check_picture(plot)
    found = collect(partial(run, device), out, decode_line)
    reached = bars(records.rounded(found))
    document: dict[str, Any] = {
        "records": records.rounded(found),
        "wrong": wrong(found),
        "bars": [outcome.record() for outcome in reached],
    }
    text = "\n\n".join(filter(None, (table(found), bars_table(reached))))
    if plot is not None:
        from moegraft.bench.plot import plot_layers

        pictures = [str(path) for path in plot_layers(found, plot)]
        document["pictures"] = pictures
        text += "\nPictures: " + ", ".join(pictures)
    return Result(document, text, exit_code=1 if document["wrong"] else 0)


def plot_records(files: Sequence[Path], to: Path) -> Result:
    """Draw pictures of decode and prefill records that were written before."""
    from moegraft.bench.plot import check_picture, plot_layers
    from moegraft.bench.prefill_report import prefill_table
    from moegraft.bench.report import decode_table

    check_picture(to)
    decoded, prefilled = (records.read(files, s) for s in (records.DECODE, records.PREFILL))
    if not decoded and not prefilled:
        names = ", ".join(str(path) for path in files)
        raise MoegraftError(
            f"There are no records of `bench decode` or `bench prefill` in {names}."
        )
    pictures = [str(path) for path in plot_layers([*decoded, *prefilled], to)]
    tables = [decode_table(decoded)] if decoded else []
    tables += [prefill_table(prefilled)] if prefilled else []
    text = "\n\n".join(tables) + "\nPictures: " + ", ".join(pictures)
    return Result({"records": len(decoded) + len(prefilled), "pictures": pictures}, text)


def end_to_end(
    *,
    layers: int = 48,
    batches: str = "1,16,64",
    adapters: int = 8,
    rank: int = 16,
    prompt: int = 256,
    steps: int = 64,
    commit: str | None = None,
    out: Path | None = None,
) -> Result:
    """Measure a whole model's decode speed; write records as they come.

    Raises:
        MoegraftError: no GPU, no transformers, too little memory, or a file that can't be written.
    """
    from moegraft.bench.e2e import EndToEndOptions, run_e2e
    from moegraft.bench.e2e_model import WholeModel
    from moegraft.bench.harness import require_gpu
    from moegraft.bench.report import e2e_table

    rows = parse_ints(batches, "--batch")
    model = WholeModel(layers=layers)
    options = EndToEndOptions(model, rows, adapters, rank, prompt, steps, commit)
    device = require_gpu()
    found = collect(partial(run_e2e, options, device), out)
    errors = [record["error"] for record in found if "error" in record]
    document = {"records": records.rounded(found), "wrong": errors}
    return Result(document, e2e_table(found), exit_code=1 if errors else 0)


def load(
    *,
    layers: int = 48,
    adapters: int = 200,
    repeats: int = 5,
    folder: Path | None = None,
    commit: str | None = None,
    out: Path | None = None,
) -> Result:
    """Measure how fast adapters are loaded; write records as they come. A CPU does without slots.

    Raises:
        MoegraftError: no room for the file, or records that can't be written.
    """
    from moegraft.bench.load import LoadOptions, run_load
    from moegraft.bench.load_case import LoadCase
    from moegraft.bench.report import load_table

    options = LoadOptions(LoadCase(layers=layers), adapters, repeats, folder, commit)
    found = collect(partial(run_load, options), out)
    missed = [record["part"] for record in found if not record.get("met", True)]
    document = {"records": records.rounded(found), "missed": missed}
    return Result(document, load_table(found))


def tune(
    models: Sequence[str],
    *,
    tokens: str = "1,4,16,64,256",
    ranks: str = "16,64",
    seconds: float = 60.0,
    wide: bool = False,
    commit: str | None = None,
    out: Path | None = None,
) -> Result:
    """Search tiles for this GPU and put them into a table; None = the one that the backend reads.

    Raises:
        MoegraftError: no GPU, or a table that can't be used.
    """
    from moegraft.bench.harness import require_gpu

    if not seconds > 0:
        raise MoegraftError(f"--seconds must be above 0, got {seconds:g}.")
    requests = decode_requests(models, tokens, ranks, adapters="8", slots=8)
    device = require_gpu()

    import torch

    from moegraft.backends.triton.tuned_tiles import FOLDER, tuned_file
    from moegraft.bench.report import tune_table
    from moegraft.bench.tune import run_tune
    from moegraft.bench.tuned_table import read_table, write_tuned

    name = torch.cuda.get_device_name()
    path = out or FOLDER / tuned_file(name)
    read_table(path, name)
    found: list[records.Record] = []
    with progress() as say:
        tuned = run_tune(requests, device, seconds=seconds, wide=wide, commit=commit, say=say)
        for record in tuned:
            found.append(record)
            write_tuned(path, [record])
    text = f"{tune_table(found)}\nTiles of {len(found)} problems are in {path}."
    return Result({"records": records.rounded(found), "file": str(path)}, text)
