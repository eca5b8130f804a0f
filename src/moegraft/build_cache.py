"""The folder in which compiled code is kept: the user's own, which nobody else may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moegraft.errors import MoegraftError


class CacheError(MoegraftError):
    """There is no folder that code may be loaded from, and why."""


def cache_folder(kind: str) -> Path:
    """Return where code of a kind is kept: under ``XDG_CACHE_HOME``, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moegraft" / kind


def own_folder(kind: str) -> Path:
    """Make the folder; CacheError unless it is one that only this user writes to."""
    try:
        folder = cache_folder(kind)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:
        raise CacheError(f"no cache can be made: {error}") from error
    check_owner(folder)
    return folder


def check_owner(path: Path) -> None:
    """Code is loaded from here: nobody else may have put it there."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"{path} belongs to another user or others may write to it")
