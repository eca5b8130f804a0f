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
_DEFAULT_LEVEL = "WARNING"


def forced_backend() -> str | None:
    """Return the backend name in ``MOEGRAFT_BACKEND``, or None when it is unset or empty."""
    return os.environ.get("MOEGRAFT_BACKEND") or None


def log_level() -> str:
    """Return the level in ``MOEGRAFT_LOG``, such as ``"INFO"``.

    Raises:
        MoegraftError: the value is not a logging level.
    """
    level = (os.environ.get("MOEGRAFT_LOG") or _DEFAULT_LEVEL).upper()
    if level not in logging.getLevelNamesMapping():
        known = ", ".join(logging.getLevelNamesMapping())
        raise MoegraftError(f"MOEGRAFT_LOG={level!r} is not a logging level; use one of {known}.")
    return level


def configure_logging() -> None:
    """Set the ``moegraft`` logger to the level in ``MOEGRAFT_LOG``.

    Runs when moegraft is imported, so it raises nothing: a value that is no level is warned of and
    the level is the default. ``moegraft doctor`` lists it as a problem.
    """
    try:
        level, problem = log_level(), ""
    except MoegraftError as error:
        level, problem = _DEFAULT_LEVEL, str(error)
    logger.setLevel(level)
    if problem:
        logger.warning("%s Using %s.", problem, _DEFAULT_LEVEL)
