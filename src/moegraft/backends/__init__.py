"""The table of backends. A new one is one folder plus one line here.

A backend module has two functions: ``supports(problem) -> str | None`` (None, or the reason why
not) and ``choose(problem) -> (stages, why)``. Modules are imported only when they are asked, so an
optional package costs nothing until it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from moegraft.problem import Problem
from moegraft.stages import Stages


class Backend(Protocol):
    """What a backend module offers."""

    def supports(self, problem: Problem) -> str | None:
        """Return None when it can run the problem, else the reason why not."""
        ...

    def choose(self, problem: Problem) -> tuple[Stages, str]:
        """Return the stages for a supported problem and one line that says why these."""
        ...


#: Name -> module, in order of preference.
BACKENDS = {
    "cpu": "moegraft.backends.cpu",
}


def load_backend(name: str) -> Backend:
    """Import a backend by its name in :data:`BACKENDS`; KeyError for an unknown one."""
    module: Backend = import_module(BACKENDS[name])
    return module
