"""Grouped products over quantised weights: each touched expert is dequantised once, then let go."""

from __future__ import annotations

import torch

from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import Side, expert_matrix, weight_format_of
from moegraft.stages import Permutation
from moegraft.types import ExpertWeights


def quantised_mm(
    rows: torch.Tensor,
    weights: ExpertWeights,
    side: Side,
    bias: torch.Tensor | None,
    perm: Permutation,
) -> torch.Tensor:
    """``out[n] = W[e_n] rows[n] + b[e_n]`` with fp32 sums and exact weights: fp32 ``[N, out]``.

    Args:
        rows: fp32 ``[N, in]``, sorted by expert; W8A8 formats round a copy of them.
        weights: quantised ones.
        side: which of them.
        bias: ``[E, out]`` or None.
        perm: which rows belong to which expert.
    """
    weight_format = weight_format_of(weights)
    assert weight_format is not None
    rows = rounded_activations(rows, weight_format)
    width = (weights.gate_up if side == "gate_up" else weights.down).shape[1]
    out = torch.empty(rows.shape[0], width, dtype=torch.float32)
    start = 0
    for expert, end in enumerate(perm.expert_offsets[1:]):
        if end > start:
            matrix = expert_matrix(weights, side, expert)
            torch.mm(rows[start:end], matrix.T, out=out[start:end])
        start = end
    return out if bias is None else out + bias[perm.row_to_expert]
