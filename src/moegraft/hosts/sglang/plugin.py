"""The entry point: SGLang calls :func:`register` in every one of its processes."""

from __future__ import annotations

import logging

from moegraft.hosts.sglang.settings import reason_against

# A child of SGLang's own logger: its handlers and levels are the operator's choice.
logger = logging.getLogger("sglang.srt.moegraft")
_done = False


def register() -> None:
    """Register moegraft's hooks, once per process; SGLang applies them.

    Never raises: SGLang's own code is untouched when this returns without having acted, and the log
    says why. ``SGLANG_PLUGINS`` is SGLang's: a list without ``moegraft`` means no call at all.
    """
    global _done
    if _done:
        return
    _done = True
    try:
        import sglang

        reason = reason_against(sglang.__version__)
        if reason is not None:
            logger.warning("moegraft is not active: %s.", reason)
            return
        from moegraft.hosts.sglang import seams

        reason = seams.reason_against()
        if reason is not None:
            logger.warning("moegraft is not active: %s.", reason)
            return
        seams.install()
    except Exception:
        logger.exception("moegraft is not active: its set-up failed.")
