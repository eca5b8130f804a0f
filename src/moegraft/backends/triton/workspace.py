"""Scratch of one layer call, at fixed addresses while the call runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moegraft.backends.triton.weights.rows import BaseRows, make_base_rows
from moegraft.types import ExpertWeights

#: Pairs that one round of launches takes: route counts them in 15 bits.
MAX_PAIRS = 2**15 - 1
#: Up to this many pairs one program routes them all, and block numbers are dense.
MAX_DENSE_PAIRS = 32


@dataclass(frozen=True)
class RouteBuffers:
    """What route writes: which pairs each block of rows holds, and where each pair went.

    ``rows = num_blocks * block_m`` is the most rows that any routing of P pairs can need. What a
    pair has, lies at the pair's number; rows only say which pairs a block holds.

    Attributes:
        row_pair: int32 ``[rows]``, pair of a row; rows past a block's end hold anything.
        pair_row: int32 ``[P]``, -1 = the pair is not local.
        segments: int32 ``[P, 4]``, see :mod:`moegraft.backends.triton.route`.
        states: int32 ``[3, P]`` for gate, up (no gate: up, unused), down: how many parts of the
            pair's delta are there, + 256 for each that has values.
        block_info: int32 ``[num_blocks]``, expert * 256 + rows.
        h_counter: int32 ``[num_blocks]``, tiles of h that are there.
    """

    num_pairs: int
    num_blocks: int
    row_pair: torch.Tensor
    pair_row: torch.Tensor
    segments: torch.Tensor
    states: torch.Tensor
    block_info: torch.Tensor
    h_counter: torch.Tensor


@dataclass(frozen=True)
class Workspace(RouteBuffers):
    """What the launches of one layer call hand to one another; one per stream and per graph.

    Attributes:
        h: ``[P, I]`` in the weights' dtype; rows of pairs that are not local are not written.
        y: ``[P, H]``, weighted, bf16 with bf16 weights and else fp32; likewise.
        delta_gate_up: ``[P, 2I]`` as gate | up (``[P, I]`` without a gate), only pairs that have a
            delta; None without adapters.
        delta_down: ``[P, H]``, likewise.
        base_x: x as the base product of quantised weights reads it; None = as it is.
        base_h: h likewise.
    """

    h: torch.Tensor
    y: torch.Tensor
    delta_gate_up: torch.Tensor | None
    delta_down: torch.Tensor | None
    base_x: BaseRows | None = None
    base_h: BaseRows | None = None


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return how many block numbers P pairs over E experts can need."""
    if num_pairs <= MAX_DENSE_PAIRS:
        return min(num_pairs, num_experts + num_pairs // block_m)
    return num_experts + num_pairs // block_m


def make_route_buffers(
    num_experts: int, num_pairs: int, block_m: int, device: torch.device
) -> RouteBuffers:
    """Allocate what route writes for P pairs; nothing is initialised."""
    blocks = max_blocks(num_pairs, num_experts, block_m)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return RouteBuffers(
        num_pairs=num_pairs,
        num_blocks=blocks,
        row_pair=ints(blocks * block_m),
        pair_row=ints(num_pairs),
        segments=ints(num_pairs, 4),
        states=ints(3, num_pairs),
        block_info=ints(blocks),
        h_counter=ints(blocks),
    )


def y_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of y for weights of this dtype: bf16 for bf16, else fp32.

    Half the bytes of y, which at 128 tokens and more would not all stay in the L2 until finalize
    reads them. Not fp16, whose range y may leave.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def make_workspace(
    weights: ExpertWeights,
    num_pairs: int,
    block_m: int,
    lora: bool,
    delta_dtype: torch.dtype = torch.float32,
    y_type: torch.dtype | None = None,
    top_k: int = 1,
    eights: bool = False,
) -> Workspace:
    """Allocate scratch for P pairs; ``lora`` adds what only adapters need, in ``delta_dtype``.

    ``y_type`` None = :func:`y_dtype`. ``top_k`` says how many tokens there are, ``eights`` how the
    base product's copies are ordered (:class:`BaseRows`).

    Nothing is initialised. All of it comes from torch's allocator on the current stream, so a
    captured call takes its memory from the graph's pool.
    """
    device = weights.device
    route = make_route_buffers(weights.num_experts, num_pairs, block_m, device)

    def delta(columns: int) -> torch.Tensor:
        return torch.empty(num_pairs, columns, dtype=delta_dtype, device=device)

    def base_rows(rows: int, columns: int) -> BaseRows | None:
        return make_base_rows(weights.weight_format, rows, columns, weights.dtype, device, eights)

    sides = 2 if weights.layout.gated else 1
    return Workspace(
        **vars(route),
        h=torch.empty(num_pairs, weights.intermediate, dtype=weights.dtype, device=device),
        y=torch.empty(
            num_pairs, weights.hidden, dtype=y_type or y_dtype(weights.dtype), device=device
        ),
        delta_gate_up=delta(sides * weights.intermediate) if lora else None,
        delta_down=delta(weights.hidden) if lora else None,
        base_x=base_rows(triton.cdiv(num_pairs, top_k), weights.hidden),
        base_h=base_rows(num_pairs, weights.intermediate),
    )
