"""Opening adapter files: regular files only, and only those inside the allowed root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moegraft.adapters.file_policy import FilePolicy
from moegraft.errors import AdapterError, shown

#: Never wait for a writer of a pipe, never follow a last link, never inherit the file.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


class OpenFile(NamedTuple):
    """An open regular file and its size when it was opened."""

    file: BinaryIO
    num_bytes: int


def path_text(path: object) -> str:
    """Return a path for messages: quoted, on one line."""
    return shown(str(path), 4096)


def check_inside(path: Path, policy: FilePolicy) -> Path:
    """Follow all links of a path; raise :class:`AdapterError` when it leaves the allowed root.

    Says the same of a file outside that exists and of one that does not.
    """
    try:
        real = Path(os.path.realpath(path))
        inside = policy.root is None or real.is_relative_to(os.path.realpath(policy.root))
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"There is no adapter at {path_text(path)}, which is no path: {error}. moegraft never "
            "downloads."
        ) from error
    if not inside:
        raise AdapterError(
            f"{path_text(path)} is outside of the folder that adapters may be read from, "
            f"{path_text(policy.root)} (links are followed); nothing was read."
        )
    return real


@contextmanager
def as_one(folder: Path, files: Sequence[Path]) -> Iterator[None]:
    """Read several files of a folder as one thing: of one version, or not at all.

    Raises:
        AdapterError: the folder or a file was replaced or written to within the block, so that
            one may be older than the other.
    """
    before = [_identity(path) for path in (folder, *files)]
    yield
    if [_identity(path) for path in (folder, *files)] != before:
        raise AdapterError(
            f"{path_text(folder)} was replaced or written to while it was read, so its config and "
            "its weights may be of different versions: load it again."
        )


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(found.st_mode):  # other files may come and go
        return (found.st_dev, found.st_ino)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextmanager
def open_regular(path: Path, policy: FilePolicy) -> Iterator[OpenFile]:
    """Open a regular file for reading, checked by what was opened and not by its name.

    With a root the path is resolved, compared with the root, and then opened folder by folder
    from the root without following any link. A link that somebody puts in place between the check
    and the open is an error, so the file is inside whatever happens meanwhile.

    Raises:
        AdapterError: outside of the root, missing, no regular file, or changed while it was read.
    """
    real = check_inside(path, policy)
    try:
        handle = _open(real, policy)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AdapterError(f"{path_text(path)} can't be opened: {reason}.") from error
    before = os.fstat(handle)
    if not stat.S_ISREG(before.st_mode):
        os.close(handle)
        raise AdapterError(f"{path_text(path)} is no regular file.")
    with os.fdopen(handle, "rb") as file:
        yield OpenFile(file, before.st_size)
        after = os.fstat(handle)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise AdapterError(
                f"{path_text(path)} was written to while it was read: write it elsewhere and "
                "rename it into place."
            )


@contextmanager
def readable(origin: str) -> Iterator[None]:
    """Turn an error of the file system within the block into an :class:`AdapterError`."""
    try:
        yield
    except OSError as error:
        raise AdapterError(f"{origin} can't be read: {error.strerror or error}.") from error


def _open(real: Path, policy: FilePolicy) -> int:
    if policy.root is None:
        return os.open(real, _FLAGS | _BINARY)
    if os.open not in os.supports_dir_fd or not _NOFOLLOW:
        raise AdapterError("FilePolicy.root needs a system with openat and O_NOFOLLOW.")
    root = os.path.realpath(policy.root)
    handle = os.open(root, _FLAGS | os.O_DIRECTORY | _NOFOLLOW)
    for part in real.relative_to(root).parts:
        try:
            inner = os.open(part, _FLAGS | _NOFOLLOW, dir_fd=handle)
        finally:
            os.close(handle)
        handle = inner
    return handle
