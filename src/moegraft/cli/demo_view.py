"""How ``moegraft demo`` looks, on a terminal and piped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moegraft.cli.output import check_mark, megabytes

if TYPE_CHECKING:
    from moegraft.demo.compare import RowCheck
    from moegraft.demo.files import Prompt

_STYLES = ("cyan", "magenta", "yellow", "blue", "green", "red")


class LiveRows:
    """The batch while it is written: one table that always fits the terminal.

    Shows the end of every row's text; :func:`print_rows` shows all of it afterwards.
    """

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        self._console = console
        self._prompts = prompts
        self._live = Live(console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> LiveRows:
        self._live.__enter__()
        self.show([""] * len(self._prompts))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, texts: Sequence[str]) -> None:
        """Update the table with the rows' new text so far."""
        widths = _widths(self._console, self._prompts)
        lines = max(1, min(3, (self._console.height - 6) // len(self._prompts)))
        table = _rows_table(widths)
        styles = _styles(self._prompts)
        for prompt, text in zip(self._prompts, texts, strict=True):
            name = prompt.adapter or "base"
            table.add_row(
                Text(name, style=styles[name]),
                Text(_tail(prompt.text, widths[1]), style="dim"),
                Text(_tail(text, widths[2] * lines - lines)),
            )
        self._live.update(table)


def print_start(console: Console, model: Mapping[str, Any]) -> None:
    """Say what is about to run."""
    adapters = model["adapters"]
    console.print(
        f"{model['class']}: {model['parameters'] / 1e6:.1f}M parameters, {model['moe_layers']} MoE "
        f"layers of {model['experts']} experts, float32"
    )
    each = ", ".join(
        f"{name} (rank {info['rank']}, {megabytes(info['bytes'])})"
        for name, info in adapters.items()
    )
    console.print(f"{len(adapters)} adapters, nothing merged: {each}")
    console.print()
    _head(console, f"One batch of {model['rows']} rows, each with its own adapter or none")


def print_rows(console: Console, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
    """Print every row in full: a table on a terminal, plain text otherwise."""
    if not console.is_terminal:
        for prompt, text in zip(prompts, texts, strict=True):
            head = f"[{prompt.adapter or 'base'}] after {prompt.text!r}:"
            console.print(Text(head), soft_wrap=True)
            console.print(Text(text), soft_wrap=True)
        console.print()
        return
    table = _rows_table(_widths(console, prompts), lines=True)
    styles = _styles(prompts)
    for prompt, text in zip(prompts, texts, strict=True):
        name = prompt.adapter or "base"
        table.add_row(
            Text(name, style=styles[name]), Text(prompt.text, style="dim"), Text(text.strip("\n"))
        )
    console.print(table)


def print_checks(console: Console, prompts: Sequence[Prompt], checks: Sequence[RowCheck]) -> None:
    """Print one mark per row, and what differs."""
    _head(console, "The same rows under PEFT, one adapter at a time")
    for index, (prompt, check) in enumerate(zip(prompts, checks, strict=True), 1):
        line = Text(f"  row {index} {prompt.adapter or 'base':12} ")
        line.append_text(check_mark(console, check.same))
        if check.same:
            line.append(f" {check.tokens} tokens identical")
        else:
            line.append(
                f" differs from new token {check.first_difference} on; PEFT's two best logits "
                f"there are {check.margin:.2g} apart",
                style="red",
            )
        console.print(line)
    same = sum(check.same for check in checks)
    console.print(f"  {same} of {len(checks)} rows identical\n")


def print_losses(console: Console, losses: Mapping[str, Mapping[str, float]]) -> None:
    """Print losses, adapters by domains, the best of each domain marked."""
    _head(console, "Held-out loss per token (nats), also in mixed batches; * = best of its column")
    domains = list(next(iter(losses.values())))
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("adapter")
    for domain in domains:
        table.add_column(domain, justify="right")
    best = {domain: min(losses, key=lambda name: losses[name][domain]) for domain in domains}
    for name, values in losses.items():
        cells = [
            Text(f"{values[d]:.3f} *", style="bold green")
            if best[d] == name
            else Text(f"{values[d]:.3f}  ")
            for d in domains
        ]
        table.add_row(name, *cells)
    console.print(table)


def print_speed(console: Console, speed: Mapping[str, Any]) -> None:
    """Print tokens per second of the three ways, and moegraft's ratio to the others."""
    threads = speed["threads"]
    _head(
        console,
        f"Speed on {threads} CPU thread{'s' * (threads != 1)}, median of {speed['repeats']} runs",
    )
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("the same rows with")
    for column in ("seconds", "tokens/s", "moegraft is"):
        table.add_column(column, justify="right")
    ways = [
        ("moegraft, one mixed batch", "mixed", None),
        ("PEFT, adapter by adapter", "peft", speed["mixed_over_peft"]),
        ("the base model, no adapters", "base", speed["mixed_over_base"]),
    ]
    for label, key, ratio in ways:
        way = speed[key]
        if way is None:
            table.add_row(label, "-", "-", "(needs peft)")
            continue
        times = "" if ratio is None else f"{ratio:.2f}x as fast"
        table.add_row(label, f"{way['seconds']:.2f}", f"{way['tokens_per_second']:,.0f}", times)
    console.print(table)


def print_end(console: Console, document: Mapping[str, Any]) -> None:
    """Print the verdict."""
    same = document["same_as_peft"]
    seconds = f"({document['seconds']:.0f} s)"
    if same is None:
        console.print(f"Done; not compared with PEFT {seconds}.")
    else:
        verdict = (
            "Every row is token for token what PEFT writes with its adapter alone"
            if same
            else "Some rows differ from PEFT, see above"
        )
        console.print(check_mark(console, same), f"{verdict} {seconds}.")


def _head(console: Console, title: str) -> None:
    console.print(Text(title, style="bold"))


def _rows_table(widths: Sequence[int], lines: bool = False) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if not lines else box.HORIZONTALS,
        header_style="bold",
        show_lines=lines,
        pad_edge=False,
    )
    for name, width in zip(("adapter", "prompt", "what it wrote"), widths, strict=True):
        table.add_column(name, width=width, overflow="fold")
    return table


def _widths(console: Console, prompts: Sequence[Prompt]) -> tuple[int, int, int]:
    """Return the columns' widths: names in full, then 3 parts prompt and 5 parts new text."""
    name = max(7, *(len(p.adapter or "base") for p in prompts))
    rest = max(20, console.width - name - 8)
    prompt = min(rest * 3 // 8, max(len(line) for p in prompts for line in p.text.split("\n")))
    return name, prompt, min(rest - prompt, 100)


def _styles(prompts: Sequence[Prompt]) -> dict[str, str]:
    names = dict.fromkeys(p.adapter for p in prompts if p.adapter)
    return {"base": "bold", **{n: _STYLES[i % len(_STYLES)] for i, n in enumerate(names)}}


def _tail(text: str, size: int) -> str:
    """Return the end of a text on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= size else ".." + flat[2 - size :]
