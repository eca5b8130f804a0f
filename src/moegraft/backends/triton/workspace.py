"""Scratch of one layer call, at fixed addresses while the call runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.types import ExpertWeights

#: Up to this many pairs one program routes them all, and block numbers are dense.
MAX_DENSE_PAIRS = 32


@dataclass(frozen=True)
class Workspace:
    """What the launches of one layer call hand to one another; one per stream and per graph.

    ``rows = num_blocks * block_m`` is the most rows that any routing of P pairs can need.

    Attributes:
        row_pair: int32 ``[rows]``, pair of a row; rows past a block's end hold anything.
        pair_row: int32 ``[P]``, -1 = the pair is not local.
        segments: int32 ``[P, 4]``, see :mod:`moegraft.backends.triton.route`.
        row_flags: int32 ``[3, rows]``: gate, up (no gate: up, unused), down; 1 = has a delta.
        block_info: int32 ``[num_blocks]``, expert * 256 + rows.
        counters: int32 ``[3, num_blocks]``, see :mod:`moegraft.backends.triton.sync`: rows whose
            delta is there for gate and up (both counted); tiles of h; rows whose delta is there
            for down.
        h: ``[rows, I]`` in the weights' dtype.
        y: fp32 ``[P, H]``, weighted.
        delta_gate_up: fp32 ``[rows, 2I]`` (``[rows, I]`` without a gate); None without adapters.
        delta_down: fp32 ``[rows, H]``; None without adapters.
    """

    num_pairs: int
    num_blocks: int
    row_pair: torch.Tensor
    pair_row: torch.Tensor
    segments: torch.Tensor
    row_flags: torch.Tensor
    block_info: torch.Tensor
    counters: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    delta_gate_up: torch.Tensor | None
    delta_down: torch.Tensor | None


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return how many block numbers P pairs over E experts can need."""
    if num_pairs <= MAX_DENSE_PAIRS:
        return min(num_pairs, num_experts + num_pairs // block_m)
    return num_experts + num_pairs // block_m


def make_workspace(weights: ExpertWeights, num_pairs: int, block_m: int, lora: bool) -> Workspace:
    """Allocate scratch for P pairs; ``lora`` adds what only adapters need.

    Nothing is initialised. All of it comes from torch's allocator on the current stream, so a
    captured call takes its memory from the graph's pool.
    """
    blocks = max_blocks(num_pairs, weights.num_experts, block_m)
    rows = blocks * block_m
    device = weights.device

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    sides = 2 if weights.layout.gated else 1
    return Workspace(
        num_pairs=num_pairs,
        num_blocks=blocks,
        row_pair=ints(rows),
        pair_row=ints(num_pairs),
        segments=ints(num_pairs, 4),
        row_flags=ints(3, rows),
        block_info=ints(blocks),
        counters=ints(3, blocks),
        h=torch.empty(rows, weights.intermediate, dtype=weights.dtype, device=device),
        y=floats(num_pairs, weights.hidden),
        delta_gate_up=floats(rows, sides * weights.intermediate) if lora else None,
        delta_down=floats(rows, weights.hidden) if lora else None,
    )
