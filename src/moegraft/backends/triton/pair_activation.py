"""Stage ``activation`` as a launch of its own, pair by pair, with a delta from outside.

For the routed op when the delta is still being computed on another stream: the raw gate_up product
runs beside it, and only this launch waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.activation import gated, pointwise
from moegraft.types import ExpertWeights


@triton.jit
def pair_activation_kernel(
    gate_up_ptr,  # [P, 2I] fp32 in the host's columns; [P, I] without a gate
    delta_ptr,  # [P, 2I] as gate | up, any float dtype, or unused
    pair_row_ptr,  # [P] int32, -1 = not local
    h_ptr,  # [P, I] out
    intermediate,
    GATE_START: tl.constexpr,
    UP_START: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``h[p] = act(gate + delta, up + delta)``; exactly 0 where the pair is not local."""
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = columns < intermediate
    mask = in_range & (tl.load(pair_row_ptr + pair) >= 0)
    sides: tl.constexpr = 2 if GATED else 1
    row = gate_up_ptr + pair * (sides * intermediate)
    delta = delta_ptr + pair * (sides * intermediate) + columns
    up = tl.load(row + UP_START + columns * COLUMN_STEP, mask=mask, other=0.0)
    if HAS_DELTA:
        up += tl.load(delta + (sides - 1) * intermediate, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(row + GATE_START + columns * COLUMN_STEP, mask=mask, other=0.0)
        if HAS_DELTA:
            gate += tl.load(delta, mask=mask, other=0.0).to(tl.float32)
        h = gated(gate, up, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
    else:
        h = pointwise(up, KIND, ALPHA)
    h = tl.where(mask, h, 0.0)
    tl.store(h_ptr + pair * intermediate + columns, h.to(h_ptr.dtype.element_ty), mask=in_range)


def run_pair_activation(
    gate_up: torch.Tensor,
    delta: torch.Tensor | None,
    pair_row: torch.Tensor,
    weights: ExpertWeights,
    h: torch.Tensor,
) -> None:
    """Launch it; an ordinary launch, which starts when all before it and its events are done."""
    layout, act, inter = weights.layout, weights.activation, weights.intermediate
    up = layout.columns("up", inter)
    gate = layout.columns("gate", inter) if layout.gated else up
    block = min(512, triton.next_power_of_2(inter))
    pair_activation_kernel[(h.shape[0], triton.cdiv(inter, block))](
        gate_up, delta, pair_row, h, inter,
        GATE_START=gate.start, UP_START=up.start, COLUMN_STEP=up.step or 1, GATED=layout.gated,
        KIND=act.kind, ALPHA=act.alpha, HAS_LIMIT=act.limit is not None, LIMIT=act.limit or 0.0,
        UP_SHIFT=act.up_shift, HAS_DELTA=delta is not None, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
