"""The table of backends. A new one is one folder plus one line here.

A backend module has two functions: ``supports(problem, mode) -> str | None`` (None, or the reason
why not) and ``choose(problem, mode) -> Choice``. Modules are imported only when they are
asked, so an optional package costs nothing until it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from moegraft.call import LayerRun, Mode
from moegraft.problem import Problem
from moegraft.stages import Stages


@dataclass(frozen=True)
class Choice:
    """What a backend runs a problem with.

    Attributes:
        stages: its stage functions.
        mode: how adapters and base overlap.
        why: one line that says why these.
        run: the whole layer as one fused run of stages; None = compose the stages one by one.
    """

    stages: Stages
    mode: Mode
    why: str
    run: LayerRun | None = None


class Backend(Protocol):
    """What a backend module offers; ``mode`` None = the backend's own choice."""

    def supports(self, problem: Problem, mode: Mode | None) -> str | None:
        """Return None when it can run the problem, else the reason why not."""
        ...

    def choose(self, problem: Problem, mode: Mode | None) -> Choice:
        """Return what runs a supported problem."""
        ...


#: Name -> module, in order of preference.
BACKENDS = {
    "cpp": "moegraft.backends.cpp",
    "cpu": "moegraft.backends.cpu",
    "triton": "moegraft.backends.triton",
}


def load_backend(name: str) -> Backend:
    """Import a backend by its name in :data:`BACKENDS`; KeyError for an unknown one."""
    module: Backend = import_module(BACKENDS[name])
    return module
