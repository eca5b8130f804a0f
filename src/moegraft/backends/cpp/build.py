"""Compile the library once per instruction set, compiler and source, and keep it in a cache.

The library is plain C functions without torch's headers: it needs a C++17 compiler with OpenMP and
nothing else, compiles in a few seconds and fits every version of torch. It uses the OpenMP of the
process, which is torch's.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from moegraft.backends.cpp.instructions import InstructionSet
from moegraft.build_cache import CacheError, check_owner, own_folder
from moegraft.env import logger
from moegraft.errors import MoegraftError

SOURCE = Path(__file__).parent / "source"
#: FMA and the order of sums are the source's; nothing here changes a value.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno",
         "-fno-trapping-math", "-fvisibility=hidden", "-w")  # fmt: skip
TIMEOUT_SECONDS = 300


class BuildError(MoegraftError):
    """There is no compiled library here, and why."""


def compiler() -> list[str]:
    """Return the command of the C++ compiler: ``CXX``, else the first of c++, g++, clang++.

    Raises:
        BuildError: there is none.
    """
    asked = os.environ.get("CXX")
    for command in [asked] if asked else ["c++", "g++", "clang++"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    where = f"CXX={asked!r} is not there" if asked else "no C++ compiler (c++, g++, clang++)"
    raise BuildError(where)


@cache
def library_path(instructions: InstructionSet) -> Path:
    """Return the built library, which is compiled now unless the cache has it.

    Raises:
        BuildError: an unknown system, no compiler, or it failed.
    """
    if platform.system() not in ("Linux", "Darwin"):
        raise BuildError(f"not tried on {platform.system()}")
    try:
        return _built(instructions)
    except CacheError as error:
        raise BuildError(str(error)) from error
    except (OSError, ValueError) as error:  # a full or read-only disk, a CXX that is no command
        raise BuildError(f"it can't be built: {error}") from error


def _built(instructions: InstructionSet) -> Path:
    command = [*compiler(), *FLAGS, *instructions.flags]
    folder = own_folder("cpp")
    target = folder / f"moegraft-{instructions.name}-{_fingerprint(command)}.so"
    if not _is_whole(target):
        _compile(command, target)
    check_owner(target)
    return target


def _sum_of(library: Path) -> Path:
    """Return the file with a library's checksum."""
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """True for what was built: after a crash of the machine half a file may lie there."""
    try:
        wanted = _sum_of(library).read_text()
        return hashlib.sha256(library.read_bytes()).hexdigest() == wanted
    except (OSError, UnicodeDecodeError):
        return False


def _fingerprint(command: list[str]) -> str:
    """Return what changes with the source, the compiler and its flags."""
    found = hashlib.sha256("\0".join(command).encode())
    try:
        version = subprocess.run(
            [command[0], "--version"], capture_output=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} doesn't run: {error}") from error
    found.update(version.stdout)
    for path in sorted(SOURCE.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _compile(command: list[str], target: Path) -> None:
    """Compile into the cache; processes that do so at once replace each other's equal file."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        try:
            done = subprocess.run(
                [*command, str(SOURCE / "library.cpp"), "-o", str(built)],
                capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{command[0]} doesn't run: {error}") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            reason = (lines or done.stderr.splitlines() or ["no message"])[0].strip()
            raise BuildError(f"{command[0]} failed: {reason}")
        built.chmod(0o700)
        digest = Path(folder) / "sha256"
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        built.replace(target)
        digest.replace(_sum_of(target))
    logger.info("Compiled the CPU kernels in %.1f s into %s.", time.perf_counter() - start, target)
