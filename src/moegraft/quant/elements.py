"""The number types that quantised weights are stored in: how values become bits and come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

#: Values of the 4-bit codes 0 to 7; code + 8 is the negative.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Element:
    """A number type of weights.

    Attributes:
        name: such as ``e4m3``.
        bits: of one value.
        largest: largest value.
        storage: dtype of the tensor that holds them; uint8 holds two 4-bit values, the even column
            in the low half.
        encode: fp32 ``[.., in]`` -> storage ``[.., in * bits / 8]``; to nearest, ties to even;
            beyond ``largest`` is clamped.
        decode: the exact values back, fp32.

    Example: ``E2M1.encode([6.0, -0.5])`` is the one byte 0x97.
    """

    name: str
    bits: int
    largest: float
    storage: torch.dtype
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]

    @property
    def per_item(self) -> int:
        """Values in one item of the storage."""
        return self.storage.itemsize * 8 // self.bits


def _encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _decode_e4m3(stored: torch.Tensor) -> torch.Tensor:
    if stored.device.type != "cpu":
        return stored.float()
    # torch converts one value at a time here. The same bits, moved, are a half 2**8 smaller: sign,
    # one more bit of exponent that is 0, exponent, mantissa.
    bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    values = bits.view(torch.float16).float().mul_(256.0)
    if values.numel() and float(values.abs().amax()) > 448.0:  # the code of NaN is next to 448
        return values.masked_fill_(values.abs() > 448.0, torch.nan)
    return values


def _encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    size = values.abs()
    # Ties go to the even code: up from an odd one, and so not up from an even one.
    code = torch.zeros_like(size, dtype=torch.uint8)
    for i, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        code += (size >= middle) if i % 2 else (size > middle)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _decode_e2m1(stored: torch.Tensor) -> torch.Tensor:
    pairs = torch.index_select(_pairs(stored.device), 0, stored.reshape(-1).int())
    return pairs.view(*stored.shape[:-1], 2 * stored.shape[-1])


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Byte -> its two values, fp32 ``[256, 2]``."""
    one = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    both = torch.arange(256)
    with torch.inference_mode(False):
        return torch.stack([one[both & 15], one[both >> 4]], dim=1).to(device)


E4M3 = Element("e4m3", 8, 448.0, torch.float8_e4m3fn, _encode_e4m3, _decode_e4m3)
E2M1 = Element("e2m1", 4, 6.0, torch.uint8, _encode_e2m1, _decode_e2m1)
