"""Slot tensors of an engine, stored so that kernels read them in place."""

from __future__ import annotations

import torch

from moegraft.factors import UNIT_BYTES


def rank_major(lora_b: torch.Tensor) -> torch.Tensor:
    """Return zeros in the shape of ``[S, E or 1, out, R]``, stored as ``[S, E or 1, R, out]``."""
    slots, entries, out, rank = lora_b.shape
    return lora_b.new_zeros(slots, entries, rank, out).transpose(2, 3)


def whole_units(widths: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True when rows of these widths, one after the other, all begin at 16 bytes."""
    return all(width * dtype.itemsize % UNIT_BYTES == 0 for width in widths)
