"""Every environment variable moegraft reads, typed, in one place.

===========================  ===========  ========================================================
variable                     default      meaning
===========================  ===========  ========================================================
``MOEGRAFT_ADAPTER_ROOT``    (anywhere)   folder that the vLLM plugin's adapters must lie in
``MOEGRAFT_BACKEND``         (by plan)    force a backend by name; an impossible choice raises
``MOEGRAFT_COMPILE``         ``1``        ``0`` = no compiled CPU kernels; ``avx2`` .. = for these
                                          instructions rather than the processor's best
``MOEGRAFT_LOG``             ``WARNING``  level of the ``moegraft`` logger
``MOEGRAFT_SGLANG``          (versions)   the SGLang plugin: ``0`` = off, ``1`` = on in any version
``MOEGRAFT_SGLANG_LINEARS``  ``1``        ``0`` = the SGLang plugin leaves linears to SGLang
``MOEGRAFT_VLLM``            (versions)   the vLLM plugin: ``0`` = off, ``1`` = on in any version
``MOEGRAFT_VLLM_LINEARS``    ``1``        ``0`` = the vLLM plugin leaves linears to vLLM
===========================  ===========  ========================================================
"""

from __future__ import annotations

import logging
import os

from moegraft.errors import MoegraftError

logger = logging.getLogger("moegraft")
_DEFAULT_LEVEL = "WARNING"


def adapter_root() -> str | None:
    """Return the folder in ``MOEGRAFT_ADAPTER_ROOT``, or None when it is unset or empty."""
    return os.environ.get("MOEGRAFT_ADAPTER_ROOT") or None


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


def compiled_kernels() -> str:
    """Return ``MOEGRAFT_COMPILE``: ``"0"`` = no compiled CPU kernels, ``"1"`` (unset) = for the
    processor's best instructions, else the name of an instruction set."""
    return os.environ.get("MOEGRAFT_COMPILE") or "1"


def sglang_setting() -> bool | None:
    """Return what ``MOEGRAFT_SGLANG`` says: False = off, True = on in any version; None = unset.

    Raises:
        MoegraftError: the value is neither 0 nor 1.
    """
    return _switch("MOEGRAFT_SGLANG")


def sglang_linears() -> bool:
    """Return False when ``MOEGRAFT_SGLANG_LINEARS=0`` leaves linears to SGLang.

    Raises:
        MoegraftError: the value is neither 0 nor 1.
    """
    return _switch("MOEGRAFT_SGLANG_LINEARS") is not False


def vllm_setting() -> bool | None:
    """Return what ``MOEGRAFT_VLLM`` says: False = off, True = on in any version; None = unset.

    Raises:
        MoegraftError: the value is neither 0 nor 1.
    """
    return _switch("MOEGRAFT_VLLM")


def vllm_linears() -> bool:
    """Return False when ``MOEGRAFT_VLLM_LINEARS=0`` leaves linears to vLLM.

    Raises:
        MoegraftError: the value is neither 0 nor 1.
    """
    return _switch("MOEGRAFT_VLLM_LINEARS") is not False


def _switch(name: str) -> bool | None:
    value = os.environ.get(name) or None
    if value not in (None, "0", "1"):
        raise MoegraftError(f"{name}={value!r} is not a switch; use 0 or 1, or unset it.")
    return None if value is None else value == "1"


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
