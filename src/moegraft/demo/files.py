"""Find and read the demo's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegraft.errors import MoegraftError

_PARTS = ("model/config.json", "adapters", "prompts.json", "heldout.json")


@dataclass(frozen=True)
class Prompt:
    """One row of the demo batch; ``adapter`` None is the model itself."""

    adapter: str | None
    text: str


@dataclass(frozen=True)
class DemoFiles:
    """Everything the demo reads.

    Attributes:
        model: folder of the model with its tokenizer.
        adapters: name -> adapter folder, in the order of the prompts.
        prompts: the rows of the batch.
        heldout: domain (an adapter's name) -> passages that no training saw.
    """

    model: Path
    adapters: Mapping[str, Path]
    prompts: Sequence[Prompt]
    heldout: Mapping[str, Sequence[str]]


def find_demo(model: Path | None = None, adapters: Path | None = None) -> DemoFiles:
    """Find the demo in ``./demo``, else beside the source of an editable install.

    Args:
        model: another model folder; its prompts and held-out text are looked for beside it first.
        adapters: another folder of adapter folders.

    Raises:
        MoegraftError: files are missing or malformed.
    """
    root = _root(model)
    prompts = _read_prompts(root / "prompts.json")
    heldout = _read_heldout(root / "heldout.json")
    folder = adapters or root / "adapters"
    names = dict.fromkeys(p.adapter for p in prompts if p.adapter is not None)
    folders = {name: folder / name for name in names}
    missing = [str(path) for path in folders.values() if not path.is_dir()]
    if missing:
        raise MoegraftError(
            f"The demo's prompts use adapters that are not there: {', '.join(missing)}. --adapters "
            f"takes a folder with one folder for each of {', '.join(names)}."
        )
    return DemoFiles(model or root / "model", folders, prompts, heldout)


def _root(model: Path | None) -> Path:
    source = Path(__file__).resolve().parents[3] / "demo"
    places = [Path("demo"), source]
    if model is not None:
        places.insert(0, model.parent)
    for place in places:
        parts = _PARTS[2:] if model is not None else _PARTS
        if all((place / part).exists() for part in parts):
            return place
    looked = ", ".join(str(place) for place in dict.fromkeys(places))
    raise MoegraftError(
        f"The demo's files ({', '.join(_PARTS)}) are not in {looked}. They are part of moegraft's "
        "repository, not of the package: run `moegraft demo` in a clone of it."
    )


def _read_prompts(path: Path) -> tuple[Prompt, ...]:
    rows = _read_json(path)
    if not isinstance(rows, list) or not rows:
        raise MoegraftError(f"{path} must hold a list of prompts.")
    found = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise MoegraftError(f"{path}: {row!r} is not {{'adapter': .., 'prompt': ..}}.")
        name = row.get("adapter")
        if name is not None and not _is_folder_name(name):
            raise MoegraftError(f"{path}: {name!r} is no name of a folder in the adapters' folder.")
        found.append(Prompt(name, row["prompt"]))
    return tuple(found)


def _is_folder_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def _read_heldout(path: Path) -> dict[str, list[str]]:
    domains = _read_json(path)
    if not isinstance(domains, dict) or not all(isinstance(v, list) for v in domains.values()):
        raise MoegraftError(f"{path} must map each domain to a list of passages.")
    return {str(name): [str(text) for text in texts] for name, texts in domains.items()}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoegraftError(f"{path} is not readable JSON: {error}.") from error
