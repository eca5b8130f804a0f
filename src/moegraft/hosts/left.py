"""One line in the log for each reason why something is left to the engine."""

from __future__ import annotations

import logging


class LeftToEngine:
    """Says why parts of a model are left to an engine.

    Args:
        logger: where.
        engine: the engine's name.

    Example: ``LeftToEngine(logger, "vLLM").say("model.layers.0", "its weights are quantised")``.
    """

    def __init__(self, logger: logging.Logger, engine: str) -> None:
        self._logger, self._engine = logger, engine
        self._said: set[str] = set()

    def say(self, layer: str, reason: str, what: str = "experts") -> None:
        """Log a reason the first time that it is met, with the layer that has it."""
        if reason not in self._said:
            self._said.add(reason)
            self._logger.warning(
                "moegraft leaves %s to %s, at %s and wherever this holds too: %s.",
                what,
                self._engine,
                layer,
                reason,
            )
