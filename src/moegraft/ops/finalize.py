"""Sums per token behind :func:`routed_moe_lora`: with a delta of down, or with one added later."""

from __future__ import annotations

import torch

from moegraft.errors import MoegraftError
from moegraft.ops.arguments import check_tensor, check_written
from moegraft.ops.operators import add_down_delta_op, finalize_moe_lora_op


def finalize_moe_lora(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    down_delta: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``out[t] = factor * sum_k w[t, k] * (rows[idx[t*K + k]] + down_delta[t, k])`` in fp32.

    The factor and the routing weight are applied once, to base and delta alike.

    Args:
        rows: contiguous ``[padded, H]``, any float dtype.
        topk_weights: float ``[T, K]``.
        expanded_idx_to_permuted_idx: int32/int64 ``[T*K]``; negative = the pair is skipped: no row,
            weight or delta of it is read.
        down_delta: contiguous ``[T, K, H]``, any float dtype, **without** the routing weight. A
            delta that carries it is for :func:`add_down_delta`.
        routed_scaling_factor: None = 1.
        out: ``[T, H]`` float to write to, in memory of its own; None = a new one in rows' dtype.
        backend: force a backend by name.

    Raises:
        MoegraftError: shapes, dtypes or devices disagree.
    """
    if rows.dim() != 2 or topk_weights.dim() != 2:
        raise MoegraftError(
            f"rows {tuple(rows.shape)} must be [padded, H] and topk_weights "
            f"{tuple(topk_weights.shape)} [T, K]."
        )
    if not topk_weights.shape[1]:
        raise MoegraftError(
            f"topk_weights have shape {tuple(topk_weights.shape)}: no expert per token."
        )
    (num_tokens, top_k), hidden, device = topk_weights.shape, rows.shape[1], rows.device
    index = expanded_idx_to_permuted_idx
    check_tensor(rows, "rows", tuple(rows.shape), device, contiguous=True)
    check_tensor(topk_weights, "topk_weights", (num_tokens, top_k), device)
    if index.dtype not in (torch.int32, torch.int64):
        raise MoegraftError(
            f"expanded_idx_to_permuted_idx is {index.dtype}; expected int32 or int64."
        )
    shape = (num_tokens * top_k,)
    check_tensor(index, "expanded_idx_to_permuted_idx", shape, device, index.dtype)
    if down_delta is not None:
        shape3 = (num_tokens, top_k, hidden)
        check_tensor(down_delta, "down_delta", shape3, device, contiguous=True)
    if out is None:
        out = rows.new_empty(num_tokens, hidden)
    check_tensor(out, "out", (num_tokens, hidden), device)
    check_written(out, "out", {"rows": rows, "down_delta": down_delta})
    finalize_moe_lora_op(
        rows, topk_weights.contiguous(), index.contiguous(), down_delta,
        1.0 if routed_scaling_factor is None else float(routed_scaling_factor), backend or "", out,
    )  # fmt: skip
    return out


def add_down_delta(
    output: torch.Tensor,
    down_delta: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    *,
    local_expert_offset: int = 0,
    local_num_experts: int | None = None,
    routed_scaling_factor: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``output[t] += factor * sum_k down_delta[t, k]``, in fp32, in place.

    For a delta that carries its routing weight already. ``output`` has the factor from finalize,
    so here it multiplies the delta alone: each of them gets it once.

    Args:
        output: ``[T, H]`` float.
        down_delta: contiguous ``[T, K, H]``, or ``[T, H]`` when it is summed already.
        topk_ids: int32/int64 ``[T, K]`` plain global ids: pairs of experts that are not local are
            not read. None = every pair counts, so rows of others must be 0.
        local_expert_offset, local_num_experts: the local range; None = all ids from the offset on.
        routed_scaling_factor: the one given to finalize; None = 1.
        backend: force a backend by name.

    Returns:
        ``output``.

    Raises:
        MoegraftError: shapes, dtypes or devices disagree.
    """
    if output.dim() != 2 or down_delta.dim() not in (2, 3):
        raise MoegraftError(
            f"output {tuple(output.shape)} must be [T, H] and down_delta "
            f"{tuple(down_delta.shape)} [T, K, H] or [T, H]."
        )
    if down_delta.dim() == 2:
        if topk_ids is not None:
            raise MoegraftError(
                "down_delta is [T, H], summed already, so topk_ids can't select pairs of it."
            )
        down_delta = down_delta[:, None]
    (num_tokens, hidden), device = output.shape, output.device
    top_k = down_delta.shape[1]
    check_tensor(output, "output", (num_tokens, hidden), device)
    shape = (num_tokens, top_k, hidden)
    check_tensor(down_delta, "down_delta", shape, device, contiguous=True)
    check_written(output, "output", {"down_delta": down_delta})
    if local_expert_offset < 0 or (local_num_experts is not None and local_num_experts < 0):
        raise MoegraftError(
            f"local_expert_offset={local_expert_offset} and local_num_experts={local_num_experts} "
            "are no range of expert ids."
        )
    if topk_ids is not None:
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise MoegraftError(f"topk_ids are {topk_ids.dtype}; expected int32 or int64.")
        check_tensor(topk_ids, "topk_ids", (num_tokens, top_k), device, topk_ids.dtype)
        topk_ids = topk_ids.contiguous()
    end = 2**31 - 1 if local_num_experts is None else local_expert_offset + local_num_experts
    add_down_delta_op(
        output, down_delta, topk_ids, local_expert_offset, end,
        1.0 if routed_scaling_factor is None else float(routed_scaling_factor), backend or "",
    )  # fmt: skip
    return output
