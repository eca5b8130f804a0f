"""JSON from strangers: no key twice, no NaN, no depth or length that costs more than its bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from moegraft.errors import AdapterError, shown

#: Levels that a document may nest; adapter configs have two or three.
MAX_DEPTH = 32
#: Values of one document: an entry for each of 250,000 modules, and then some.
MAX_VALUES = 2_000_000


def parse_json(raw: bytes, origin: str, max_values: int = MAX_VALUES) -> Any:
    """Parse a UTF-8 JSON document (a byte order mark is fine).

    Raises:
        AdapterError: no JSON, a key twice in one object, NaN or Infinity, nested too deep, a
            number of thousands of digits, or more values than ``max_values``. A short text of
            many values would take a hundred times its bytes.
    """
    if count_marks(raw) > max_values:
        raise AdapterError(f"{origin} holds more than {max_values:,} values.")
    try:
        found = json.loads(
            raw.decode("utf-8-sig"), object_pairs_hook=_no_key_twice, parse_constant=_no_constant
        )
    except AdapterError as error:
        raise AdapterError(f"{origin} {error}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{origin} is not readable JSON: {error}.") from error
    check_depth(found, origin, max_values)
    return found


def count_marks(raw: bytes) -> int:
    """Return how many values a JSON text has at most, before anything is made of it."""
    return sum(raw.count(mark) for mark in (b"{", b"[", b",", b":"))


def check_depth(value: Any, origin: str, max_values: int = MAX_VALUES) -> None:
    """Refuse data that nests deeper than any config does, or never ends.

    Raises:
        AdapterError: more than :data:`MAX_DEPTH` levels or ``max_values`` values.
    """
    level, seen = [value], 0
    for _ in range(MAX_DEPTH + 1):
        seen += len(level)
        if seen > max_values:
            raise AdapterError(f"{origin} holds more than {max_values:,} values.")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                inner.extend(each.values())
            elif isinstance(each, (list, tuple, set, frozenset)):
                inner.extend(each)
        if not inner:
            return
        level = inner
    raise AdapterError(f"{origin} nests deeper than {MAX_DEPTH} levels.")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise AdapterError(f"holds the key {shown(twice)} twice: which one is meant?")
    return found


def _no_constant(name: str) -> Any:
    raise AdapterError(f"holds {name}, which is no JSON number.")
