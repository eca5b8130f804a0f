"""One tensor that stands for a base address which several allocations are counted from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def base_tensor(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 1-D tensor that begins at the lowest address of tensors of one dtype and device.

    On a GPU kernels only take its address: it is a view of one element. On the CPU backends index
    into it, so it spans all the tensors and what lies between them, which is never touched: it is
    no allocation, does not keep the tensors alive, and must never be copied.
    """
    lowest = min(sources, key=torch.Tensor.data_ptr)
    if lowest.device.type != "cpu":
        return lowest.as_strided((1,), (1,))
    start = lowest.data_ptr()
    end = max(_end(tensor) for tensor in sources)
    memory = (ctypes.c_char * (end - start)).from_address(start)
    return torch.frombuffer(memory, dtype=lowest.dtype)


def _end(tensor: torch.Tensor) -> int:
    """Return the address behind the last element that a tensor's strides reach."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
