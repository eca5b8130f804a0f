"""Grouped matrix products for the CPU backend: only touched experts, one expert at a time."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from moegraft.stages import Permutation


def grouped_mm(
    rows: torch.Tensor, weight_oi: torch.Tensor, bias: torch.Tensor | None, perm: Permutation
) -> torch.Tensor:
    """``out[n] = W[e_n] rows[n] + b[e_n]`` with fp32 sums: fp32 ``[N, out]``.

    Args:
        rows: fp32 ``[N, in]``, sorted by expert.
        weight_oi: ``[E, out, in]``, any strides; 16-bit weights go through one reused fp32 buffer.
        bias: ``[E, out]`` or None.
        perm: which rows belong to which expert.
    """
    weight_io = weight_oi.transpose(1, 2)
    if rows.shape[0] and _torch_can(rows, weight_io):
        out = F.grouped_mm(rows, weight_io, offs=perm.expert_ends)
    else:
        out = _one_by_one(rows, weight_io, perm.expert_offsets)
    return out if bias is None else out + bias[perm.row_to_expert]


def _torch_can(rows: torch.Tensor, weight_io: torch.Tensor) -> bool:
    """torch's own loop over experts is leaner; it wants fp32 here and strides of 16 bytes."""
    strides = (rows.stride(0), *weight_io.stride()[:1], max(weight_io.stride()[1:]))
    return (
        weight_io.dtype == torch.float32
        and 1 in weight_io.stride()[1:]
        and all(stride % 4 == 0 for stride in strides)
        and rows.data_ptr() % 16 == 0
        and weight_io.data_ptr() % 16 == 0
    )


def _one_by_one(
    rows: torch.Tensor, weight_io: torch.Tensor, expert_offsets: tuple[int, ...]
) -> torch.Tensor:
    out = torch.empty(rows.shape[0], weight_io.shape[2], dtype=torch.float32)
    needs_upcast = weight_io.dtype != torch.float32
    buffer = torch.empty(weight_io.shape[1:], dtype=torch.float32) if needs_upcast else None
    start = 0
    for e, end in enumerate(expert_offsets[1:]):
        if end > start:
            weight = weight_io[e] if buffer is None else buffer.copy_(weight_io[e])
            torch.mm(rows[start:end], weight, out=out[start:end])
        start = end
    return out
