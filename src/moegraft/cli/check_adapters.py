"""Bind adapters to a model of its config alone, before any weight is read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moegraft.cli.models import meta_model
from moegraft.cli.output import visible

if TYPE_CHECKING:
    from moegraft import FilePolicy, ReadOptions
    from moegraft.adapters import BindReport


def bind_all(
    model: Path,
    folders: Mapping[str, Path],
    options: Mapping[str, ReadOptions],
    policy: FilePolicy,
) -> dict[str, BindReport]:
    """Bind every adapter to the model of the config alone; raises where loading would."""
    from moegraft.adapters import bind, check_bound, read_adapter
    from moegraft.hosts.transformers.spec import model_spec

    reports: dict[str, BindReport] = {}
    if not folders:
        return reports
    sources = {name: read_adapter(folder, policy) for name, folder in folders.items()}
    spec = model_spec(meta_model(model))
    for name, source in sources.items():
        reports[name] = bind(source, spec, options[name]).report
        check_bound(reports[name], spec)
    return reports


def warn(reports: Mapping[str, BindReport], options: Mapping[str, ReadOptions]) -> None:
    """Print the reports' notes on stderr.

    A pattern of several adapters that matches in one of them did what it is for: no warning.
    """
    from moegraft.adapters.bind import unmatched_skip

    owners: dict[str, list[str]] = {}
    for name, report in reports.items():
        for note in report.notes:
            owners.setdefault(note, []).append(name)
    for pattern in dict.fromkeys(p for o in options.values() for p in o.skip):
        asked = [name for name, option in options.items() if pattern in option.skip]
        if owners.get(unmatched_skip(pattern)) != asked:
            owners.pop(unmatched_skip(pattern), None)
    for note, names in owners.items():
        whose = f"adapter{'s' if len(names) > 1 else ''} {', '.join(names)}"
        print(f"warning: {whose}: {visible(note)}", file=sys.stderr)
