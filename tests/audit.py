"""What Python opens, connects to or starts while a block runs, by its own audit events."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_EVENTS = ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen")
#: Audit hooks stay for good, so there is one, and it asks here whether to note anything.
_NOTED: list[list[tuple[str, str]]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _NOTED and event in _EVENTS:
        _NOTED[-1].append((event, str(arguments[0])))


sys.addaudithook(_note)


@contextmanager
def what_happens() -> Iterator[list[tuple[str, str]]]:
    """Note the events of the block: (event, file or address or program)."""
    _NOTED.append([])
    try:
        yield _NOTED[-1]
    finally:
        _NOTED.pop()


def adapter_files(events: list[tuple[str, str]]) -> list[str]:
    """The names of the adapter files that were opened, sorted."""
    names = [Path(what).name for event, what in events if event == "open"]
    return sorted(name for name in names if name.startswith("adapter_"))
