"""Are all values finite? Asked of whole buffers first: one pass, no call per tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from moegraft.errors import AdapterError
from moegraft.factors import PackedAdapter
from moegraft.host_copy import in_threads

#: dtype -> the same bits as signed and unsigned integers, and those of positive infinity.
_BITS = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
}
#: Values that are looked at in one go; they stay in a core's cache.
_CHUNK = 1 << 20


def check_finite(
    tensors: Mapping[str, torch.Tensor], origin: str, memory: Iterable[torch.Tensor] = ()
) -> None:
    """Refuse NaN and infinity in the host's memory.

    Tensors on a GPU are not looked at, one by one that would take longer than to load them:
    :func:`check_packed` does, once they are packed.

    Args:
        tensors: name -> tensor, fp32/bf16/fp16.
        origin: what to call them in messages.
        memory: tensors that together hold every value of ``tensors``; when these are finite
            nothing else is looked at. None known = each tensor by itself.

    Raises:
        AdapterError: names the first tensor that holds such a value, and says how many.
    """
    buffers = list(memory)
    if buffers and all(map(is_finite, buffers)):
        return
    for key, tensor in tensors.items():
        if tensor.device.type == "cpu" and not is_finite(tensor):
            count = int((~torch.isfinite(tensor)).sum())
            raise AdapterError(
                f"{origin}: {key} holds {count} NaN or infinite values of {tensor.numel()}; the "
                "adapter is damaged (did its training diverge?) and is refused."
            )


def check_packed(name: str, packed: PackedAdapter) -> None:
    """Refuse NaN and infinity in a packed adapter; the host waits for a GPU that holds it.

    Raises:
        AdapterError: names the first site that holds such a value, and says how many.
    """
    if is_finite(packed.data):
        return
    for site, (begin, end) in packed.spans.items():
        count = int((~torch.isfinite(packed.data[begin:end])).sum())
        if count:
            raise AdapterError(
                f"Adapter {name!r} holds {count} NaN or infinite values of {end - begin} at "
                f"{site}; it is damaged (did its training diverge?) and is refused."
            )


def is_finite(tensor: torch.Tensor) -> bool:
    """True when no value of a float tensor is NaN or infinite."""
    if not tensor.numel():
        return True
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in _BITS:
        return _all_finite(tensor)
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _all_finite(tensor: torch.Tensor) -> bool:
    """Look at bits: those of NaN and infinity are the largest, of either sign."""
    signed, unsigned, most = _BITS[tensor.dtype]
    bits = tensor.view(-1).view(signed).numpy()
    sign = 1 << (8 * bits.itemsize - 1)
    bad: list[int] = []

    def look(begin: int) -> None:
        part = bits[begin : begin + _CHUNK]
        if part.max() >= most or part.view(unsigned).max() >= sign | most:
            bad.append(begin)

    in_threads(look, range(0, len(bits), _CHUNK), tensor.nbytes)
    return not bad
