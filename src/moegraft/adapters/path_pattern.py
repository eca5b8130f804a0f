"""Regular expressions of module paths, matched in bounded time whatever the expression is.

PEFT finds a module's rank with ``re.match(rf"(.*\\.)?({key})$", path)``. An expression from a
stranger's file can keep Python's matcher busy for years, with all threads waiting. Here a set of
positions goes through the expression at once, as the bits of one number: no path is tried twice,
so the time is bounded by the lengths of expression and path.
"""

from __future__ import annotations

from moegraft.adapters.pattern_syntax import (
    Ahead,
    Alternatives,
    Chars,
    Edge,
    Node,
    Repeat,
    Sequence,
    Text,
    WordEdge,
)

_WORD = Chars(r"\w")


class TooSlow(Exception):
    """All steps are spent."""


class Budget:
    """Steps that all the expressions of one adapter may take; a step is about a microsecond."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        """Take some steps; raises :class:`TooSlow` when none are left."""
        self._left -= steps
        if self._left < 0:
            raise TooSlow


class PathText:
    """A module path, and where in it which characters are; kept for several expressions.

    Positions are bits: bit i of a set is the place before character i, bit ``len(path)`` the end.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.end = 1 << len(path)
        self._at: dict[str, int] = {}
        for i, char in enumerate(path):
            self._at[char] = self._at.get(char, 0) | 1 << i
        #: Where PEFT's rule lets an expression begin: at 0 and behind every dot.
        self.starts = 1 | self._at.get(".", 0) << 1
        self._masks: dict[str, int] = {}

    def behind(self, text: str, at: int, budget: Budget) -> int:
        """Return the positions behind ``text``, not empty, where it begins at one of ``at``."""
        found, at = 0, at & self._at.get(text[0], 0)
        budget.spend(at.bit_count())
        while at:
            here = at & -at
            if self.path.startswith(text, here.bit_length() - 1):
                found |= here
            at ^= here
        return found << len(text)

    def mask(self, chars: Chars, budget: Budget) -> int:
        """Return the positions whose character is one of ``chars``."""
        if chars.literal:
            return self._at.get(chars.source, 0)
        found = self._masks.get(chars.source)
        if found is None:
            budget.spend(len(self._at))
            found = sum(bits for char, bits in self._at.items() if chars.holds(char))
            self._masks[chars.source] = found
        return found


def matches(node: Node, text: PathText, budget: Budget) -> bool:
    """Return whether PEFT's rule matches an expression and a path."""
    return bool(_after(node, text.starts, text, budget) & text.end)


def _after(node: Node, at: int, text: PathText, budget: Budget) -> int:
    """Return the positions that ``node`` can end at when it begins at one of ``at``."""
    budget.spend()
    if isinstance(node, Chars):
        return (at & text.mask(node, budget)) << 1
    if isinstance(node, Text):
        return text.behind(node.text, at, budget)
    if isinstance(node, Sequence):
        for part in node.parts:
            at = _after(part, at, text, budget)
            if not at:
                break
        return at
    if isinstance(node, Alternatives):
        found = 0
        for part in node.parts:
            found |= _after(part, at, text, budget)
        return found
    if isinstance(node, Edge):
        return at & (1 if node.at_start else text.end)
    if isinstance(node, WordEdge):
        words = text.mask(_WORD, budget)
        return at & (words ^ words << 1)
    if isinstance(node, Ahead):
        return _ahead(node, at, text, budget)
    return _repeated(node, at, text, budget)


def _ahead(node: Ahead, at: int, text: PathText, budget: Budget) -> int:
    """Return the positions of ``at`` that look-ahead lets through: each one by itself."""
    found = 0
    while at:
        here = at & -at
        if bool(_after(node.part, here, text, budget)) == node.follows:
            found |= here
        at ^= here
    return found


def _repeated(node: Repeat, at: int, text: PathText, budget: Budget) -> int:
    for _ in range(node.least):
        after = _after(node.part, at, text, budget)
        if after == at:  # as many positions as there will be, or none: more rounds change nothing
            break
        at = after
    found = frontier = at
    rounds = 0
    while frontier and (node.most is None or rounds < node.most - node.least):
        frontier = _after(node.part, frontier, text, budget) & ~found
        found |= frontier
        rounds += 1
    return found
