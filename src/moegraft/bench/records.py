"""Records of measurements: JSON lines that say what ran where; needs no torch to read."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from moegraft._version import __version__
from moegraft.errors import MoegraftError

Record = dict[str, Any]
DECODE, END_TO_END, TUNE = "moegraft.decode/1", "moegraft.e2e/1", "moegraft.tune/1"
LOAD, PREFILL, CPU = "moegraft.load/1", "moegraft.prefill/1", "moegraft.cpu/1"
#: What a record is drawn from.
_LAYER = (
    "model", "tokens", "rank", "adapters", "live", "slots", "kind", "limits", "limit_us",
    "base", "modes", "peers", "device", "commit",
)  # fmt: skip
_FIELDS = {DECODE: _LAYER, PREFILL: (*_LAYER, "batch")}
_PACKAGES = ("torch", "triton", "transformers")


def header(schema: str, commit: str | None = None) -> Record:
    """Return what every record begins with: schema, date, commit, versions, device."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "schema": schema,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or git_commit(),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "versions": {"moegraft": __version__, **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path | None = None) -> str:
    """Return the commit of the clone that this file is in, ``-dirty`` when changed; ``unknown``."""
    where = folder or Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(where), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def rounded(value: Any, digits: int = 5) -> Any:
    """Return a document with its floats at this many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value


def check_writable(path: Path) -> None:
    """Raise :class:`MoegraftError` now rather than after a measurement; makes the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise MoegraftError(f"The records can't be written to {path}: {error}.") from error


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file, which is made when it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(rounded(record)) + "\n")
    except OSError as error:
        raise MoegraftError(f"The records can't be written to {path}: {error}.") from error


def read(paths: Iterable[Path], schema: str) -> list[Record]:
    """Return the records of one schema; MoegraftError names the line that is none.

    Of records of the same case the later one counts when they are drawn; all are returned.
    """
    found = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MoegraftError(f"The records {path} can't be read: {error}.") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise MoegraftError(f"{path}, line {number}, is no JSON: {error}.") from error
            if isinstance(record, dict) and record.get("schema") == schema:
                missing = [name for name in _FIELDS.get(schema, ()) if name not in record]
                if missing:
                    raise MoegraftError(
                        f"{path}, line {number}: the record lacks {', '.join(missing)}."
                    )
                found.append(record)
    return found
