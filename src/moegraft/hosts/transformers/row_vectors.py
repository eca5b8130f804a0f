"""What adapters add to a linear besides low-rank factors: biases of lora_B, DoRA's rescaling."""

from __future__ import annotations

from typing import Any

import torch

from moegraft.linear import LinearLora
from moegraft.types import TokenSlots


class RowVectors:
    """The vectors of one linear, held as rank-1 factors of linears whose input is 1.

    Args:
        module: the linear; its bias is not rescaled.
        dora: the site table of c - 1, see :mod:`moegraft.adapters.dora`; bias: that of the biases.
    """

    def __init__(self, module: Any, dora: LinearLora, bias: LinearLora) -> None:
        self._module = module
        self._dora = dora
        self._bias = bias

    def apply(self, rows: torch.Tensor, slots: TokenSlots) -> None:
        """Change rows ``[T, out]`` of the base linear in place, before their delta is added.

        Rows without a vector keep their bits.
        """
        dora, bias = self._dora.has_delta(slots), self._bias.has_delta(slots)
        if not dora and not bias:
            return
        one = rows.new_ones(rows.shape[0], 1)
        if dora:
            shift = torch.zeros_like(rows, dtype=torch.float32)
            self._dora.add_to(shift, one, slots)
            product = rows.float()
            if self._module.bias is not None:
                product = product - self._module.bias.float()
            scaled = (rows.float() + shift * product).to(rows.dtype)
            # A sum with 0 would do for numbers, not for the bits of NaN, infinity and -0.
            rows.copy_(torch.where(shift != 0, scaled, rows))
        if bias:
            self._bias.add_to(rows, one, slots)
