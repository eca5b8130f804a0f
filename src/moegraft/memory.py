"""Memory that is not there, as an error that says what it was for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moegraft.errors import MoegraftError


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Turn an allocation that fails within the block into a :class:`MoegraftError`.

    Example: ``with memory_for("8 slots"): torch.zeros(10**15)`` raises "There is no memory for
    8 slots: ..".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoegraftError(f"There is no memory for {what}: {reason}") from error
