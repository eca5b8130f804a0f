"""How to read adapter files: ``--skip``, ``--only``, ``--orientation``, ``--expert-b-layout``,
``--gate-up-rows`` and their root.

``generate`` has several adapters, so there each may start with ``NAME=``: it then holds for that
adapter only. Without it, it holds for all; what names an adapter comes before what does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moegraft.errors import MoegraftError

if TYPE_CHECKING:
    from moegraft import FilePolicy, ReadOptions

SKIP_HELP = "Leave out the tensors whose names match; may be repeated."
ONLY_HELP = (
    "Keep these parts alone: experts, linear, router; gate, up, down (of experts). May be repeated."
)
ORIENTATION_HELP = "Of 3-D expert parameters, where neither shapes nor PEFT's version tell it."
B_LAYOUT_HELP = (
    "Order of the columns of a fused B, where the file's own marker is missing or wrong."
)
GATE_UP_ROWS_HELP = "Order of B's rows in a 3-D gate_up_proj, on models that interleave their own."

Skip = Annotated[list[str] | None, typer.Option(metavar="REGEX", help=SKIP_HELP)]
Only = Annotated[list[str] | None, typer.Option(metavar="PART", help=ONLY_HELP)]
Orientation = Annotated[Literal["normal", "swapped"] | None, typer.Option(help=ORIENTATION_HELP)]
ExpertBLayout = Annotated[
    Literal["rank_major", "grouped_by_expert"] | None, typer.Option(help=B_LAYOUT_HELP)
]
GateUpRows = Annotated[
    Literal["concatenated", "interleaved"] | None, typer.Option(help=GATE_UP_ROWS_HELP)
]
AdapterRoot = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Refuse adapter files outside of it; links are followed."),
]

#: Text before the first "=" that can only be meant as a name; "=" in a regular expression comes
#: behind "(?" or "(?<", and no tensor's name has one.
_NAME = re.compile(r"[\w.\- ]+")


def of_one(
    skip: Sequence[str] | None,
    orientation: Literal["normal", "swapped"] | None,
    expert_b_layout: Literal["rank_major", "grouped_by_expert"] | None,
    gate_up_rows: Literal["concatenated", "interleaved"] | None,
    only: Sequence[str] | None,
) -> ReadOptions:
    """Return the options of a command that reads one adapter."""
    from moegraft import ReadOptions

    return ReadOptions(
        orientation, expert_b_layout, tuple(skip or ()), tuple(only or ()), gate_up_rows
    )


def file_policy(adapter_root: Path | None) -> FilePolicy:
    """Return the policy of ``--adapter-root``; default limits, and None = anywhere."""
    from moegraft import FilePolicy

    return FilePolicy(root=adapter_root)


def per_adapter(
    adapters: Collection[str],
    skip: Sequence[str],
    orientation: Sequence[str],
    expert_b_layout: Sequence[str],
    gate_up_rows: Sequence[str] = (),
    only: Sequence[str] = (),
) -> dict[str, ReadOptions]:
    """Read ``[NAME=]VALUE`` options into one :class:`moegraft.ReadOptions` per adapter.

    Raises:
        MoegraftError: a NAME that is no adapter, two values for one adapter, a bad value, or no
            adapter at all that they could hold for.
    """
    from moegraft import ReadOptions

    if not adapters and (skip or only or orientation or expert_b_layout or gate_up_rows):
        raise MoegraftError(
            "--skip, --only, --orientation, --expert-b-layout and --gate-up-rows say how to read "
            "an adapter, but no --adapter is given."
        )
    skips = [_split("--skip", value, adapters) for value in skip]
    parts = [_split("--only", value, adapters) for value in only]
    orientations = _one_each("--orientation", orientation, adapters)
    b_layouts = _one_each("--expert-b-layout", expert_b_layout, adapters)
    rows = _one_each("--gate-up-rows", gate_up_rows, adapters)
    fields: dict[str, Any]
    found = {}
    for name in adapters:
        fields = {
            "skip": tuple(pattern for owner, pattern in skips if owner in (name, None)),
            "only": tuple(part for owner, part in parts if owner in (name, None)),
            "orientation": orientations.get(name, orientations.get(None)),
            "expert_b_layout": b_layouts.get(name, b_layouts.get(None)),
            "gate_up_rows": rows.get(name, rows.get(None)),
        }
        found[name] = ReadOptions(**fields)
    return found


def given(options: ReadOptions) -> dict[str, Any]:
    """Return what differs from the defaults; JSON-ready."""
    return {name: value for name, value in asdict(options).items() if value}


def _one_each(
    option: str, values: Sequence[str], adapters: Collection[str]
) -> dict[str | None, str]:
    found: dict[str | None, str] = {}
    for value in values:
        name, choice = _split(option, value, adapters)
        if name in found:
            whose = "all adapters" if name is None else f"adapter {name!r}"
            raise MoegraftError(f"{option} {value!r}: {whose} already got {found[name]!r}.")
        found[name] = choice
    return found


def _split(option: str, value: str, adapters: Collection[str]) -> tuple[str | None, str]:
    """Return (adapter or None for all, value)."""
    name, equals, rest = value.partition("=")
    if equals and name in adapters:
        return name, rest
    if equals and _NAME.fullmatch(name):
        loaded = ", ".join(adapters) or "none"
        raise MoegraftError(
            f"{option} {value!r}: there is no adapter {name!r}; given with --adapter: {loaded}."
        )
    return None, value
