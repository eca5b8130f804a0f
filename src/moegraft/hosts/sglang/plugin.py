"""The entry point: SGLang calls :func:`register` in every one of its processes.

``SGLANG_PLUGINS`` is SGLang's: a list without ``moegraft`` means no call at all.
"""

from __future__ import annotations

import logging

from moegraft.hosts.activate import Activation
from moegraft.hosts.sglang.settings import reason_against

register = Activation(
    "sglang",
    logging.getLogger("sglang.srt.moegraft"),
    reason_against,
    "moegraft.hosts.sglang.seams",
)
