"""Faults in the store's steps, one at a time: what may fail in a load, an update, an eviction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from moegraft.adapters import entry as entry_module
from moegraft.adapters import planned as planned_module
from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.layer_copies import LayerCopies
from moegraft.adapters.space import ArenaSpace
from moegraft.adapters.streams import StreamOrder
from moegraft.adapters.update_plan import UpdatePlan
from moegraft.factors import PackedAdapter

#: What may fail: memory that runs out, copies, the calls that keep streams in order.
POINTS: tuple[tuple[Any, str], ...] = (
    (entry_module, "pack_adapter"),
    (entry_module, "checksum_of"),
    (entry_module, "check_overflow"),
    (PackedAdapter, "relocated"),
    (AdapterBank, "_pinned"),
    (ArenaSpace, "_new_arena"),
    (AdapterBank, "_put"),
    (LayerCopies, "start"),
    (LayerCopies, "slide"),
    (UpdatePlan, "fill"),
    (planned_module, "is_finite"),
    (planned_module, "checksum_of"),
    (LayerCopies, "wait"),
    (StreamOrder, "before_write"),
    (StreamOrder, "after_write"),
    (StreamOrder, "before_read"),
    (StreamOrder, "after_read"),
)


class InjectedError(RuntimeError):
    """What fails on purpose."""


@dataclass
class _Armed:
    """A fault of one thread: ``left`` steps from now, before or after the step itself."""

    left: int
    after: bool
    fired: str = ""


class Faults:
    """Steps that fail for the thread that asked for it. At most one does per :meth:`at`."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @contextmanager
    def at(self, step: int | None, after: bool = False) -> Iterator[_Armed]:
        """Within the block this thread's step number ``step`` fails; None = none does."""
        armed = _Armed(-1 if step is None else step, after)
        self._thread.armed = armed
        try:
            yield armed
        finally:
            self._thread.armed = None

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that may fail."""

        def run(*args: Any, **kwargs: Any) -> Any:
            armed: _Armed | None = getattr(self._thread, "armed", None)
            fails = armed is not None and not armed.fired and armed.left == 0
            if armed is not None:
                armed.left -= 1
            if fails and armed is not None:
                armed.fired = name
                if armed.after:
                    real(*args, **kwargs)
                raise InjectedError(f"injected: {name} fails")
            return real(*args, **kwargs)

        return run


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Let all of :data:`POINTS` be able to fail."""
    found = Faults()
    for owner, name in POINTS:
        monkeypatch.setattr(owner, name, found.wrap(name, getattr(owner, name)))
    return found
