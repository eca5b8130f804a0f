"""The sums behind the down product, by device: Triton launches, or torch in fp32."""

from __future__ import annotations

import torch

from moegraft.backends import BACKENDS
from moegraft.errors import PlanError


def combine(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    pair_to_row: torch.Tensor,
    down_delta: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    backend: str,
) -> None:
    """``out[t] = scale * sum_k w * (rows[pair_to_row] + down_delta)``, negative rows skipped."""
    num_tokens, top_k = topk_weights.shape
    if not out.numel():
        return
    if uses_triton(out, backend):
        from moegraft.backends.triton.combine import run_combine

        run_combine(rows, topk_weights, pair_to_row, down_delta, out, scale)
        return
    local = pair_to_row >= 0
    own = torch.where(local, pair_to_row, 0).long()
    # Without any row all pairs are skipped; a row of zeros stands for theirs.
    y = (rows if rows.shape[0] else rows.new_zeros(1, rows.shape[1]))[own].float()
    if down_delta is not None:
        y = y + down_delta.reshape(y.shape).float()
    y = torch.where(local[:, None], y * topk_weights.reshape(-1, 1).float(), 0.0)
    out.copy_(y.view(num_tokens, top_k, -1).sum(1) * scale)


def add_down_delta(
    out: torch.Tensor,
    down_delta: torch.Tensor,
    topk_ids: torch.Tensor | None,
    first_expert: int,
    end_expert: int,
    scale: float,
    backend: str,
) -> None:
    """``out[t] += scale * sum_k down_delta[t, k]`` over the pairs of experts [first, end)."""
    if not out.numel() or not down_delta.numel():
        return
    if uses_triton(out, backend):
        from moegraft.backends.triton.combine import run_add_down_delta

        run_add_down_delta(out, down_delta, topk_ids, first_expert, end_expert, scale)
        return
    delta = down_delta.float()
    if topk_ids is not None:
        local = (topk_ids >= first_expert) & (topk_ids < end_expert)
        delta = torch.where(local[:, :, None], delta, 0.0)
    out.copy_(out.float() + delta.sum(1) * scale)


def uses_triton(out: torch.Tensor, backend: str) -> bool:
    """True for the GPU's launches; PlanError for a backend that does not exist or can't run."""
    if backend and backend not in BACKENDS:
        raise PlanError(f"There is no backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if backend == "triton" and not out.is_cuda:
        from moegraft.backends.triton.device import is_interpreted

        if not is_interpreted():
            raise PlanError(
                f"Backend 'triton' can't sum here: the tensors are on {out.device}, this backend "
                "runs on NVIDIA GPUs."
            )
    return backend == "triton" or (not backend and out.is_cuda)
