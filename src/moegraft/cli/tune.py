"""``moegraft tune``: find the tiles of the decode kernels for this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegraft.cli.bench import AsJson, Commit, outcome
from moegraft.cli.output import Outcome


def tune(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Name of a shape, or E,H,I,K; may be repeated. [default: q30, q35]"),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="The same as --model, for E,H,I,K.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Batch sizes T.")] = "1,4,16,64,256",
    rank: Annotated[str, typer.Option(help="Ranks.")] = "16,64",
    seconds: Annotated[float, typer.Option(help="Search this long per case, about.")] = 60.0,
    wide: Annotated[bool, typer.Option(help="Also all tiles that the backend proposes.")] = False,
    commit: Commit = None,
    out: Annotated[
        Path | None, typer.Option(help="The table. [default: the one that the backend reads]")
    ] = None,
    as_json: AsJson = False,
) -> Outcome:
    """Find tiles for this GPU, each checked before it is timed, and write them to a table."""
    from moegraft.bench import commands

    models = [*(model or []), *(shape or [])] or ["q30", "q35"]
    result = commands.tune(
        models, tokens=tokens, ranks=rank, seconds=seconds, wide=wide, commit=commit, out=out
    )
    return outcome(result, as_json)
