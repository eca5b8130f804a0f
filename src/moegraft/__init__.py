"""moegraft: serve many LoRA adapters on one Mixture-of-Experts model, in one batch.

import moegraft
graft = moegraft.attach(model)                 # a transformers model
graft.load("sql", "path/to/adapter")           # a PEFT adapter folder
graft.generate(**inputs, adapters=["sql", None], max_new_tokens=32)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moegraft._version import __version__
from moegraft.env import configure_logging
from moegraft.errors import AdapterError, MoegraftError, PlanError, UnsupportedError

if TYPE_CHECKING:
    from moegraft.adapters import FilePolicy, ReadOptions
    from moegraft.hosts.transformers import Graft, attach

configure_logging()

__all__ = [
    "AdapterError",
    "FilePolicy",
    "Graft",
    "MoegraftError",
    "PlanError",
    "ReadOptions",
    "UnsupportedError",
    "__version__",
    "attach",
]


#: Name -> its module, imported when the name is first used: torch alone takes a second, and the
#: command line's --help needs none of it. transformers is optional.
_LAZY = {
    "FilePolicy": "moegraft.adapters",
    "Graft": "moegraft.hosts.transformers",
    "ReadOptions": "moegraft.adapters",
    "attach": "moegraft.hosts.transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moegraft' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
