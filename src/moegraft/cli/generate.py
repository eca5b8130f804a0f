"""``moegraft generate``: several prompts, each with its own adapter, in one batch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.padding import Padding
from rich.text import Text

from moegraft.cli import check_adapters, read_options
from moegraft.cli.models import (
    check_device,
    check_model_folder,
    load_model,
    load_tokenizer,
    quiet_libraries,
)
from moegraft.cli.output import Outcome, stdout_console, step, visible
from moegraft.errors import MoegraftError

if TYPE_CHECKING:
    from moegraft import FilePolicy, ReadOptions
    from moegraft.adapters import BindReport

#: The word for "no adapter" in prompts and in what is printed.
BASE = "base"
#: Logits are divided by the temperature, in float32: less would make infinite ones of them.
_MIN_TEMPERATURE = 1e-6


def generate(
    model: Annotated[Path, typer.Option(help="Folder of a transformers MoE model.")],
    prompt: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:TEXT",
            help="A prompt and its adapter, base:TEXT or :TEXT for none; may be repeated.",
        ),
    ],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR", help="An adapter folder and the name to give it; may be repeated."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]REGEX", help=read_options.SKIP_HELP)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]PART", help=read_options.ONLY_HELP)
    ] = None,
    orientation: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]normal|swapped", help=read_options.ORIENTATION_HELP),
    ] = None,
    expert_b_layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]rank_major|grouped_by_expert", help=read_options.B_LAYOUT_HELP
        ),
    ] = None,
    gate_up_rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]concatenated|interleaved", help=read_options.GATE_UP_ROWS_HELP
        ),
    ] = None,
    adapter_root: read_options.AdapterRoot = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write per prompt.")] = 48,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Dtype to load the model in.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where to run: cpu or cuda.")] = "cpu",
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="With --sample: higher is wilder (1.0).")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="With --sample: nucleus of this probability (1.0).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --sample: seed of the draws (0).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> Outcome:
    """Write a continuation for every prompt, all in one batch, each with its own adapter.

    Prompts are used as written; no chat template is applied.

    An option with NAME= in front holds for that adapter only.
    """
    folders = parse_adapters(adapter or [])
    rows = parse_prompts(prompt, folders)
    sampling = _sampling(sample, temperature, top_p, seed)
    options = read_options.per_adapter(
        folders,
        skip or [],
        orientation or [],
        expert_b_layout or [],
        gate_up_rows or [],
        only or [],
    )
    policy = read_options.file_policy(adapter_root)
    check_device(device, dtype)
    check_model_folder(model)
    with quiet_libraries():
        # What can go wrong goes wrong before the weights are read, which may take minutes.
        tokenizer = load_tokenizer(model)
        batch = _tokenise(tokenizer, rows)
        with step("Checking the adapters") if folders else nullcontext():
            reports = check_adapters.bind_all(model, folders, options, policy)
        check_adapters.warn(reports, options)
        with step(f"Loading {model} in {dtype}"):
            graft = _attach(load_model(model, dtype, device), folders, options, reports, policy)
        with step(f"Writing {len(rows)} x {max_new_tokens} tokens"):
            start = time.perf_counter()
            ids = _run(graft, tokenizer, batch, rows, max_new_tokens, sampling)
            seconds = time.perf_counter() - start
        written = [_describe(row, out, tokenizer) for row, out in zip(rows, ids, strict=True)]
    document = {
        "model": str(model),
        "dtype": dtype,
        "device": device,
        "adapters": {name: str(folder) for name, folder in folders.items()},
        "read_options": {name: read_options.given(o) for name, o in options.items()},
        "sampling": sampling or None,
        "rows": written,
        "seconds": round(seconds, 4),
    }
    if not as_json:
        _render(written)
    return Outcome(document)


def parse_adapters(values: Sequence[str]) -> dict[str, Path]:
    """Read ``NAME=DIR`` options; raises :class:`MoegraftError` for a malformed one."""
    folders: dict[str, Path] = {}
    for value in values:
        name, equals, folder = value.partition("=")
        if not equals or not name or not folder:
            raise MoegraftError(f"--adapter {value!r} is not NAME=DIR, such as sql=adapters/sql.")
        if name == BASE or ":" in name:
            raise MoegraftError(
                f"--adapter {value!r}: the name {name!r} can't be used, "
                + ("it stands for the model itself." if name == BASE else "it holds a colon.")
            )
        if name in folders:
            raise MoegraftError(f"--adapter {value!r}: there is already an adapter {name!r}.")
        folders[name] = Path(folder)
    return folders


def parse_prompts(values: Sequence[str], folders: dict[str, Path]) -> list[tuple[str | None, str]]:
    """Read ``NAME:TEXT`` options into (adapter or None, text); the first colon separates.

    Raises:
        MoegraftError: no colon, no text, or a name that no ``--adapter`` gave.
    """
    rows: list[tuple[str | None, str]] = []
    for value in values:
        name, colon, text = value.partition(":")
        if not colon:
            raise MoegraftError(
                f"--prompt {value!r} is not NAME:TEXT; for the model without an adapter write "
                f"--prompt {':' + value!r}."
            )
        if not text:
            raise MoegraftError(f"--prompt {value!r} has no text behind the colon.")
        if name not in ("", BASE) and name not in folders:
            loaded = ", ".join(folders) or "none"
            raise MoegraftError(
                f"--prompt {value!r}: there is no adapter {name!r}; loaded: {loaded} (and "
                f"{BASE!r} for the model itself)."
            )
        rows.append((None if name in ("", BASE) else name, text))
    return rows


def _sampling(
    sample: bool, temperature: float | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """Check the sampling options; {} = greedy."""
    given = {"--temperature": temperature, "--top-p": top_p, "--seed": seed}
    unused = [name for name, value in given.items() if value is not None]
    if not sample:
        if unused:
            verb = "needs" if len(unused) == 1 else "need"
            raise MoegraftError(
                f"{', '.join(unused)} {verb} --sample; without it, output is greedy."
            )
        return {}
    temperature = 1.0 if temperature is None else temperature
    top_p = 1.0 if top_p is None else top_p
    if not _MIN_TEMPERATURE <= temperature < math.inf:
        raise MoegraftError(
            f"--temperature must be over 0 (from {_MIN_TEMPERATURE:g} on) and finite, got "
            f"{temperature}; leave out --sample for the likeliest tokens."
        )
    if not 0 < top_p <= 1:
        raise MoegraftError(f"--top-p must be over 0 and at most 1, got {top_p}.")
    if not -(2**63) <= (seed or 0) < 2**64:
        raise MoegraftError(f"--seed must be from -2^63 to 2^64 - 1, got {seed}.")
    return {"temperature": temperature, "top_p": top_p, "seed": seed or 0}


def _tokenise(tokenizer: Any, rows: list[tuple[str | None, str]]) -> Any:
    """Return the prompts as one padded batch."""
    batch = tokenizer([text for _, text in rows], return_tensors="pt", padding=True)
    for (_, text), size in zip(rows, batch["attention_mask"].sum(1).tolist(), strict=True):
        if not size:
            raise MoegraftError(f"The prompt {text!r} is nothing to the tokenizer: no tokens.")
    return batch


def _attach(
    host: Any,
    folders: Mapping[str, Path],
    options: Mapping[str, ReadOptions],
    reports: Mapping[str, BindReport],
    policy: FilePolicy,
) -> Any:
    import moegraft

    max_rank = max([64, *(report.max_rank for report in reports.values())])
    slots = max(1, len(folders))
    graft = moegraft.attach(host, max_adapters=slots, max_rank=max_rank, file_policy=policy)
    for name, folder in folders.items():
        graft.load(name, folder, options[name])
    return graft


def _run(
    graft: Any,
    tokenizer: Any,
    batch: Any,
    rows: list[tuple[str | None, str]],
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> list[list[int]]:
    """Return the new token ids of each row, up to and with its end token."""
    import torch

    ids = batch["input_ids"].to(graft.model.device)
    options: dict[str, Any] = {"do_sample": False}
    if sampling:
        torch.manual_seed(sampling["seed"])
        options = {
            "do_sample": True,
            "top_k": 0,
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
        }
    out = graft.generate(
        input_ids=ids,
        attention_mask=batch["attention_mask"].to(ids.device),
        adapters=[name for name, _ in rows],
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    ends = graft.model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    return [_up_to_end(row, ends) for row in out[:, ids.shape[1] :].tolist()]


def _up_to_end(ids: list[int], ends: set[int | None]) -> list[int]:
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids


def _describe(row: tuple[str | None, str], ids: list[int], tokenizer: Any) -> dict[str, Any]:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return {"adapter": row[0], "prompt": row[1], "text": text, "new_tokens": len(ids), "ids": ids}


def _render(rows: list[dict[str, Any]]) -> None:
    console = stdout_console()
    for row in rows:
        console.print(Text(f"[{row['adapter'] or BASE}]", style="bold cyan"))
        body = Text(row["prompt"], style="dim").append(visible(row["text"]), style="not dim")
        if console.is_terminal:
            console.print(Padding(body, (0, 0, 0, 2), expand=False))
        else:
            console.print(body, soft_wrap=True)
