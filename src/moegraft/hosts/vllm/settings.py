"""When the plugin is active: the switch, and the versions of vLLM that it was made for."""

from __future__ import annotations

from moegraft.env import vllm_setting
from moegraft.hosts import versions

#: The versions of vLLM whose insides this plugin knows: (major, minor), oldest and newest.
OLDEST, NEWEST = (0, 26), (0, 33)


def reason_against(version: str) -> str | None:
    """Return None when the plugin may act in vLLM ``version``, else why it does not.

    ``MOEGRAFT_VLLM=0`` switches it off, ``1`` lets it act in versions outside the known ones.
    """
    return versions.reason_against("vLLM", version, OLDEST, NEWEST, "MOEGRAFT_VLLM", vllm_setting())
