"""CPU stages of the base layer: ``gate_up``, ``activation``, ``down``, ``finalize``."""

from __future__ import annotations

import torch

from moegraft.activations import apply_activation
from moegraft.backends.cpu.grouped import grouped_mm
from moegraft.backends.cpu.quantised import quantised_mm
from moegraft.stages import Permutation
from moegraft.types import ExpertWeights


def gate_up(
    x_TH: torch.Tensor, weights: ExpertWeights, perm: Permutation, own_dtype_rows: int = 0
) -> torch.Tensor:
    """See :meth:`moegraft.stages.Stages.gate_up`; own_dtype_rows: see ``grouped.py``."""
    rows = x_TH[perm.row_to_token]
    if weights.scales is not None:
        return quantised_mm(rows.float(), weights, "gate_up", weights.gate_up_bias, perm)
    return grouped_mm(rows, weights.gate_up_oi, weights.gate_up_bias, perm, own_dtype_rows)


def activation(gate_up: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype) -> torch.Tensor:
    """See :meth:`moegraft.stages.Stages.activation`."""
    h = apply_activation(gate_up, weights.activation, weights.layout, weights.intermediate)
    return h.to(dtype)


def down(
    h_NI: torch.Tensor, weights: ExpertWeights, perm: Permutation, own_dtype_rows: int = 0
) -> torch.Tensor:
    """See :meth:`moegraft.stages.Stages.down`; own_dtype_rows: see ``grouped.py``."""
    if weights.scales is not None:
        return quantised_mm(h_NI.float(), weights, "down", weights.down_bias, perm)
    return grouped_mm(h_NI, weights.down_oi, weights.down_bias, perm, own_dtype_rows)


def finalize(
    y_NH: torch.Tensor, topk_weights: torch.Tensor, perm: Permutation, scale: float
) -> torch.Tensor:
    """See :meth:`moegraft.stages.Stages.finalize`."""
    row_weights = topk_weights.reshape(-1)[perm.row_to_pair].float()
    y_NH = y_NH * row_weights[:, None]
    if perm.num_rows == perm.num_tokens * perm.top_k:
        shape = (perm.num_tokens, perm.top_k, y_NH.shape[1])
        out = y_NH[perm.pair_to_row].view(shape).sum(dim=1)
    else:
        # Dropped pairs have no row; index_add_ walks the rows in order, so sums repeat to the bit.
        out = torch.zeros(perm.num_tokens, y_NH.shape[1], dtype=torch.float32)
        out.index_add_(0, perm.row_to_token, y_NH)
    return out if scale == 1.0 else out.mul_(scale)
