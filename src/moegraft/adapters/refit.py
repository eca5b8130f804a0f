"""Factors of a smaller rank, by a truncated singular value decomposition; not exact in general."""

from __future__ import annotations

from dataclasses import replace

import torch

from moegraft.adapters.writers import Pair


def refit(pair: Pair, rank: int) -> tuple[Pair, float]:
    """Return the best factors of a rank, and their error.

    A factor that all experts share stays one: the others are then seen as one tall (wide) matrix.

    Args:
        pair: any factors.
        rank: the rank to reach; a pair of no larger rank is returned as it is. Where the matrix
            itself has a smaller one, so have the factors.

    Returns:
        Factors in the same dtype, and the largest ``||dW' - dW|| / ||dW||`` (Frobenius) over the
        experts (over all as one where they share a factor), rounding to that dtype included. 0.0
        for what was left as it is.
    """
    if pair.rank <= rank:
        return pair, 0.0
    num_a, num_b = pair.lora_A.shape[0], pair.lora_B.shape[0]
    a, b = pair.lora_A.double(), pair.lora_B.double()
    if num_a < num_b:
        b = b.reshape(1, -1, pair.rank)
    elif num_b < num_a:
        a = a.transpose(0, 1).reshape(1, pair.rank, -1)
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.transpose(1, 2))
    u, s, v = torch.linalg.svd(r_b @ r_a.transpose(1, 2), full_matrices=False)
    root = s[:, :rank].sqrt()
    new_b = (q_b @ (u[:, :, :rank] * root[:, None])).to(pair.lora_B.dtype)
    new_a = ((root[:, :, None] * v[:, :rank]) @ q_a.transpose(1, 2)).to(pair.lora_A.dtype)
    # ||B'A' - BA|| from the small triangles: [B' -B] [A'; A], no [out, in] matrix is formed.
    left = torch.linalg.qr(torch.cat([new_b.double(), -b], 2)).R
    right = torch.linalg.qr(torch.cat([new_a.double(), a], 1).transpose(1, 2)).R
    error = torch.linalg.matrix_norm(left @ right.transpose(1, 2))
    size = torch.linalg.vector_norm(s, dim=1)
    worst = torch.where(size > 0, error / size.clamp(min=torch.finfo(size.dtype).tiny), error)
    if num_a < num_b:
        new_b = new_b.reshape(num_b, -1, new_b.shape[2])
    elif num_b < num_a:
        new_a = new_a.reshape(new_a.shape[1], num_a, -1).transpose(0, 1)
    return replace(pair, lora_A=new_a, lora_B=new_b), float(worst.max())
