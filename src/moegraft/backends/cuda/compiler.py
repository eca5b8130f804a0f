"""NVRTC, the CUDA compiler that torch brings, through ctypes; what it makes is kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from moegraft.build_cache import CacheError, own_folder
from moegraft.env import logger
from moegraft.errors import MoegraftError

_VERSIONS = ("13", "12")
#: What a compiler must make to be one: it also fails without its built-in functions.
_PROBE = 'extern "C" __global__ void probe() {}'


class CompileError(MoegraftError):
    """A kernel can't be compiled, and why."""


def _libraries() -> Iterator[str]:
    """Yield where NVRTC may be: among Python's packages, or where the system looks.

    First the version that torch was built for: a driver may refuse what a newer one makes.
    """
    wanted = (torch.version.cuda or "").partition(".")[0]
    versions = sorted(_VERSIONS, key=lambda version: version != wanted)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for version in versions:
            for folder in (f"cu{version}", "cuda_nvrtc"):
                path = Path(root) / folder / "lib" / f"libnvrtc.so.{version}"
                if path.exists():
                    yield str(path)
    for version in versions:
        yield f"libnvrtc.so.{version}"


@cache
def _library() -> ctypes.CDLL:
    for name in _libraries():
        try:
            # NVRTC opens its built-in functions by name, and in a package they are on no path:
            # what is loaded already is found.
            if Path(name).is_absolute():
                for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError(
        "There is no NVRTC (libnvrtc.so.13 or .12) here; torch for CUDA brings it, else "
        "`pip install nvidia-cuda-nvrtc`."
    )


@cache
def why_no_compiler() -> str | None:
    """Return why no kernel can be compiled here for Hopper; None when one can."""
    try:
        compile_now(_PROBE, {}, ["--gpu-architecture=sm_90a"])
    except CompileError as error:
        return str(error)
    return None


def has_compiler() -> bool:
    """True when kernels for Hopper can be compiled here."""
    return why_no_compiler() is None


def compiler_version() -> tuple[int, int]:
    """Return NVRTC's version.

    Raises:
        CompileError: there is none.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def cubin(source: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
    """Return machine code, from the cache when it was compiled before.

    Args:
        source: CUDA C++.
        headers: name -> text of what it includes.
        options: of the compiler.

    Raises:
        CompileError: no compiler, or it failed; with its first message.
    """
    key = hashlib.sha256(repr((compiler_version(), *options)).encode())
    for text in (source, *headers.keys(), *headers.values()):
        key.update(text.encode() + b"\0")
    try:
        folder: Path | None = own_folder("cuda")
    except CacheError as error:
        logger.info("Compiled kernels are not kept: %s", error)
        folder = None
    path = None if folder is None else folder / f"{key.hexdigest()[:32]}.cubin"
    if path is not None:
        found = _kept(path)
        if found is not None:
            return found
    start = time.perf_counter()
    made, _ = compile_now(source, headers, options)
    logger.info("Compiled a CUDA kernel in %.1f s.", time.perf_counter() - start)
    if path is not None:
        _keep(path, made)
    return made


def _kept(path: Path) -> bytes | None:
    """Return what a file holds if it is whole: its checksum stands in front."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """Write a file in one step; other processes see all of it or nothing."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(name).replace(path)
    except OSError as error:
        logger.info("A compiled kernel is not kept: %s", error)


def compile_now(
    source: str, headers: Mapping[str, str], options: Sequence[str]
) -> tuple[bytes, str]:
    """Return machine code and what the compiler said.

    Raises:
        CompileError: no compiler, or it failed.
    """
    library = _library()
    program = ctypes.c_void_p()
    count = len(headers)
    code = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", count,
        (ctypes.c_char_p * count)(*(text.encode() for text in headers.values())),
        (ctypes.c_char_p * count)(*(name.encode() for name in headers)),
    )  # fmt: skip
    if code:
        raise CompileError(f"NVRTC takes no program (error {code}).")
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), words)
        log = _text(library, program, "ProgramLog").decode(errors="replace")
        if failed:
            lines = [line for line in log.splitlines() if "error" in line] or [log.strip()]
            raise CompileError(f"NVRTC failed (error {failed}): {lines[0]}")
        return _text(library, program, "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    library[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    memory = ctypes.create_string_buffer(size.value)
    library[f"nvrtcGet{what}"](program, memory)
    return memory.raw[: size.value].rstrip(b"\0") if what == "ProgramLog" else memory.raw
