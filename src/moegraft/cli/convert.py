"""``moegraft convert``: write an adapter in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moegraft.cli import read_options
from moegraft.cli.models import meta_model, quiet_libraries
from moegraft.cli.output import Outcome, check_mark, lines, megabytes, stdout_console, step
from moegraft.errors import count

Layout = Literal["peft", "per-expert", "3d", "shared-outer"]


def convert(
    adapter: Annotated[Path, typer.Argument(help="Adapter folder to read.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    to: Annotated[Layout, typer.Option(help="Layout to write.")],
    model: Annotated[Path, typer.Option(help="Folder of the model; its config.json is enough.")],
    rank: Annotated[
        int | None,
        typer.Option(help="Refit larger ranks to this one, which is not exact; says the error."),
    ] = None,
    skip: read_options.Skip = None,
    only: read_options.Only = None,
    orientation: read_options.Orientation = None,
    expert_b_layout: read_options.ExpertBLayout = None,
    gate_up_rows: read_options.GateUpRows = None,
    adapter_root: read_options.AdapterRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Outcome:
    """Write an adapter in another layout, with the very same delta for every expert.

    What the layout can't hold exactly is refused; only --rank gives exactness up.
    """
    from moegraft.adapters import read_adapter
    from moegraft.adapters.convert import convert as convert_adapter
    from moegraft.errors import AdapterError
    from moegraft.hosts.transformers.names import expert_names
    from moegraft.hosts.transformers.spec import model_spec

    options = read_options.of_one(skip, orientation, expert_b_layout, gate_up_rows, only)
    if out.exists():
        raise AdapterError(f"{str(out)!r} exists already; give a folder that does not.")
    source = read_adapter(adapter, read_options.file_policy(adapter_root))
    with quiet_libraries(), step(f"Building {model} from its config, without weights"):
        host = meta_model(model)
        spec = model_spec(host)
    names = expert_names(host.config.model_type)
    found = convert_adapter(source, spec, to, options=options, names=names, rank=rank)
    found.save(out)
    num_bytes = sum(t.numel() * t.element_size() for t in found.tensors.values())
    notes = [*found.report.notes, *found.notes]
    document: dict[str, Any] = {
        "adapter": str(adapter),
        "model": str(model),
        "out": str(out),
        "from": dict(found.report.layouts),
        "to": to,
        "exact": found.exact,
        "refit_error": dict(found.refit_error),
        "tensors": {"read": found.report.bound, "written": len(found.tensors)},
        "skipped": list(found.report.skipped),
        "left_out": {site: list(parts) for site, parts in found.report.left_out.items()},
        "bytes": num_bytes,
        "notes": notes,
    }
    if not as_json:
        console = stdout_console()
        lines(console, [f"read    {name}: {why}" for name, why in found.report.layouts.items()])
        lines(console, [f"note    {note}" for note in notes])
        lines(
            console,
            [
                f"refit   {name}: rank {rank}, the delta is up to {error:.2%} off"
                for name, error in found.refit_error.items()
            ],
        )
        how = "the same delta for every expert"
        if not found.exact:
            how = "not exact, see refit" if found.refit_error else f"{how} but for rounding"
        console.print(
            check_mark(console, True),
            f"{out}: {to}, {count(len(found.tensors), 'tensor')} ({megabytes(num_bytes)}), {how}.",
        )
    return Outcome(document)
