"""``moegraft bench``: measurements on a GPU or a CPU, and pictures of their records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegraft.bench.options import (
    AUTO,
    CPU_TOKENS,
    DECODE_TOKENS,
    UNQUANTIZED,
    decode_requests,
    default_models,
    suite_requests,
)
from moegraft.bench.prefill_options import (
    PREFILL_TOKENS,
    SEQUENCES,
    default_prefill_models,
    prefill_requests,
    prefill_suite,
)
from moegraft.cli.output import Outcome, stdout_console

app = typer.Typer(
    name="bench",
    help="Measure: a layer beside its limit and its peers, whole models, loading.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Commit = Annotated[str | None, typer.Option(help="Written to the records; else asked from git.")]
Model = Annotated[
    list[str] | None,
    typer.Option(
        help="Name of a shape, or E,H,I,K; may be repeated. [default: q30, q35; of a --format "
        "those it has bars for]"
    ),
]
Tokens = Annotated[str, typer.Option(help="Batch sizes T.")]
Ranks = Annotated[str, typer.Option(help="Ranks.")]
Live = Annotated[str, typer.Option(help="Adapters that the batch uses.")]
Slots = Annotated[int, typer.Option(help="Adapters that are loaded.")]
Kinds = Annotated[str, typer.Option(help="separate, fused, shared_outer.")]
Modes = Annotated[str, typer.Option(help="auto, in_kernel, fused_serial, two_stream, serial.")]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Of the experts' weights: fp8-block, fp8-block-w8a16, fp8-channel, fp8-tensor, "
        "nvfp4, mxfp4; measured beside bf16.",
    ),
]
Suite = Annotated[
    str | None, typer.Option(help="record or quick: a fixed list of cases per model.")
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw FILE, FILE-limit and FILE-retention (png, svg, pdf).")
]
Out = Annotated[Path | None, typer.Option(help="Append a JSON line per result to this file.")]


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Measure: a layer beside its limit and its peers, whole models, loading."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def outcome(result: object, as_json: bool) -> Outcome:
    """Print a result's text, unless JSON was asked for, and pass it on."""
    from moegraft.bench.commands import Result

    assert isinstance(result, Result)
    if not as_json:
        stdout_console().print(result.text, soft_wrap=True)
    return Outcome(result.document, result.exit_code)


