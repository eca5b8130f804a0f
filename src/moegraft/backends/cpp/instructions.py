"""The instruction sets that the library is built for, the best first."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from moegraft import processor


@dataclass(frozen=True)
class InstructionSet:
    """One way to build the library.

    Attributes:
        name: part of the library's file name, so that machines may share a cache.
        needs: what the processor must have, by the kernel's names.
        flags: what the compiler is told.
        bf16: True when bfloat16 is multiplied without widening it first.

    Example: ``avx2`` needs avx2, fma and f16c, and widens bfloat16 to fp32 in registers.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    bf16: bool = False


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")


def _x86(name: str, *needs: str, bf16: bool = False) -> InstructionSet:
    flags = tuple(f"-m{need.replace('_', '')}" for need in needs)
    return InstructionSet(name, frozenset(needs), flags, bf16)


X86 = (
    _x86("avx512_bf16", *_AVX512, "avx512_bf16", bf16=True),
    _x86("avx512", *_AVX512),
    _x86("avx2", *_AVX2),
)
ARM64 = (InstructionSet("neon", frozenset(), ()),)


def available() -> tuple[InstructionSet, ...]:
    """Return what this processor can run, the best first; () where nothing is known to be."""
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return ARM64
    known = processor.flags()
    return tuple(found for found in X86 if found.needs <= known) if "x86" in machine else ()
