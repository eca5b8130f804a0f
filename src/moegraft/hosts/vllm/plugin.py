"""The entry point: vLLM calls :func:`register` in every one of its processes."""

from __future__ import annotations

import logging

from moegraft.hosts.vllm.settings import reason_against

# A child of vLLM's own logger: its handlers and levels are the operator's choice.
logger = logging.getLogger("vllm.moegraft")
_done = False


def register() -> None:
    """Put moegraft's layers in place of vLLM's, once per process.

    Never raises: vLLM's own code is untouched when this returns without having acted, and the log
    says why. ``VLLM_PLUGINS`` is vLLM's: a list without ``moegraft`` means no call at all.
    """
    global _done
    if _done:
        return
    _done = True
    try:
        import vllm

        reason = reason_against(vllm.__version__)
        if reason is not None:
            logger.warning("moegraft is not active: %s.", reason)
            return
        from moegraft.hosts.vllm import seams

        reason = seams.reason_against()
        if reason is not None:
            logger.warning("moegraft is not active: %s.", reason)
            return
        seams.install()
    except Exception:
        logger.exception("moegraft is not active: its set-up failed.")
