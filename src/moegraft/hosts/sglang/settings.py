"""When the plugin is active: the switch, and the versions of SGLang that it was made for."""

from __future__ import annotations

from moegraft.env import sglang_setting
from moegraft.hosts import versions

#: The versions of SGLang whose insides this plugin knows, oldest and newest.
OLDEST, NEWEST = (0, 5, 23), (0, 5, 23)


def reason_against(version: str) -> str | None:
    """Return None when the plugin may act in SGLang ``version``, else why it does not.

    ``MOEGRAFT_SGLANG=0`` switches it off, ``1`` lets it act in versions outside the known ones.
    """
    return versions.reason_against(
        "SGLang", version, OLDEST, NEWEST, "MOEGRAFT_SGLANG", sglang_setting()
    )
