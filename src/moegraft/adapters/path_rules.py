"""rank_pattern and alpha_pattern: which entry is for a module, by PEFT's rule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moegraft.adapters.path_pattern import Budget, PathText, TooSlow, matches
from moegraft.adapters.pattern_syntax import Node, PatternError, parse_pattern
from moegraft.errors import AdapterError, shown

#: Steps for all lookups in one mapping: some ten seconds, whatever the file says. An expression per
#: projection and layer of a model of 61 layers and 256 experts takes 19 million.
MAX_STEPS = 30_000_000
#: Characters of all keys that are no plain ones; Python takes some microseconds for each.
MAX_CHARACTERS = 200_000
#: Keys that are a path, or its end: letters, dots (any character to a regular expression) and
#: dots with a backslash; ``^`` in front asks for the whole path.
_PLAIN = re.compile(r"\^?(?:[\w.-]|\\\.)+")


class _Shape(NamedTuple):
    """What plain keys have in common: from the beginning of paths only, length, any-dots."""

    whole: bool
    length: int
    wild: tuple[int, ...]

    def blanked(self, text: str) -> str:
        """Return the text with a dot at each place where any character will do."""
        for i in self.wild:
            text = f"{text[:i]}.{text[i + 1 :]}"
        return text


@dataclass
class PathRules:
    """One mapping of expressions to values; the first key that matches a path has its value.

    The rule is PEFT's, ``re.match(rf"(.*\\.)?({key})$", path)``. Plain keys are looked up, as files
    may have one per module; others are matched in bounded time.

    Args:
        name: the mapping's name, for messages.
        values: expression -> value.

    Raises:
        AdapterError: a key that can't be parsed.

    Example: ``PathRules("rank_pattern", {"q_proj": 4}).first("model.layers.0.q_proj")`` is 4.
    """

    name: str
    values: Mapping[str, float]
    _plain: dict[int, dict[_Shape, dict[str, int]]] = field(default_factory=dict, init=False)
    _parsed: list[tuple[int, Node]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._keys = tuple(self.values)
        self._budget = Budget(MAX_STEPS)
        self._found: dict[str, int] = {}
        others = sum(len(key) for key in self._keys if not _PLAIN.fullmatch(key))
        if others > MAX_CHARACTERS:
            raise AdapterError(
                f"adapter_config.json: {self.name} has {others:,} characters of regular "
                f"expressions, more than {MAX_CHARACTERS:,}; write the modules' paths out."
            )
        for order, key in enumerate(self._keys):
            if _PLAIN.fullmatch(key):
                shape, text = _plain_key(key)
                self._plain.setdefault(shape.length, {}).setdefault(shape, {}).setdefault(
                    text, order
                )
                continue
            try:
                self._parsed.append((order, parse_pattern(key)))
            except PatternError as error:
                raise AdapterError(
                    f"adapter_config.json: {self.name} key {shown(key)} can't be used: {error}."
                ) from error

    def first(self, path: str) -> float | None:
        """Return the value of the first key that matches, None when none does.

        Raises:
            AdapterError: the expressions take too long.
        """
        if not self._keys:
            return None
        order = self._found.get(path)
        if order is None:
            try:
                order = self._found[path] = self._first(path)
            except TooSlow:
                raise AdapterError(
                    f"adapter_config.json: the {len(self._keys)} expressions of {self.name} take "
                    "too long to match; write the modules' paths out."
                ) from None
        return self.values[self._keys[order]] if order < len(self._keys) else None

    def _first(self, path: str) -> int:
        """Return the place of the first key that matches; the number of keys for none."""
        best = self._first_plain(path)
        text = PathText(path) if self._parsed else None
        for order, node in self._parsed:
            if text is None or order >= best:
                break
            if matches(node, text, self._budget):
                return order
        return best

    def _first_plain(self, path: str) -> int:
        """:meth:`_first` of the plain keys alone."""
        best, start = len(self._keys), 0
        while True:
            for shape, texts in self._plain.get(len(path) - start, {}).items():
                self._budget.spend(1 + len(shape.wild))
                if start == 0 or not shape.whole:
                    best = min(best, texts.get(shape.blanked(path[start:]), best))
            start = path.find(".", start) + 1
            if not start:
                return best


def _plain_key(key: str) -> tuple[_Shape, str]:
    """Return a plain key's shape and its text."""
    whole = key.startswith("^")
    text, wild = "", []
    for part in re.findall(r"\\\.|.", key[whole:]):
        if part == ".":
            wild.append(len(text))
        text += part[-1]
    return _Shape(whole, len(text), tuple(wild)), text
