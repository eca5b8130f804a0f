"""Facts about this machine and its packages, for ``moegraft doctor``."""

from __future__ import annotations

import platform
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from moegraft import processor
from moegraft._version import __version__
from moegraft.errors import MoegraftError

PACKAGES = ("torch", "transformers", "peft", "triton", "safetensors", "numpy")
#: CPU flags that decide how fast matrix products are, the best last.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "sve", "bf16")


def versions() -> dict[str, str | None]:
    """Return the version of every package that matters; None = not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "moegraft": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def requirements() -> dict[str, str]:
    """Return package -> lowest supported version, as moegraft's own metadata says."""
    try:
        lines = metadata.requires("moegraft") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match and match[1] in PACKAGES}


def older(version: str, lowest: str) -> bool:
    """True when a version is before another, by their leading numbers."""
    return _numbers(version) < _numbers(lowest)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def cpu() -> dict[str, Any]:
    """Return the processor: name, cores this process may use, threads, features."""
    import torch

    known = processor.flags()
    return {
        "name": processor.name(),
        "cores": processor.usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "features": [flag for flag in _CPU_FLAGS if flag in known],
        "fast_bfloat16": processor.multiplies_bf16(),
        "compiled_kernels": _compiled_kernels(),
    }


def _compiled_kernels() -> dict[str, str | None]:
    """Return the instruction set that the CPU kernels are compiled for, or why there are none."""
    from moegraft.backends.cpp.build import BuildError
    from moegraft.backends.cpp.library import best_library

    try:
        library = best_library()
    except MoegraftError as error:  # a setting that means nothing
        return {"instructions": None, "why_not": str(error)}
    if isinstance(library, BuildError):
        return {"instructions": None, "why_not": str(library)}
    return {"instructions": library.instructions.name, "why_not": None}


def cuda_compiler() -> dict[str, str | None]:
    """Return the version of NVRTC, which compiles the prefill kernels of Hopper, or why not."""
    from moegraft.backends.cuda.compiler import compiler_version, why_no_compiler

    why_not = why_no_compiler()
    if why_not is not None:
        return {"nvrtc": None, "why_not": why_not}
    return {"nvrtc": ".".join(map(str, compiler_version())), "why_not": None}


def cuda_devices() -> list[dict[str, Any]]:
    """Return the CUDA devices that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "index": index,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def has_nvidia_driver() -> bool:
    """True when the machine has an NVIDIA driver, whatever torch makes of it."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
