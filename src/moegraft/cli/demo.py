"""``moegraft demo``: eight prompts and four adapters in one batch, checked and timed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegraft.cli import demo_view as view
from moegraft.cli.models import (
    check_model_folder,
    load_model,
    load_tokenizer,
    quiet_libraries,
    require,
)
from moegraft.cli.output import Outcome, stdout_console, step, visible

if TYPE_CHECKING:
    from moegraft.demo.batch import Batch
    from moegraft.demo.compare import RowCheck
    from moegraft.demo.files import DemoFiles
    from moegraft.demo.speed import Speeds


def demo(
    model: Annotated[
        Path | None, typer.Option(help="Another model folder than demo/model.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Another folder of adapters than demo/adapters.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write per prompt.")] = 48,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare every row with PEFT alone.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Outcome:
    """Run 8 prompts with 4 adapters in one batch, check them against PEFT, measure and time.

    Exit code 1 when a row differs from what PEFT writes with that adapter alone.
    """
    from moegraft.demo.files import find_demo

    require("transformers", *(["peft"] if check else []))
    files = find_demo(model, adapters)
    check_model_folder(files.model)
    start = time.perf_counter()
    with quiet_libraries():
        run = _Run(files, max_new_tokens, check, as_json)
        with run.threads():
            document = run.document()
    document["seconds"] = round(time.perf_counter() - start, 2)
    if not as_json:
        view.print_end(stdout_console(), document)
    return Outcome(document, 1 if document["same_as_peft"] is False else 0)


class _Run:
    """One run of the demo: every part computes, shows unless JSON is asked for, and returns."""

    def __init__(self, files: DemoFiles, new_tokens: int, check: bool, as_json: bool) -> None:
        import moegraft
        from moegraft.demo.batch import make_batch
        from moegraft.demo.compare import peft_models

        self.files = files
        self.new_tokens = new_tokens
        self.check = check
        self.console = None if as_json else stdout_console()
        with step(f"Loading the model and {len(files.adapters)} adapters"):
            host = load_model(files.model, "float32")
            self.tokenizer = load_tokenizer(files.model)
            self.base: Any = copy.deepcopy(host)
            self.graft = moegraft.attach(host, max_adapters=max(1, len(files.adapters)))
            for name, folder in files.adapters.items():
                self.graft.load(name, folder)
            self.models: Mapping[str | None, Any] | None = None
            if check or find_spec("peft") is not None:
                self.models = peft_models(self.base, files.adapters)
        self.batch: Batch = make_batch(self.tokenizer, files.prompts)

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Within the block torch uses the number of threads that suits the model."""
        from moegraft.demo.threads import best_threads

        with ExitStack() as stack:
            with step("Choosing the number of threads"):
                stack.enter_context(best_threads(self.base, self.batch))
            yield

    def document(self) -> dict[str, Any]:
        """Run all parts; JSON-ready."""
        model = self._describe()
        if self.console:
            view.print_start(self.console, model)
        new_ids = self._write()
        texts = [self._decode(ids) for ids in new_ids.tolist()]
        checks = self._compare(new_ids)
        rows = []
        for index, prompt in enumerate(self.files.prompts):
            row = {"adapter": prompt.adapter, "prompt": prompt.text, "text": texts[index]}
            rows.append({**row, "check": asdict(checks[index]) if checks else None})
        return {
            "model": model,
            "new_tokens": self.new_tokens,
            "rows": rows,
            "same_as_peft": all(c.same for c in checks) if checks else None,
            "heldout_loss": self._losses(),
            "speed": self._speed(),
        }

    def _describe(self) -> dict[str, Any]:
        host = self.graft.model
        experts = [site for site in self.graft.spec.sites if site.kind == "experts"]
        return {
            "folder": str(self.files.model),
            "class": type(host).__name__,
            "parameters": sum(p.numel() for p in host.parameters()),
            "moe_layers": len(experts),
            "experts": max((site.num_experts for site in experts), default=0),
            "adapters": {
                info.name: {"rank": info.report.max_rank, "bytes": info.num_bytes}
                for info in map(self.graft.store.info, self.files.adapters)
            },
            "rows": len(self.batch.adapters),
        }

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _write(self) -> Any:
        """Generate the mixed batch, streaming to a terminal; new ids ``[rows, n]``."""
        from moegraft.demo.batch import BatchStreamer

        arguments = self.batch.arguments(self.new_tokens)
        rows = list(self.batch.adapters)
        if self.console is None or not self.console.is_terminal:
            with step(f"Writing {len(rows)} rows in one batch"):
                out = self.graft.generate(**arguments, adapters=rows)
        else:
            with view.LiveRows(self.console, self.files.prompts) as live:
                streamer = BatchStreamer(
                    lambda ids: live.show([visible(self._decode(r)) for r in ids])
                )
                out = self.graft.generate(**arguments, adapters=rows, streamer=streamer)
        new_ids = out[:, self.batch.length :]
        if self.console:
            texts = [visible(self._decode(ids)) for ids in new_ids.tolist()]
            view.print_rows(self.console, self.files.prompts, texts)
        return new_ids

    def _compare(self, new_ids: Any) -> list[RowCheck] | None:
        from moegraft.demo.compare import compare_rows

        if not self.check or self.models is None:
            return None
        with step("Running PEFT, one adapter at a time"):
            checks = compare_rows(self.batch, new_ids, self.models, self.new_tokens)
        if self.console:
            view.print_checks(self.console, self.files.prompts, checks)
        return checks

    def _losses(self) -> dict[str, dict[str, float]]:
        from moegraft.demo.losses import heldout_losses

        with step("Computing held-out losses"):
            losses = heldout_losses(
                self.graft, self.tokenizer, list(self.files.adapters), self.files.heldout
            )
        named = {name or "base": values for name, values in losses.items()}
        if self.console:
            view.print_losses(self.console, named)
        return named

    def _speed(self) -> dict[str, Any]:
        import torch

        from moegraft.demo.speed import measure

        with step("Timing"):
            speeds = measure(self.graft, self.base, self.models, self.batch, self.new_tokens)
        found = {**asdict(speeds), "threads": torch.get_num_threads(), **_ratios(speeds)}
        if self.console:
            view.print_speed(self.console, found)
        return found


def _ratios(speeds: Speeds) -> dict[str, float | None]:
    mixed = speeds.mixed.tokens_per_second
    peft = speeds.peft
    return {
        "mixed_over_peft": mixed / peft.tokens_per_second if peft else None,
        "mixed_over_base": mixed / speeds.base.tokens_per_second,
    }
