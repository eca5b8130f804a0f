"""The number types that scales of blocks are stored in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moegraft.quant.elements import E4M3, Element

#: Exponent of the scale 1 in e8m0, and the largest one: 255 is NaN.
E8M0_BIAS, _E8M0_LARGEST = 127, 254


@dataclass(frozen=True)
class ScaleKind:
    """A number type of scales.

    Attributes:
        name: such as ``e8m0``.
        storage: dtype of the tensor that holds them.
        has_global: a second scale, fp32, of the whole matrix, by which the first are multiplied.
        encode: (largest absolute values of the blocks, element, global scale) -> scales as stored.
        decode: scales as stored -> fp32, without the global scale.

    Example: a block of ``e2m1`` whose largest value is 5 gets the ``e8m0`` scale 2 ** 0, byte 127.
    """

    name: str
    storage: torch.dtype
    has_global: bool
    encode: Callable[[torch.Tensor, Element, torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]

    def global_scale(self, largest: torch.Tensor, element: Element) -> torch.Tensor:
        """Return the scale of a matrix, fp32, from its largest absolute value; 1 if it has none."""
        if not self.has_global:
            return torch.ones_like(largest)
        return torch.where(largest > 0, largest / (E4M3.largest * element.largest), 1.0)


def _encode_fp32(largest: torch.Tensor, element: Element, scale: torch.Tensor) -> torch.Tensor:
    return largest / element.largest


def _encode_e4m3(largest: torch.Tensor, element: Element, scale: torch.Tensor) -> torch.Tensor:
    return E4M3.encode(largest / (element.largest * scale))


def _encode_e8m0(largest: torch.Tensor, element: Element, scale: torch.Tensor) -> torch.Tensor:
    # The block's largest value gets the element's largest exponent, as in the OCP MX standard.
    exponent = torch.frexp(largest).exponent - torch.frexp(torch.tensor(element.largest)).exponent
    exponent = torch.where(largest > 0, exponent, -E8M0_BIAS)
    return (exponent + E8M0_BIAS).clamp(0, _E8M0_LARGEST).to(torch.uint8)


def _decode_e8m0(stored: torch.Tensor) -> torch.Tensor:
    return torch.exp2(stored.float() - E8M0_BIAS)


FP32 = ScaleKind("fp32", torch.float32, False, _encode_fp32, torch.Tensor.float)
E4M3_AND_FP32 = ScaleKind(
    "e4m3 and one fp32", torch.float8_e4m3fn, True, _encode_e4m3, torch.Tensor.float
)
E8M0 = ScaleKind("e8m0", torch.uint8, False, _encode_e8m0, _decode_e8m0)
