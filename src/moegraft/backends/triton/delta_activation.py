"""The unfused stage ``activation`` on the GPU, with the delta of gate and up added first.

As the plain stage there is no delta. In the modes ``serial`` and ``two_stream`` the delta lies in a
buffer of its own until here, where the side stream has been waited for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.activation import gated, pointwise
from moegraft.backends.triton.workspace import RouteBuffers
from moegraft.types import ExpertWeights

#: Columns of one program.
BLOCK = 256


def run_activation(
    gate_up: torch.Tensor,
    weights: ExpertWeights,
    h: torch.Tensor,
    ws: RouteBuffers | None = None,
    delta: torch.Tensor | None = None,
) -> None:
    """Launch the activation.

    Args:
        gate_up: fp32 ``[P, 2I]`` (``[P, I]`` without a gate) in the host's columns.
        weights: for the kind of activation, not ``custom``, and the layout.
        h: ``[P, I]`` out.
        ws: the routing: rows of pairs that are not local are skipped; None = no row is.
        delta: fp32 ``[P, 2I]`` as gate | up, added where ``ws.states`` says so; None = no delta.
    """
    layout, act, inter = weights.layout, weights.activation, weights.intermediate
    up = layout.columns("up", inter)
    gate = layout.columns("gate", inter) if layout.gated else up
    rows = gate_up.shape[0]
    if not rows:
        return
    activation_kernel[(rows, triton.cdiv(inter, BLOCK))](
        gate_up, delta, None if ws is None else ws.states, None if ws is None else ws.pair_row, h,
        rows, inter, gate_up.stride(0), gate_up.stride(1),
        GATE_START=gate.start, UP_START=up.start, COLUMN_STEP=up.step or 1, GATED=layout.gated,
        KIND=act.kind, ALPHA=act.alpha, UP_SHIFT=act.up_shift,
        HAS_LIMIT=act.limit is not None, LIMIT=act.limit or 0.0,
        LOCAL_ONLY=ws is not None, HAS_DELTA=delta is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def run_add_delta(
    gate_up: torch.Tensor, weights: ExpertWeights, ws: RouteBuffers, delta: torch.Tensor
) -> None:
    """Add the delta to packed rows in place, for an activation that is the host's function.

    Arguments are those of :func:`run_activation`. Rows without a delta are not touched.
    """
    layout, inter = weights.layout, weights.intermediate
    up = layout.columns("up", inter)
    gate = layout.columns("gate", inter) if layout.gated else up
    if not ws.num_pairs:
        return
    sides = 2 if layout.gated else 1
    add_delta_kernel[(ws.num_pairs, triton.cdiv(inter, BLOCK), sides)](
        gate_up, delta, ws.states, ws.num_pairs, inter, gate_up.stride(0),
        FIRST_START=gate.start, UP_START=up.start, COLUMN_STEP=up.step or 1, SIDES=sides,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def activation_kernel(
    gate_up_ptr,  # [P, 2I] fp32, by strides
    delta_ptr,  # [P, 2 (1 without a gate), I] fp32
    states_ptr,  # [2 (1), P] int32
    pair_row_ptr,  # [P] int32, -1 = not local
    h_ptr,  # [P, I] out
    num_pairs,
    intermediate,
    row_stride,
    column_stride,
    GATE_START: tl.constexpr,
    UP_START: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    LOCAL_ONLY: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per pair and BLOCK columns of h."""
    pair = tl.program_id(0).to(tl.int64)
    if LOCAL_ONLY:
        if tl.load(pair_row_ptr + pair) < 0:
            return
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < intermediate
    sides: tl.constexpr = 2 if GATED else 1
    packed = gate_up_ptr + pair * row_stride
    columns = n * COLUMN_STEP
    up = tl.load(packed + (columns + UP_START) * column_stride, mask=mask, other=0.0)
    if HAS_DELTA:
        delta = delta_ptr + pair * (sides * intermediate) + n
        up_state = tl.load(states_ptr + (sides - 1) * num_pairs + pair)
        up = _plus(up, delta + (sides - 1) * intermediate, up_state, mask)
    if GATED:
        gate = tl.load(packed + (columns + GATE_START) * column_stride, mask=mask, other=0.0)
        if HAS_DELTA:
            gate = _plus(gate, delta, tl.load(states_ptr + pair), mask)
        h = gated(gate, up, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
    else:
        h = pointwise(up, KIND, ALPHA)
    tl.store(h_ptr + pair * intermediate + n, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _plus(values, delta_ptrs, state, mask):
    """Return values with the delta added if the pair's state says that there is one."""
    has_delta = state >= 256
    delta = tl.load(delta_ptrs, mask=mask & has_delta, other=0.0)
    return tl.where(has_delta, values + delta, values)


@triton.jit(do_not_specialize=["num_pairs"])
def add_delta_kernel(
    out_ptr,  # [P, 2I (I)] fp32, in place
    delta_ptr,  # [P, SIDES, I] fp32
    states_ptr,  # [SIDES, P] int32; 0 where not local
    num_pairs,
    intermediate,
    row_stride,
    FIRST_START: tl.constexpr,  # first column of gate; of up without a gate
    UP_START: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    SIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per pair, BLOCK columns and projection."""
    pair = tl.program_id(0).to(tl.int64)
    side = tl.program_id(2)
    if tl.load(states_ptr + side * num_pairs + pair) >= 256:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = n < intermediate
        start = tl.where(side == SIDES - 1, UP_START, FIRST_START)
        delta = tl.load(delta_ptr + (pair * SIDES + side) * intermediate + n, mask=mask, other=0.0)
        out_ptrs = out_ptr + pair * row_stride + start + n * COLUMN_STEP
        tl.store(out_ptrs, tl.load(out_ptrs, mask=mask, other=0.0) + delta, mask=mask)
