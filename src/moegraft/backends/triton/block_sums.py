"""Weighted sums of blocks of 64-bit words, for checksums of what lies on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed

_STEP = 1024


@triton.jit
def block_sums_kernel(
    words_ptr,  # int64
    weights_ptr,  # [BLOCK] int64
    blocks_ptr,  # [blocks, 2] int64: first word, how many
    sums_ptr,  # [blocks] int64
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """``sums[i] = sum_j words[first_i + j] * weights[j]`` modulo 2^64."""
    block = tl.program_id(0)
    first = tl.load(blocks_ptr + 2 * block)
    count = tl.load(blocks_ptr + 2 * block + 1)
    total = tl.zeros([STEP], tl.int64)
    for begin in range(0, BLOCK, STEP):
        at = begin + tl.arange(0, STEP)
        words = tl.load(words_ptr + first + at, mask=at < count, other=0)
        total += words * tl.load(weights_ptr + at)
    tl.store(sums_ptr + block, tl.sum(total, 0))


def run_block_sums(
    words: torch.Tensor, weights: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """Launch :func:`block_sums_kernel` on the current stream; return the sums, int64 ``[blocks]``.

    Args:
        words: int64, 1-D.
        weights: int64 ``[n]``, n a multiple of 1024.
        blocks: int64 ``[blocks, 2]``: first word, and how many, at most n.
    """
    sums = torch.empty(len(blocks), dtype=torch.int64, device=words.device)
    if len(blocks):
        listed(block_sums_kernel)[(len(blocks),)](
            words, weights, blocks, sums, BLOCK=len(weights), STEP=_STEP, num_warps=4
        )
    return sums