@app.command("decode")
def decode(
    model: Model = None,
    tokens: Tokens = DECODE_TOKENS,
    rank: Ranks = "16",
    adapters: Live = "8",
    slots: Slots = 64,
    kind: Kinds = "separate",
    cold: Annotated[bool, typer.Option(help="Also single calls after a flush of the L2.")] = False,
    modes: Modes = AUTO,
    weight_format: Format = UNQUANTIZED,
    suite: Suite = None,
    repeats: Annotated[int, typer.Option(help="Replays; the median counts.")] = 50,
    commit: Commit = None,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> Outcome:
    """Time one MoE layer: base, LoRA, its limit, torch's grouped products, peers' figures."""
    from moegraft.bench import commands

    models = model or default_models(weight_format)
    if suite is None:
        requests = decode_requests(
            models, tokens, rank, adapters, slots, kind, modes, weight_format
        )
    else:
        requests = suite_requests(suite, models, weight_format)
    result = commands.decode(
        requests, repeats=repeats, cold=cold, commit=commit, out=out, plot=plot
    )
    return outcome(result, as_json)


@app.command("prefill")
def prefill(
    model: Model = None,
    tokens: Tokens = PREFILL_TOKENS,
    rank: Ranks = "16",
    adapters: Live = "8",
    slots: Slots = 8,
    kind: Kinds = "separate",
    batch: Annotated[
        str, typer.Option(help="How adapters lie: sequences, interleaved, one, base.")
    ] = SEQUENCES,
    modes: Modes = AUTO,
    weight_format: Format = UNQUANTIZED,
    suite: Suite = None,
    repeats: Annotated[int, typer.Option(help="Turns; the median counts.")] = 20,
    commit: Commit = None,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> Outcome:
    """Time one MoE layer at prefill sizes: rates of arithmetic beside the columns of decode."""
    from moegraft.bench import commands

    models = model or default_prefill_models(weight_format)
    if suite is None:
        requests = prefill_requests(
            models, tokens, rank, adapters, slots, kind, batch, modes, weight_format
        )
    else:
        requests = prefill_suite(suite, models, weight_format)
    result = commands.prefill(requests, repeats=repeats, commit=commit, out=out, plot=plot)
    return outcome(result, as_json)


@app.command("plot")
def plot(
    records: Annotated[list[Path], typer.Argument(help="Files that --out wrote.")],
    to: Annotated[Path, typer.Option(help="The first picture: png, svg or pdf.")],
    as_json: AsJson = False,
) -> Outcome:
    """Draw pictures of records of `bench decode` and `bench prefill`, on any machine."""
    from moegraft.bench import commands

    return outcome(commands.plot_records(records, to), as_json)


@app.command("e2e")
def end_to_end(
    layers: Annotated[int, typer.Option(help="Layers; 48 is the whole model, 61 GB.")] = 48,
    batch: Annotated[str, typer.Option(help="Rows.")] = "1,16,64",
    adapters: Annotated[int, typer.Option(help="Adapters, mixed in turn.")] = 8,
    rank: Annotated[int, typer.Option(help="Of each adapter.")] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens per row before the measurement.")] = 256,
    steps: Annotated[int, typer.Option(help="Decode steps.")] = 64,
    commit: Commit = None,
    out: Out = None,
    as_json: AsJson = False,
) -> Outcome:
    """Decode with a random model of Qwen3-30B-A3B's sizes: no adapter, one, several mixed."""
    from moegraft.bench import commands

    result = commands.end_to_end(
        layers=layers,
        batches=batch,
        adapters=adapters,
        rank=rank,
        prompt=prompt,
        steps=steps,
        commit=commit,
        out=out,
    )
    return outcome(result, as_json)


@app.command("load")
def load(
    layers: Annotated[int, typer.Option(help="Layers; 48 make a file of 1.7 GB.")] = 48,
    adapters: Annotated[int, typer.Option(help="Small adapters that are added.")] = 200,
    repeats: Annotated[int, typer.Option(help="Runs of each part; the fastest counts.")] = 5,
    folder: Annotated[
        Path | None, typer.Option(help="Where the file is made. [default: the system's]")
    ] = None,
    commit: Commit = None,
    out: Out = None,
    as_json: AsJson = False,
) -> Outcome:
    """Load a large expert adapter and many small ones, also without a GPU."""
    from moegraft.bench import commands

    result = commands.load(
        layers=layers, adapters=adapters, repeats=repeats, folder=folder, commit=commit, out=out
    )
    return outcome(result, as_json)


@app.command("cpu")
def cpu(
    model: Annotated[
        str | None, typer.Option(help="A SwiGLU shape's name, or E,H,I,K. [default: 32,2048,768,8]")
    ] = None,
    tokens: Tokens = CPU_TOKENS,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16,float32",
    adapters: Annotated[int, typer.Option(help="Adapters that the layer's batch uses.")] = 4,
    rank: Annotated[int, typer.Option(help="Of each adapter.")] = 16,
    backends: Annotated[
        str, typer.Option(help="Of ours; the first is compared. [default: cpp,cpu]")
    ] = "",
    repeats: Annotated[int, typer.Option(help="Turns; the median counts.")] = 15,
    seconds: Annotated[float, typer.Option(help="No turn begins after so long, per case.")] = 20.0,
    threads: Annotated[int | None, typer.Option(help="Of torch. [default: as it is]")] = None,
    small_model: Annotated[
        bool, typer.Option(help="Also a small model's decode against PEFT.")
    ] = True,
    commit: Commit = None,
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw this picture (png, svg, pdf).")] = None,
    as_json: AsJson = False,
) -> Outcome:
    """Time one MoE layer and a small model on this CPU, beside Transformers, PEFT and limits."""
    from moegraft.bench.cpu_command import cpu_options, measure_cpu

    options = cpu_options(
        model=model,
        tokens=tokens,
        dtypes=dtype,
        adapters=adapters,
        rank=rank,
        backends=backends,
        turns=repeats,
        seconds=seconds,
        threads=threads,
        small_model=small_model,
        commit=commit,
    )
    return outcome(measure_cpu(options, out=out, plot=plot), as_json)
