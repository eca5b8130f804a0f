"""moegraft: serve many LoRA adapters on one Mixture-of-Experts model, in one batch.

import moegraft
graft = moegraft.attach(model)                 # a transformers model
graft.load("sql", "path/to/adapter")           # a PEFT adapter folder
graft.generate(**inputs, adapters=["sql", None], max_new_tokens=32)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moegraft._version import __version__
from moegraft.adapters import ReadOptions
from moegraft.env import configure_logging
from moegraft.errors import AdapterError, MoegraftError, PlanError, UnsupportedError

if TYPE_CHECKING:
    from moegraft.hosts.transformers import Graft, attach

configure_logging()

__all__ = [
    "AdapterError",
    "Graft",
    "MoegraftError",
    "PlanError",
    "ReadOptions",
    "UnsupportedError",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    # transformers is optional and slow to import: only when attach is asked for.
    if name in ("attach", "Graft"):
        from moegraft.hosts import transformers as host

        return getattr(host, name)
    raise AttributeError(f"module 'moegraft' has no attribute {name!r}")
