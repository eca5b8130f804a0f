"""``moegraft quantize``: a copy of a model with its experts in a weight format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moegraft.cli.models import check_model_folder, meta_model, quiet_libraries
from moegraft.cli.output import Outcome, check_mark, lines, megabytes, stdout_console, step
from moegraft.errors import count


def quantize(
    model: Annotated[Path, typer.Argument(help="Folder of the model, 16 or 32 bits.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    weight_format: Annotated[
        str,
        typer.Option("--format", help="nvfp4, mxfp4, fp8-block, fp8-channel or fp8-tensor."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Outcome:
    """Write a copy of a model with its experts quantised, each value to the nearest.

    In the layouts of other programs: block FP8 as DeepSeek and Qwen have it, NVFP4 as ModelOpt,
    MXFP4 as gpt-oss where gate and up are interleaved, the rest as compressed-tensors. All but the
    experts is copied as it is.
    """
    from moegraft.errors import UnsupportedError
    from moegraft.hosts.transformers.spec import model_spec
    from moegraft.quant import format_of
    from moegraft.quant.write import quantise_checkpoint

    title = format_of(weight_format).title
    check_model_folder(model)
    with quiet_libraries(), step(f"Building {model} from its config, without weights"):
        host = meta_model(model)
        sites = [site for site in model_spec(host).sites if site.kind == "experts"]
    if not sites:
        raise UnsupportedError(f"{str(model)!r} has no experts that moegraft knows.")
    layout = sites[0].layout
    with step(f"Quantising the experts of {count(len(sites), 'layer')}"):
        written = quantise_checkpoint(
            model,
            out,
            weight_format,
            interleaved=layout.gate_up_order == "interleaved",
            transposed=not layout.out_major,
        )
    document: dict[str, Any] = {
        "model": str(model),
        "out": str(out),
        "format": weight_format,
        "files": written.files,
        "bytes": written.num_bytes,
        "expert_bytes": {"before": written.source_bytes, "after": written.expert_bytes},
        "matrices": written.matrices,
        "largest_error": written.largest_error,
        "copied": written.kept,
    }
    if not as_json:
        console = stdout_console()
        before, after = megabytes(written.source_bytes), megabytes(written.expert_bytes)
        lines(
            console,
            [
                f"format  {weight_format}: {title}",
                f"experts {before} -> {after}, {written.matrices} matrices"
                f", |W' - W| / |W| up to {written.largest_error:.2%}",
            ],
        )
        console.print(
            check_mark(console, True),
            f"{out}: {count(len(written.files), 'weight file')} ({megabytes(written.num_bytes)}), "
            f"{count(written.kept, 'other tensor')} copied.",
        )
    return Outcome(document)
