"""Stage ``activation`` as a launch of its own, pair by pair, with the delta of gate and up added.

For runs whose gate_up is a plain product: the unfused modes, where the delta lies in a buffer of
its own until here, and the routed op when the delta is still being computed on another stream. The
product runs beside the delta, and only this launch comes behind both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.activation import (
    activation_constants,
    column_constants,
    gated,
    pointwise,
)
from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.workspace import RouteBuffers
from moegraft.types import ExpertWeights

#: Columns of one program.
BLOCK = 256


def run_pair_activation(
    gate_up: torch.Tensor,
    weights: ExpertWeights,
    h: torch.Tensor,
    ws: RouteBuffers | None = None,
    delta: torch.Tensor | None = None,
    every_pair: torch.Tensor | None = None,
) -> None:
    """Launch the activation; an ordinary launch, which starts when all before it is done.

    Args:
        gate_up: fp32 ``[P, 2I]`` (``[P, I]`` without a gate) in the host's columns.
        weights: for the kind of activation, not ``custom``, and the layout.
        h: ``[P, I]`` out.
        ws: the routing: rows of pairs that are not local are neither read nor written; None = all
            rows are computed, without a delta.
        delta: ``[P, 2I]`` as gate | up, any float dtype, added where ``ws.states`` says so.
        every_pair: likewise, but a delta of all pairs; not with ``delta``.
    """
    inter = weights.intermediate
    if not gate_up.shape[0]:
        return
    listed(pair_activation_kernel)[(gate_up.shape[0], triton.cdiv(inter, BLOCK))](
        gate_up, delta if every_pair is None else every_pair,
        None if ws is None else ws.states, None if ws is None else ws.pair_row, h,
        gate_up.shape[0], inter, gate_up.stride(0), gate_up.stride(1),
        LOCAL_ONLY=ws is not None,
        DELTA="all" if every_pair is not None else "none" if delta is None else "some",
        BLOCK=BLOCK, num_warps=4, **activation_constants(weights),
    )  # fmt: skip


def run_add_delta(
    gate_up: torch.Tensor, weights: ExpertWeights, ws: RouteBuffers, delta: torch.Tensor
) -> None:
    """Add the delta to packed rows in place, for an activation that is the host's function.

    Arguments are those of :func:`run_pair_activation`. Rows without a delta are not touched.
    """
    if not ws.num_pairs:
        return
    sides = 2 if weights.layout.gated else 1
    grid = (ws.num_pairs, triton.cdiv(weights.intermediate, BLOCK), sides)
    listed(add_delta_kernel)[grid](
        gate_up, delta, ws.states, ws.num_pairs, weights.intermediate, gate_up.stride(0),
        BLOCK=BLOCK, num_warps=4, **column_constants(weights),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def pair_activation_kernel(
    gate_up_ptr,  # [P, 2I] fp32, by strides
    delta_ptr,  # [P, 2 (1 without a gate), I]
    states_ptr,  # [2 (1), P] int32; only read for DELTA "some"
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
    DELTA: tl.constexpr,  # "none", "some" (pairs whose state says so) or "all" pairs
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
    if DELTA != "none":
        delta = delta_ptr + pair * (sides * intermediate) + n
        up_state = states_ptr + (sides - 1) * num_pairs + pair
        up = _plus(up, delta + (sides - 1) * intermediate, up_state, mask, DELTA)
    if GATED:
        gate = tl.load(packed + (columns + GATE_START) * column_stride, mask=mask, other=0.0)
        if DELTA != "none":
            gate = _plus(gate, delta, states_ptr + pair, mask, DELTA)
        h = gated(gate, up, KIND, ALPHA, HAS_LIMIT, LIMIT, UP_SHIFT)
    else:
        h = pointwise(up, KIND, ALPHA)
    tl.store(h_ptr + pair * intermediate + n, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _plus(values, delta_ptrs, state_ptr, mask, DELTA: tl.constexpr):
    """Return values with the delta added: always, or if the pair's state says that there is one."""
    if DELTA == "all":
        return values + tl.load(delta_ptrs, mask=mask, other=0.0).to(tl.float32)
    else:
        has_delta = tl.load(state_ptr) >= 256
        delta = tl.load(delta_ptrs, mask=mask & has_delta, other=0.0)
        return tl.where(has_delta, values + delta.to(tl.float32), values)


@triton.jit(do_not_specialize=["num_pairs"])
def add_delta_kernel(
    out_ptr,  # [P, 2I (I)] fp32, in place
    delta_ptr,  # [P, 2 (1 without a gate), I]
    states_ptr,  # [2 (1), P] int32; 0 where not local
    num_pairs,
    intermediate,
    row_stride,
    GATE_START: tl.constexpr,
    UP_START: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per pair, BLOCK columns and projection."""
    pair = tl.program_id(0).to(tl.int64)
    side = tl.program_id(2)
    sides: tl.constexpr = 2 if GATED else 1
    if tl.load(states_ptr + side * num_pairs + pair) >= 256:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = n < intermediate
        start = tl.where(side == sides - 1, UP_START, GATE_START)
        delta = tl.load(delta_ptr + (pair * sides + side) * intermediate + n, mask=mask, other=0.0)
        out_ptrs = out_ptr + pair * row_stride + start + n * COLUMN_STEP
        values = tl.load(out_ptrs, mask=mask, other=0.0)
        tl.store(out_ptrs, values + delta.to(tl.float32), mask=mask)
