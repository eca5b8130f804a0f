"""``moegraft inspect``: what is in an adapter folder, and how it would bind to a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moegraft.cli import read_options
from moegraft.cli.models import meta_model, quiet_libraries
from moegraft.cli.output import (
    Outcome,
    check_mark,
    head,
    lines,
    megabytes,
    stdout_console,
    step,
    visible,
)
from moegraft.errors import MoegraftError, count

if TYPE_CHECKING:
    from moegraft import ReadOptions

_NAMES_SHOWN = 3


def inspect(
    adapter: Annotated[Path, typer.Argument(help="Adapter folder (PEFT).")],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the model; its config.json is enough, no weights are read."),
    ] = None,
    skip: read_options.Skip = None,
    only: read_options.Only = None,
    orientation: read_options.Orientation = None,
    expert_b_layout: read_options.ExpertBLayout = None,
    gate_up_rows: read_options.GateUpRows = None,
    adapter_root: read_options.AdapterRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Outcome:
    """Say what an adapter holds and, with --model, what of it would be served.

    Exit code 0 when all of it binds to the model, 2 when it would be refused.
    """
    from moegraft.adapters import read_adapter
    from moegraft.cli.adapter_facts import config_facts, guesses, tensor_groups

    options = read_options.of_one(skip, orientation, expert_b_layout, gate_up_rows, only)
    if model is None and read_options.given(options):
        raise MoegraftError(
            "--skip, --only, --orientation, --expert-b-layout and --gate-up-rows need --model: "
            "without it nothing is bound."
        )
    source = read_adapter(adapter, read_options.file_policy(adapter_root))
    document: dict[str, Any] = {
        "adapter": str(adapter),
        "config": config_facts(source),
        "tensors": tensor_groups(source),
        "guesses": guesses(source),
    }
    code = 0
    if model is not None:
        document["model"] = str(model)
        document["read_options"] = read_options.given(options)
        document["binding"] = _bind(source, model, options)
        if not document["binding"]["binds"]:
            document["error"] = document["binding"]["error"]
            code = 2
    if not as_json:
        console = stdout_console()
        _render_file(console, document)
        if model is not None:
            _render_binding(console, document["binding"])
    return Outcome(document, code)


def _bind(source: Any, folder: Path, options: ReadOptions) -> dict[str, Any]:
    """Bind to the model of a config.json; JSON-ready."""
    from moegraft.adapters import bind, check_bound, estimate_bytes
    from moegraft.adapters.bind import excusable, is_of_another_model
    from moegraft.cli.coverage import coverage
    from moegraft.errors import AdapterError
    from moegraft.hosts.transformers.spec import model_spec

    with quiet_libraries(), step(f"Building {folder} from its config, without weights"):
        host = meta_model(folder)
        spec = model_spec(host)
    bound = bind(source, spec, options)
    report = bound.report
    error = None
    try:
        check_bound(report, spec)
    except AdapterError as refusal:
        error = str(refusal)
    hint = None
    if is_of_another_model(report):
        hint = "Was it trained for another model?"
    elif report.bound and excusable(report):
        hint = "To serve the rest, leave refused tensors out by name: --skip 'REGEX'."
    dtype = next(host.parameters()).dtype
    return {
        "binds": error is None,
        "error": error,
        "memory": estimate_bytes(bound, spec, dtype).to_dict() if error is None else None,
        "hint": hint,
        "model_class": type(host).__name__,
        "coverage": [
            {**c.to_dict(), "layers_text": c.layers_text, "experts_text": c.experts_text}
            for c in coverage(report, spec)
        ],
        "report": report.to_dict(),
    }


def _render_file(console: Console, document: dict[str, Any]) -> None:
    head(console, "Adapter", document["adapter"])
    _facts(console, {name: _value(value) for name, value in document["config"].items()})
    head(console, "Tensors")
    table = _table("place", "factors", "tensors", "size")
    for module, groups in _by_place(document["tensors"]).items():
        table.add_row(
            visible(module).removeprefix("model.").replace(".base_layer", ".(wrapped)"),
            "\n".join(_shapes(group) for group in groups),
            f"{sum(group['count'] for group in groups)} {_dtypes(groups)}",
            megabytes(sum(group["bytes"] for group in groups)),
        )
    console.print(table)
    head(console, "Guesses from names and shapes")
    lines(console, document["guesses"])


def _render_binding(console: Console, binding: dict[str, Any]) -> None:
    report = binding["report"]
    head(console, "On the model", binding["model_class"])
    layouts = [f"{name}: {evidence}" for name, evidence in report["layouts"].items()]
    lines(console, layouts or ["no layout was recognised"])
    if binding["coverage"]:
        table = _table("bound place", "layers", "experts", "rank", "scale")
        for cover in binding["coverage"]:
            shared = f" (shared {cover['shared']})" if cover["shared"] else ""
            shared += f" + {cover['vectors']}" if cover["vectors"] else ""
            table.add_row(
                cover["place"].removeprefix("model."),
                cover["layers_text"],
                cover["experts_text"],
                ", ".join(map(str, cover["ranks"])) + shared,
                ", ".join(f"{scale:g}" for scale in cover["scales"]),
            )
        console.print(table)
    if report["refused"]:
        head(console, "Refused")
        for reason, names in _by_reason(report["refused"]).items():
            lines(console, [f"{count(len(names), 'tensor')}: {reason}"], style="red")
            lines(console, _first(names), indent=4)
    if report["skipped"]:
        head(console, "Skipped", count(len(report["skipped"]), "tensor"))
        lines(console, _first(report["skipped"]))
    if report["notes"]:
        head(console, "Notes")
        lines(console, report["notes"])
    console.print()
    verdict = "would be refused; nothing would be loaded"
    if binding["binds"]:
        verdict = "binds without what was skipped" if report["skipped"] else "binds in full"
    size = f" ({megabytes(report['num_bytes'])})" if report["bound"] else ""
    console.print(
        check_mark(console, binding["binds"]),
        f"{report['bound']} of {count(report['total'], 'tensor')} can be bound{size}: the adapter "
        f"{verdict}.",
    )
    memory = binding["memory"]
    if memory:
        console.print(f"  In the bank it takes {memory['num_bytes']:,} bytes ({memory['dtype']}).")
    if binding["hint"]:
        lines(console, [binding["hint"]])


def _first(names: Sequence[str]) -> list[str]:
    more = len(names) - _NAMES_SHOWN
    return [*names[:_NAMES_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _by_place(groups: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        found.setdefault(group["module"], []).append(group)
    return found


def _shapes(group: dict[str, Any]) -> str:
    kind = group["kind"].removeprefix("lora_")
    low, high = group["shapes"][0], group["shapes"][-1]
    return f"{kind} {low}" if low == high else f"{kind} {low} .. {high}"


def _dtypes(groups: list[dict[str, Any]]) -> str:
    return "/".join(sorted({dtype for group in groups for dtype in group["dtypes"]}))


def _by_reason(refused: dict[str, str]) -> dict[str, list[str]]:
    """Group names by reason; reasons that differ only in the layer are one."""
    found: dict[str, list[str]] = {}
    for name, reason in refused.items():
        found.setdefault(re.sub(r"\blayers\.\d+", "layers.*", reason), []).append(name)
    return found


def _facts(console: Console, facts: dict[str, str]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(f"  {name}", Text(visible(value)))
    console.print(grid)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, overflow="fold" if index == 0 else "ellipsis", no_wrap=index > 0)
    return table


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
