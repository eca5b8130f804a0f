"""The file that ``tune`` writes and the Triton backend reads: tuned tiles of one device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moegraft.backends.triton.tuned_tiles import load_tuned
from moegraft.bench import records
from moegraft.errors import MoegraftError


def write_tuned(path: Path, found: Sequence[records.Record]) -> int:
    """Put results into a table of tuned tiles; returns how many entries it has then.

    The table is JSON: ``device``, and ``entries`` of ``problem`` (fields of
    :class:`moegraft.problem.Problem`), ``config`` (fields of ``FusedConfig``), ``base_us``,
    ``lora_us``, ``versions``, ``commit`` and ``date``. Entries of the same problem are replaced.

    Raises:
        MoegraftError: the file is of another device, is no such table, or can't be written.
    """
    document = read_table(path, found[0]["device"])
    new = [_entry(record) for record in found]
    problems = [entry["problem"] for entry in new]
    kept = [entry for entry in document["entries"] if entry["problem"] not in problems]
    document["entries"] = kept + new
    written = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(document, indent=1) + "\n")
        written.replace(path)  # an interrupt leaves the old table or the new one, never a part
    except OSError as error:
        raise MoegraftError(f"The table of tiles can't be written to {path}: {error}.") from error
    load_tuned.cache_clear()
    return len(document["entries"])


def read_table(path: Path, device: str) -> dict[str, Any]:
    """Return a device's table of tuned tiles; an empty one where there is no file.

    Raises:
        MoegraftError: the file is of another device, or is no such table.
    """
    if not path.exists():
        return {"device": device, "entries": []}
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise MoegraftError(f"{path} can't be used as a table of tiles: {error}.") from error
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "problem" in entry for entry in entries
    ):
        raise MoegraftError(
            f"{path} can't be used as a table of tiles: it has no list of entries, each with a "
            "problem. Delete it, or give another --out."
        )
    if document.get("device") != device:
        raise MoegraftError(f"{path} is for {document.get('device')!r}, this is {device!r}.")
    return document


def _entry(record: records.Record) -> dict[str, Any]:
    after = record["after"]
    return {
        "problem": record["problem"],
        "config": after["config"],
        **records.rounded({"base_us": after["base_us"], "lora_us": after["lora_us"]}, 4),
        **{name: record[name] for name in ("versions", "commit", "date")},
    }
