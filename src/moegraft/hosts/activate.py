"""What a plugin's entry point does: check, then put moegraft in place, or say why not."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from logging import Logger


class Activation:
    """An entry point that acts once per process, however often the engine calls it.

    Never raises: the engine's own code is untouched when it returns without having acted, and the
    log says why.

    Args:
        engine: the engine's module, whose version counts.
        logger: a child of the engine's own, whose handlers and levels are the operator's choice.
        reason_against: says for a version why the plugin may not act; None when it may.
        seams: the module of moegraft with ``reason_against()``, the same for what it finds in the
            engine, and ``install()``. Imported only when the version is known.

    Example: ``register = Activation("vllm", logger, settings.reason_against, SEAMS)``.
    """

    def __init__(
        self,
        engine: str,
        logger: Logger,
        reason_against: Callable[[str], str | None],
        seams: str,
    ) -> None:
        self._engine, self._logger = engine, logger
        self._reason_against, self._seams = reason_against, seams
        self._done = False

    def __call__(self) -> None:
        """Act, the first time."""
        if self._done:
            return
        self._done = True
        try:
            reason = self._reason_against(import_module(self._engine).__version__)
            if reason is None:
                seams = import_module(self._seams)
                reason = seams.reason_against()
            if reason is not None:
                self._logger.warning("moegraft is not active: %s.", reason)
                return
            seams.install()
        except Exception:
            self._logger.exception("moegraft is not active: its set-up failed.")
