"""What commands share for output: the outcome, consoles, progress on stderr, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        document: the JSON document of ``--json``.
        exit_code: of the process.
    """

    document: Mapping[str, Any]
    exit_code: int = 0


def stdout_console() -> Console:
    """Return a console for results; as wide as the terminal, 80 columns when piped."""
    return Console(highlight=False, markup=False, emoji=False)


def fail(message: str, as_json: bool, code: int = 2) -> int:
    """Print an error on stderr, and as JSON on stdout when asked for; return the exit code."""
    sys.stdout.flush()
    if as_json:
        print_json({"error": message}, sys.stdout)
    print(f"error: {visible(message)}", file=sys.stderr)
    return code


def visible(text: str) -> str:
    """Return text from a file or a model with control characters made visible.

    So neither can send escape sequences to the terminal; line ends and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def print_json(document: Mapping[str, Any], file: TextIO) -> None:
    """Write one JSON document and a newline."""
    file.write(json.dumps(document, indent=2) + "\n")
    file.flush()


@contextmanager
def step(text: str) -> Iterator[None]:
    """Show on stderr that long work runs: a spinner on a terminal, else one line."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        with console.status(Text(text)):
            yield
        return
    print(f"{text} ...", file=sys.stderr, flush=True)
    yield


def head(console: Console, title: str, rest: str = "") -> None:
    """Print an empty line and a heading, with something behind it."""
    console.print()
    console.print(Text(title, style="bold").append(f"  {rest}" if rest else "", style="not bold"))


def lines(console: Console, texts: Iterable[str], indent: int = 2, style: str = "") -> None:
    """Print lines with an indent that wrapped ones keep."""
    for text in texts:
        padded = Padding(Text(visible(text), style=style), (0, 0, 0, indent), expand=False)
        console.print(padded)


def check_mark(console: Console, good: bool) -> Text:
    """Return a check mark or a cross, in letters where the encoding has no marks."""
    unicode = console.encoding.lower().startswith("utf")
    if good:
        return Text("\u2713" if unicode else "ok", style="bold green")
    return Text("\u2717" if unicode else "NO", style="bold red")


def megabytes(num_bytes: int) -> str:
    """Return a size for people."""
    if num_bytes < 100_000:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e6:,.2f} MB"
