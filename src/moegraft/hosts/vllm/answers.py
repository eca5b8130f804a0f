"""What the HTTP server answers when an adapter is refused: our words, as a fault of the request.

vLLM answers 500 to whatever a worker raised, with its own words around it.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import sys
from importlib import import_module
from typing import Any

#: Begins every message of a refused adapter.
REFUSED = "moegraft refuses the adapter"
logger = logging.getLogger("vllm.moegraft")
_SERVING = "vllm.entrypoints.openai.models.serving"
_BEHIND = "', please check the stack trace"


def install() -> None:
    """Change the answer in processes that may have the HTTP server.

    That is the first process, and others that have its module already; engine and workers, which
    are started by it, need no web framework.
    """
    if _SERVING not in sys.modules and multiprocessing.parent_process() is not None:
        return
    try:
        models: Any = import_module(_SERVING).OpenAIServingModels
    except Exception as error:  # vLLM without what its server needs: no server, no answers
        logger.debug("There is no HTTP server here: %r", error)
        return
    models.load_lora_adapter = _answering(models.load_lora_adapter)


def _answering(stock: Any) -> Any:
    @functools.wraps(stock)
    async def load_lora_adapter(*args: Any, **kwargs: Any) -> Any:
        answer = await stock(*args, **kwargs)
        error = getattr(answer, "error", None)
        if error is not None and REFUSED in error.message:
            error.message = our_words(error.message)
            error.type, error.code = "BadRequestError", 400
        return answer

    return load_lora_adapter


def our_words(message: str) -> str:
    """Return the part of a message that moegraft wrote."""
    start = message.find(REFUSED)
    end = message.find(_BEHIND, start)
    return message[start:] if end < 0 else message[start:end]
