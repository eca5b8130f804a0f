"""CUDA events by their raw handles, on the current stream.

torch has no class for an event that somebody else made. The driver's own library is loaded in every
process that uses a GPU, and its events and streams are the runtime's.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch


def wait_event(handle: int, device: torch.device) -> None:
    """Let everything that is launched from now on wait for an event; the host does not wait."""
    stream = torch.cuda.current_stream(device).cuda_stream
    _check("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(handle), ctypes.c_uint(0))


def record_event(handle: int, device: torch.device) -> None:
    """Record an event behind everything that has been launched."""
    stream = torch.cuda.current_stream(device).cuda_stream
    _check("cuEventRecord", ctypes.c_void_p(handle), ctypes.c_void_p(stream))


def _check(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(
            f"{name} failed with CUDA error {code}: is the handle a live event of this process, "
            "made on the device of the tensors?"
        )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
