"""Grouped matrix products for the CPU backend: only touched experts, one expert at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def grouped_mm(
    rows: torch.Tensor,
    weight_oi: torch.Tensor,
    bias: torch.Tensor | None,
    expert_offsets: Sequence[int],
) -> torch.Tensor:
    """``out[n] = W[e_n] rows[n] + b[e_n]`` with fp32 sums: fp32 ``[N, out]``.

    Args:
        rows: fp32 ``[N, in]``, sorted by expert.
        weight_oi: ``[E, out, in]``, any strides; 16-bit weights go through one reused fp32 buffer.
        bias: ``[E, out]`` or None.
        expert_offsets: E+1 row offsets.
    """
    out = torch.empty(rows.shape[0], weight_oi.shape[1], dtype=torch.float32)
    needs_upcast = weight_oi.dtype != torch.float32
    buffer = torch.empty(weight_oi.shape[1:], dtype=torch.float32) if needs_upcast else None
    start = expert_offsets[0]
    for e, end in enumerate(expert_offsets[1:]):
        if end > start:
            weight = weight_oi[e] if buffer is None else buffer.copy_(weight_oi[e])
            torch.mm(rows[start:end], weight.t(), out=out[start:end])
            if bias is not None:
                out[start:end] += bias[e]
        start = end
    return out
