"""The errors users meet. Each message says what happened, why, and what to do."""

from __future__ import annotations

#: How to leave tensors of an adapter file out; ends a message.
HOW_TO_SKIP = "skip=('REGEX OF THEIR NAMES',), on the command line --skip 'REGEX'."


class MoegraftError(ValueError):
    """Base of every error raised because of the caller's input or environment.

    Broken internal invariants use ``assert`` instead, so catching this class never hides a bug.
    """


class AdapterError(MoegraftError):
    """An adapter can't be read, bound, stored or used. The engine's state is unchanged."""


class UnsupportedError(MoegraftError):
    """A model, weight format, device or activation has no implementation here; says which."""


class PlanError(MoegraftError):
    """No backend can run a layer, or a forced choice can't be honoured; lists the reasons."""


def shorten(names: list[str], limit: int = 4) -> str:
    """Return the first ``limit`` names joined by commas, and how many more there are."""
    head = ", ".join(names[:limit])
    rest = len(names) - limit
    return f"{head} and {rest} more" if rest > 0 else head


def count(number: int, noun: str) -> str:
    """Return a number and its noun, as ``1 tensor`` or ``2 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(value: object, limit: int = 80) -> str:
    """Return a value from outside as one short line: quoted, escaped, cut to ``limit``."""
    if isinstance(value, str):
        value = value[:limit] + "..." if len(value) > limit else value
        return repr(value)
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list within itself
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= limit else f"{text[:limit]}..."
