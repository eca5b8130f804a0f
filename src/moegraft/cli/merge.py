"""``moegraft merge``: a plain checkpoint with an adapter added to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moegraft.cli import read_options
from moegraft.cli.models import meta_model, quiet_libraries
from moegraft.cli.output import Outcome, check_mark, lines, megabytes, stdout_console, step
from moegraft.errors import count


def merge(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    adapter: Annotated[Path, typer.Argument(help="Adapter folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    skip: read_options.Skip = None,
    only: read_options.Only = None,
    orientation: read_options.Orientation = None,
    expert_b_layout: read_options.ExpertBLayout = None,
    gate_up_rows: read_options.GateUpRows = None,
    adapter_root: read_options.AdapterRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Outcome:
    """Write a copy of a model with an adapter added to its weights, for programs without LoRA.

    Shard by shard and tensor by tensor: the model is never in memory as a whole.
    """
    from moegraft.adapters import bind, check_bound, read_adapter
    from moegraft.adapters.merge import merge as merge_adapter
    from moegraft.errors import AdapterError
    from moegraft.hosts.transformers.spec import model_spec

    options = read_options.of_one(skip, orientation, expert_b_layout, gate_up_rows, only)
    if out.exists():
        raise AdapterError(f"{str(out)!r} exists already; give a folder that does not.")
    source = read_adapter(adapter, read_options.file_policy(adapter_root))
    with quiet_libraries(), step(f"Building {model} from its config, without weights"):
        spec = model_spec(meta_model(model))
    bound = bind(source, spec, options)
    check_bound(bound.report, spec)
    with step(f"Merging into {out}"):
        merged = merge_adapter(model, bound, spec, out)
    document: dict[str, Any] = {
        "model": str(model),
        "adapter": str(adapter),
        "out": str(out),
        "layouts": dict(bound.report.layouts),
        "files": list(merged.files),
        "bytes": merged.num_bytes,
        "tensors": merged.total,
        "changed": list(merged.changed),
        "skipped": list(bound.report.skipped),
        "left_out": {site: list(parts) for site, parts in bound.report.left_out.items()},
        "notes": list(bound.report.notes),
    }
    if not as_json:
        console = stdout_console()
        lines(console, [f"read    {name}: {why}" for name, why in bound.report.layouts.items()])
        lines(console, [f"note    {note}" for note in bound.report.notes])
        console.print(
            check_mark(console, True),
            f"{out}: {count(len(merged.files), 'weight file')} ({megabytes(merged.num_bytes)}), "
            f"{len(merged.changed)} of {count(merged.total, 'tensor')} changed.",
        )
    return Outcome(document)
