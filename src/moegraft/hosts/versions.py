"""Whether a plugin may act in the engine version that it finds itself in."""

from __future__ import annotations

import re


def reason_against(
    engine: str,
    version: str,
    oldest: tuple[int, ...],
    newest: tuple[int, ...],
    variable: str,
    setting: bool | None,
) -> str | None:
    """Return None when the plugin may act, else why it does not.

    Args:
        engine: the engine's name, for the message.
        version: what the engine says of itself, such as ``0.26.0.post1``.
        oldest, newest: the known versions, as numbers of equal length; more of ``version`` than
            these does not count.
        variable: the name of the switch, for the message.
        setting: its value; False = off, True = on in any version, None = by the versions.
    """
    if setting is False:
        return f"{variable}=0 switches it off"
    known = _text(oldest) if oldest == newest else f"{_text(oldest)} to {_text(newest)}"
    found = re.match(r"\.".join([r"(\d+)"] * len(oldest)), version)
    if found is None:
        return None if setting else f"{engine} calls itself {version!r}; known are {known}"
    if setting or oldest <= tuple(map(int, found.groups())) <= newest:
        return None
    return (
        f"{engine} is {version}, known are {known}; {variable}=1 tries it all the same, "
        f"{variable}=0 ends this message"
    )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
