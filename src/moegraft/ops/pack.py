"""Routing in one int32 per pair: ``(expert id << 16) | bits of the bf16 weight``."""

from __future__ import annotations

import torch

from moegraft.errors import MoegraftError

#: The largest expert id that fits the upper 16 bits.
MAX_PACKED_EXPERT = 2**15 - 1


def pack_topk(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Pack ids and weights.

    Args:
        topk_ids: int32/int64, any shape. Ids outside ``[0, 32767]`` become -1: no model has them.
        topk_weights: float of the same shape; rounded to bf16 (to nearest, ties to even).

    Returns:
        int32 of the same shape.

    Raises:
        MoegraftError: shapes or dtypes don't fit.

    Example: expert 3 with weight 1.0 (bf16 bits 0x3F80) is 0x00033F80; expert -1 is 0xFFFF____.
    """
    if topk_ids.shape != topk_weights.shape:
        raise MoegraftError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} differ."
        )
    if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_weights.is_floating_point():
        raise MoegraftError(
            f"topk_ids are {topk_ids.dtype} and topk_weights {topk_weights.dtype}; expected int32 "
            "or int64, and float."
        )
    fits = (topk_ids >= 0) & (topk_ids <= MAX_PACKED_EXPERT)
    ids = torch.where(fits, topk_ids, -1).to(torch.int32)
    bits = topk_weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (ids << 16) | bits


def unpack_topk(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids int32, weights fp32) of a packed int32 tensor, of its shape.

    The weights are exactly the bf16 values. One launch on a GPU, nothing on the host.

    Raises:
        MoegraftError: not int32.
    """
    if packed.dtype != torch.int32:
        raise MoegraftError(
            f"Packed topk_ids must be int32, (expert id << 16) | bf16 bits; got {packed.dtype}. "
            "For plain ids pass topk_weights too."
        )
    packed = packed.contiguous()
    if packed.is_cuda and not torch.compiler.is_compiling():
        from moegraft.backends.triton.pairs import run_unpack

        return run_unpack(packed)
    return packed >> 16, (packed << 16).view(torch.float32)
