"""The typer application, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated, Any

import typer

from moegraft._version import __version__
from moegraft.cli import (
    bench,
    convert,
    demo,
    doctor,
    generate,
    inspect_adapter,
    merge,
    quantize,
    tune,
)
from moegraft.cli.output import Outcome, fail, print_json
from moegraft.errors import MoegraftError

app = typer.Typer(
    name="moegraft",
    help="Serve many LoRA adapters on one Mixture-of-Experts model, in one batch.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("inspect")(inspect_adapter.inspect)
app.command("convert")(convert.convert)
app.command("merge")(merge.merge)
app.command("quantize")(quantize.quantize)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app)
app.command("tune")(tune.tune)

# typer brings its own copy of click since 0.26; this finds the class in either.
_ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moegraft {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve many LoRA adapters on one Mixture-of-Experts model, in one batch."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(argv: list[str]) -> int:
    """Run one command; print its JSON document or its error; return the exit code.

    With ``--json`` everything that a command or a library prints goes to stderr, so that stdout
    holds the document alone.
    """
    as_json = "--json" in argv
    stdout = sys.stdout
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            outcome = app(argv, prog_name="moegraft", standalone_mode=False)
    except MoegraftError as error:
        return fail(str(error), as_json)
    except _ClickError as error:
        return fail(_usage_message(error), as_json)
    except (KeyboardInterrupt, typer.Abort):
        return fail("interrupted", as_json, code=130)
    if isinstance(outcome, Outcome):
        if as_json:
            print_json(outcome.document, stdout)
        return outcome.exit_code
    return outcome if isinstance(outcome, int) else 0


def _usage_message(error: Any) -> str:
    # typer checks values with pydantic since 0.29, and passes on its words.
    message = str(error.format_message()).replace("Value error, ", "")
    message = message.replace("Input should be", "must be")
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    return f"{message.rstrip('.')}; see `{context.command_path} --help`."
