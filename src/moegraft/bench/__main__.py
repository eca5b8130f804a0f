"""``python -m moegraft.bench``: the same commands where typer and rich are not installed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moegraft.bench import commands
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
from moegraft.errors import MoegraftError


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; their options are those of ``moegraft bench``."""
    top = argparse.ArgumentParser(prog="python -m moegraft.bench", description=__doc__)
    found = top.add_subparsers(dest="command", required=True)

    one = found.add_parser("decode", help="one MoE layer at decode sizes")
    _layer_options(one, DECODE_TOKENS, slots=64, repeats=50)
    one.add_argument("--cold", action="store_true")
    one.set_defaults(run=_decode)

    six = found.add_parser("prefill", help="one MoE layer at prefill sizes")
    _layer_options(six, PREFILL_TOKENS, slots=8, repeats=20)
    six.add_argument("--batch", default=SEQUENCES, help="sequences, interleaved, one, base")
    six.set_defaults(run=_prefill)

    two = found.add_parser("plot", help="pictures of records")
    two.add_argument("records", type=Path, nargs="+")
    two.add_argument("--to", type=Path, required=True)
    two.add_argument("--json", action="store_true")
    two.set_defaults(run=lambda a: commands.plot_records(a.records, a.to))

    three = found.add_parser("e2e", help="a whole model's decode speed")
    three.add_argument("--layers", type=int, default=48)
    three.add_argument("--batch", default="1,16,64")
    three.add_argument("--adapters", type=int, default=8)
    three.add_argument("--rank", type=int, default=16)
    three.add_argument("--prompt", type=int, default=256)
    three.add_argument("--steps", type=int, default=64)
    three.add_argument("--commit")
    three.add_argument("--out", type=Path)
    three.add_argument("--json", action="store_true")
    three.set_defaults(run=_end_to_end)

    four = found.add_parser("tune", help="tiles for this GPU")
    four.add_argument("--model", "--shape", action="append", help="name or E,H,I,K")
    four.add_argument("--tokens", default="1,4,16,64,256")
    four.add_argument("--rank", default="16,64")
    four.add_argument("--seconds", type=float, default=60.0, help="per case, about")
    four.add_argument("--wide", action="store_true", help="also all that the backend proposes")
    four.add_argument("--commit")
    four.add_argument("--out", type=Path)
    four.add_argument("--json", action="store_true")
    four.set_defaults(run=_tune)

    five = found.add_parser("load", help="how fast adapters are loaded")
    five.add_argument("--layers", type=int, default=48)
    five.add_argument("--adapters", type=int, default=200, help="small ones")
    five.add_argument("--repeats", type=int, default=5)
    five.add_argument("--folder", type=Path, help="where the file of 1.7 GB is made")
    five.add_argument("--commit")
    five.add_argument("--out", type=Path)
    five.add_argument("--json", action="store_true")
    five.set_defaults(run=_load)

    seven = found.add_parser("cpu", help="a layer and a small model on this machine's CPU")
    seven.add_argument("--model", help="name of a SwiGLU shape, or E,H,I,K")
    seven.add_argument("--tokens", default=CPU_TOKENS)
    seven.add_argument("--dtype", default="bfloat16,float32")
    seven.add_argument("--adapters", type=int, default=4, help="live in the layer's batch")
    seven.add_argument("--rank", type=int, default=16)
    seven.add_argument("--backends", default="", help="of ours; the first is compared")
    seven.add_argument("--repeats", type=int, default=15, help="turns; the median counts")
    seven.add_argument("--seconds", type=float, default=20.0, help="no turn begins after, per case")
    seven.add_argument("--threads", type=int, help="of torch")
    seven.add_argument("--no-small-model", action="store_true", help="the layer only")
    seven.add_argument("--commit")
    seven.add_argument("--out", type=Path)
    seven.add_argument("--plot", type=Path)
    seven.add_argument("--json", action="store_true")
    seven.set_defaults(run=_cpu)
    return top


def _layer_options(command: argparse.ArgumentParser, tokens: str, slots: int, repeats: int) -> None:
    """Add what measurements of one layer have in common, with their defaults."""
    command.add_argument("--model", action="append", help="name or E,H,I,K; may be repeated")
    command.add_argument("--tokens", default=tokens)
    command.add_argument("--rank", default="16")
    command.add_argument("--adapters", default="8", help="adapters live in the batch")
    command.add_argument("--slots", type=int, default=slots)
    command.add_argument("--kind", default="separate")
    command.add_argument("--modes", default=AUTO)
    command.add_argument("--format", default=UNQUANTIZED, help="of the experts' weights")
    command.add_argument("--suite", help="record or quick, in place of the options above")
    command.add_argument("--repeats", type=int, default=repeats)
    command.add_argument("--commit")
    command.add_argument("--out", type=Path)
    command.add_argument("--plot", type=Path)
    command.add_argument("--json", action="store_true")


def _load(a: argparse.Namespace) -> commands.Result:
    return commands.load(
        layers=a.layers,
        adapters=a.adapters,
        repeats=a.repeats,
        folder=a.folder,
        commit=a.commit,
        out=a.out,
    )


def _cpu(a: argparse.Namespace) -> commands.Result:
    from moegraft.bench.cpu_command import cpu_options, measure_cpu

    options = cpu_options(
        model=a.model,
        tokens=a.tokens,
        dtypes=a.dtype,
        adapters=a.adapters,
        rank=a.rank,
        backends=a.backends,
        turns=a.repeats,
        seconds=a.seconds,
        threads=a.threads,
        small_model=not a.no_small_model,
        commit=a.commit,
    )
    return measure_cpu(options, out=a.out, plot=a.plot)


def _end_to_end(a: argparse.Namespace) -> commands.Result:
    return commands.end_to_end(
        layers=a.layers,
        batches=a.batch,
        adapters=a.adapters,
        rank=a.rank,
        prompt=a.prompt,
        steps=a.steps,
        commit=a.commit,
        out=a.out,
    )


def _tune(a: argparse.Namespace) -> commands.Result:
    return commands.tune(
        a.model or ["q30", "q35"],
        tokens=a.tokens,
        ranks=a.rank,
        seconds=a.seconds,
        wide=a.wide,
        commit=a.commit,
        out=a.out,
    )


def _decode(a: argparse.Namespace) -> commands.Result:
    models = a.model or default_models(a.format)
    if a.suite:
        requests = suite_requests(a.suite, models, a.format)
    else:
        requests = decode_requests(
            models, a.tokens, a.rank, a.adapters, a.slots, a.kind, a.modes, a.format
        )
    return commands.decode(
        requests, repeats=a.repeats, cold=a.cold, commit=a.commit, out=a.out, plot=a.plot
    )


def _prefill(a: argparse.Namespace) -> commands.Result:
    models = a.model or default_prefill_models(a.format)
    if a.suite:
        requests = prefill_suite(a.suite, models, a.format)
    else:
        requests = prefill_requests(
            models, a.tokens, a.rank, a.adapters, a.slots, a.kind, a.batch, a.modes, a.format
        )
    return commands.prefill(requests, repeats=a.repeats, commit=a.commit, out=a.out, plot=a.plot)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failed check, 2 for a user's error."""
    arguments = parser().parse_args(argv)
    try:
        result: commands.Result = arguments.run(arguments)
    except MoegraftError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result.document, indent=2) if arguments.json else result.text)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
