"""When the plugin is active: the switch, and the versions of vLLM that it was made for."""

from __future__ import annotations

import re

from moegraft.env import vllm_setting

#: The versions of vLLM whose insides this plugin knows: (major, minor), oldest and newest.
OLDEST, NEWEST = (0, 26), (0, 33)


def reason_against(version: str) -> str | None:
    """Return None when the plugin may act in vLLM ``version``, else why it does not.

    ``MOEGRAFT_VLLM=0`` switches it off, ``1`` lets it act in versions outside the known ones.
    """
    setting = vllm_setting()
    if setting is False:
        return "MOEGRAFT_VLLM=0 switches it off"
    known = f"{_text(OLDEST)} to {_text(NEWEST)}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return None if setting else f"vLLM calls itself {version!r}; known are {known}"
    if setting or OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    return (
        f"vLLM is {version}, known are {known}; MOEGRAFT_VLLM=1 tries it all the same, "
        "MOEGRAFT_VLLM=0 ends this message"
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
