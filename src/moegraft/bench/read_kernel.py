"""The kernel that finds out how fast a GPU's memory can be read; needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _read(data, out, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.int32)
    for turn in range(TURNS):
        acc ^= tl.load(data + (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(acc, 0))


def read_all(data: torch.Tensor, out: torch.Tensor, block: int, turns: int, warps: int) -> None:
    """Read every element of int32 ``data``; its length must be a multiple of block * turns.

    ``out``: int32, at least one element per program, ``len(data) / (block * turns)`` of them.
    """
    programs = data.numel() // (block * turns)
    _read[(programs,)](data, out, BLOCK=block, TURNS=turns, num_warps=warps)
