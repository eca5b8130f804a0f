"""What this machine's processor can do, as far as it decides how products are computed."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def cpuinfo() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo, name -> value; {} where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def flags() -> frozenset[str]:
    """Return the processor's features by the kernel's names; empty where they are not known."""
    info = cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def name() -> str:
    """Return what the processor calls itself."""
    return cpuinfo().get("model name") or platform.processor() or platform.machine()


def multiplies_bf16() -> bool | None:
    """True when it has instructions for products of bfloat16; None = not known."""
    known = flags()
    return bool(known & {"avx512_bf16", "amx_bf16", "bf16"}) if known else None


def usable_cores() -> int | None:
    """Return the number of cores that this process may use; None = not known."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
