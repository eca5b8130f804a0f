"""The part of Python's regular expressions that names of modules need, parsed into a tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

#: Characters of one expression, and levels of its groups.
MAX_LENGTH = 1000
MAX_DEPTH = 20
#: Escapes that stand for a set of characters; Python's own matcher says what is in them.
_CLASSES = frozenset("dDwWsS")
_COUNTED = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


@dataclass(frozen=True)
class Chars:
    """One character: ``source`` itself when ``literal``, else one of a class such as ``[a-z]``,
    ``\\d`` or ``.``, as Python writes it."""

    source: str
    literal: bool = False

    def holds(self, char: str) -> bool:
        """True when the character is in the class."""
        return self.source == char if self.literal else _in_class(self.source, char)


@lru_cache(maxsize=1 << 16)
def _in_class(source: str, char: str) -> bool:
    return re.fullmatch(source, char) is not None


@dataclass(frozen=True)
class Text:
    """Characters one after the other, as a sequence of literal :class:`Chars` but faster."""

    text: str


@dataclass(frozen=True)
class Edge:
    """``^`` (the beginning of the path) or ``$`` (its end)."""

    at_start: bool


@dataclass(frozen=True)
class WordEdge:
    """``\\b``, between a character of a word and one of none."""


@dataclass(frozen=True)
class Ahead:
    """``(?=part)``, where the part follows, or ``(?!part)``, where it does not."""

    part: Node
    follows: bool


@dataclass(frozen=True)
class Sequence:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    """Any one of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A part ``least`` to ``most`` times; None = any number."""

    part: Node
    least: int
    most: int | None


Node = Chars | Text | Edge | WordEdge | Ahead | Sequence | Alternatives | Repeat


class PatternError(ValueError):
    """An expression that this parser does not take; says why."""


def parse_pattern(pattern: str) -> Node:
    """Parse an expression.

    Takes characters, ``.``, classes, escapes, groups, ``|``, ``* + ? {m,n}`` (greedy or not),
    ``^``, ``$``, ``\\b`` and look-ahead.

    Raises:
        PatternError: no regular expression, too long, or one with look-behind, back references,
            flags or possessive repeats.
    """
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"it has {len(pattern):,} characters, more than {MAX_LENGTH:,}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise PatternError(f"it is not a regular expression: {error}") from error
    parser = _Parser(pattern)
    found = parser.alternatives(0)
    assert parser.at == len(pattern), "Python would have refused it"
    return found


class _Parser:
    """Reads an expression that Python has accepted, from left to right."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._refuse(f"more than {MAX_DEPTH} groups within each other")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            part = self._repeated(self._one(depth))
            if isinstance(part, Chars) and part.literal:
                part = Text(part.source)
            last = parts[-1] if parts else None
            if isinstance(part, Text) and isinstance(last, Text):
                parts[-1] = Text(last.text + part.text)
            else:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _one(self, depth: int) -> Node:
        char = self._next()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._char_class()
        if char == "^":
            return Edge(at_start=True)
        if char == "$":
            return Edge(at_start=False)
        if char == ".":
            return Chars(".")
        if char == "\\":
            return self._escape()
        return Chars(char, literal=True)

    def _group(self, depth: int) -> Node:
        ahead = self._take("?=") or (self._take("?!") and "not")
        if not ahead and not self._take("?:") and self._take("?"):
            if not self.pattern.startswith("P<", self.at):
                self._refuse("look-behind, flags, conditions or atomic groups")
            self.at = self.pattern.index(">", self.at) + 1
        inner = self.alternatives(depth + 1)
        self._next()  # the closing parenthesis
        return Ahead(inner, follows=ahead is True) if ahead else inner

    def _char_class(self) -> Chars:
        start = self.at - 1
        self._take("^")
        self._take("]")  # the first one is a member
        while self._next() != "]":
            if self.pattern[self.at - 1] == "\\":
                self.at += 1
        return Chars(self.pattern[start : self.at])

    def _escape(self) -> Node:
        char = self._next()
        if char in _CLASSES:
            return Chars(f"\\{char}")
        if char in _CONTROL:
            return Chars(_CONTROL[char], literal=True)
        if char in "AZ":
            return Edge(at_start=char == "A")
        if char == "b":
            return WordEdge()
        if char.isalnum():
            self._refuse(f"\\{char}")
        return Chars(char, literal=True)

    def _repeated(self, part: Node) -> Node:
        char = self.pattern[self.at : self.at + 1]
        counted = _COUNTED.match(self.pattern, self.at)
        least: int
        most: int | None
        if char and char in "*+?":
            self.at += 1
            least, most = _REPEATS[char]
        elif counted and (counted[1] or counted[2]):
            self.at = counted.end()
            least = int(counted[1] or 0)
            most = (int(counted[3]) if counted[3] else None) if counted[2] else least
        else:
            return part
        self._take("?")  # lazy: the same set of matches
        if self._take("+"):
            self._refuse("possessive repeats")
        return Repeat(part, least, most)

    def _next(self) -> str:
        self.at += 1
        return self.pattern[self.at - 1]

    def _take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += found * len(text)
        return found

    def _refuse(self, what: str) -> NoReturn:
        raise PatternError(
            f"it uses {what}; what is served are characters, classes, groups, |, repeats, ^, $ "
            "and look-ahead"
        )
