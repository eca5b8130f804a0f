"""Every environment variable moegraft reads, typed, in one place.

====================  ===========  ===============================================================
variable              default      meaning
====================  ===========  ===============================================================
``MOEGRAFT_BACKEND``  (by plan)    force a backend by name; an impossible choice raises
``MOEGRAFT_LOG``      ``WARNING``  level of the ``moegraft`` logger
====================  ===========  ===============================================================
"""

from __future__ import annotations

import logging
import os

from moegraft.errors import MoegraftError

logger = logging.getLogger("moegraft")


def forced_backend() -> str | None:
    """Return the backend name in ``MOEGRAFT_BACKEND``, or None when it is unset or empty."""
    return os.environ.get("MOEGRAFT_BACKEND") or None


def configure_logging() -> None:
    """Set the ``moegraft`` logger to the level in ``MOEGRAFT_LOG``.

    Raises:
        MoegraftError: the value is not a logging level.
    """
    level = os.environ.get("MOEGRAFT_LOG", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        known = ", ".join(logging.getLevelNamesMapping())
        raise MoegraftError(f"MOEGRAFT_LOG={level!r} is not a logging level; use one of {known}.")
    logger.setLevel(level)
