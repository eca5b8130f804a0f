"""The entry point: vLLM calls :func:`register` in every one of its processes.

``VLLM_PLUGINS`` is vLLM's: a list without ``moegraft`` means no call at all.
"""

from __future__ import annotations

import logging

from moegraft.hosts.activate import Activation
from moegraft.hosts.vllm.settings import reason_against

register = Activation(
    "vllm", logging.getLogger("vllm.moegraft"), reason_against, "moegraft.hosts.vllm.seams"
)
