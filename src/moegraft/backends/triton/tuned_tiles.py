"""Tables of tuned tiles, one JSON file per device: read with suspicion, since people edit files.

An entry that can't be used is left out with one warning that names the file and says why; the rules
of :mod:`moegraft.backends.triton.tiles` stand in for it. A damaged file never stops a layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.env import logger
from moegraft.errors import MoegraftError
from moegraft.problem import Problem

FOLDER = Path(__file__).parent / "tuned"
#: An entry serves token counts up to this factor away from its own.
MAX_TOKEN_FACTOR = 2.0
#: What must agree for an entry to serve a problem.
_SHAPE = ("top_k", "num_experts", "hidden", "intermediate", "gated", "dtype", "weight_format")
_BLOCKS = ("block_m", "block_n", "block_k", "num_warps")


@dataclass(frozen=True)
class TunedEntry:
    """Tiles that were found for a problem.

    Attributes:
        shape: the problem's fields that must agree, by name.
        num_tokens, max_rank: of the problem; near ones are served too.
        config: the tiles.
    """

    shape: Mapping[str, Any]
    num_tokens: int
    max_rank: int
    config: FusedConfig

    @staticmethod
    def of(document: Any) -> TunedEntry:
        """Read an entry from its JSON form; MoegraftError says what is wrong with it."""
        try:
            problem, config = document["problem"], document["config"]
            shape = {name: problem[name] for name in _SHAPE}
            num_tokens, max_rank = problem["num_tokens"], problem["max_rank"]
            if not (_is_int(num_tokens, 1) and _is_int(max_rank, 0)):
                raise MoegraftError(f"num_tokens={num_tokens!r}, max_rank={max_rank!r}")
            return TunedEntry(shape, num_tokens, max_rank, config_of(config))
        except (TypeError, KeyError, AttributeError) as error:
            raise MoegraftError(f"{type(error).__name__}: {error}") from error

    def distance(self, problem: Problem) -> tuple[float, float] | None:
        """Return how far a problem is from the entry's: by rank, by tokens; None = too far."""
        if any(self.shape[name] != getattr(problem, name) for name in _SHAPE):
            return None
        tokens = abs(math.log2(max(problem.num_tokens, 1) / self.num_tokens))
        if tokens > math.log2(MAX_TOKEN_FACTOR):
            return None
        return abs(math.log2(max(problem.max_rank, 16) / max(self.max_rank, 16))), tokens


def config_of(document: Mapping[str, Any]) -> FusedConfig:
    """Read tiles from their JSON form, as ``dataclasses.asdict`` writes them.

    Raises:
        MoegraftError: a value that no kernel could run.
        TypeError, AttributeError: no such form at all.
    """
    values = dict(document)
    for field in fields(FusedConfig):
        if isinstance(values.get(field.name), dict):
            values[field.name] = GemmConfig(**values[field.name])
    config = FusedConfig(**values)
    for part in (config, config.gate_up, config.down, config.delta):
        for field in fields(part):
            _check(field.name, getattr(part, field.name), str(field.type))
    return config


def _check(name: str, value: Any, kind: str) -> None:
    if kind == "bool":
        right = isinstance(value, bool)
    elif kind == "int":
        right = _is_int(value, 1) and (name not in _BLOCKS or value & (value - 1) == 0)
    else:
        right = isinstance(value, GemmConfig)
    if not right:
        raise MoegraftError(f"{name}={value!r} can't be a tile's")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def tuned_file(device_name: str) -> str:
    """Return the file name of a device's table: ``NVIDIA H200`` is ``nvidia-h200.json``."""
    words = "".join(c if c.isalnum() else " " for c in device_name.lower()).split()
    return "-".join(words) + ".json"


@cache
def load_tuned(device_name: str) -> tuple[TunedEntry, ...]:
    """Return the usable entries of a device's table; () without one. Warns once of the others."""
    path = FOLDER / tuned_file(device_name)
    try:
        document = json.loads(path.read_text())
        if document["device"] != device_name:
            raise MoegraftError(f"it is for {document['device']!r}")
        return tuple(_usable(document["entries"], path))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError, TypeError, KeyError, MoegraftError) as error:
        logger.warning("%s is not used as a table of tiles: %r.", path, error)
        return ()


def _usable(entries: Any, path: Path) -> Iterator[TunedEntry]:
    for i, entry in enumerate(entries):
        try:
            yield TunedEntry.of(entry)
        except MoegraftError as error:
            logger.warning("%s: entry %d is not used: %s.", path, i, error)


def tuned_config(problem: Problem, device_name: str) -> tuple[FusedConfig, str] | None:
    """Return the tiles of the nearest entry and where they come from; None without one."""
    found = [
        (distance, i, entry)
        for i, entry in enumerate(load_tuned(device_name))
        if (distance := entry.distance(problem)) is not None
    ]
    if not found:
        return None
    entry = min(found, key=lambda nearest: nearest[:2])[2]
    return entry.config, f"tiles tuned for T={entry.num_tokens}"
