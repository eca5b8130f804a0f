"""The routed op on CPU tensors: the backend's stages, with a delta from outside."""

from __future__ import annotations

import torch

from moegraft.backends.cpu import base
from moegraft.backends.cpu.permute import permute
from moegraft.errors import MoegraftError
from moegraft.routed_call import RoutedCall
from moegraft.types import WeightLayout


def run_routed(call: RoutedCall) -> None:
    """Run a routed call; see :class:`moegraft.routed_call.RoutedCall`.

    Raises:
        MoegraftError: it names a CUDA event.
    """
    for name in ("lora_ready", "gemm2_done"):
        if getattr(call, name):
            raise MoegraftError(
                f"{name}_event is the CUDA event {getattr(call, name):#x}, but the tensors are on "
                "the CPU, where nothing runs beside the caller; pass 0."
            )
    weights = call.weights
    perm = permute(call.topk_ids, None, weights.num_experts, call.expert_offset)
    gate_up = base.gate_up(call.x_TH, weights, perm)
    if call.gate_up_delta is not None:
        own = call.gate_up_delta[perm.row_to_pair].float()
        add_gate_up_delta(gate_up, own, weights.layout, weights.intermediate)
    h = base.activation(gate_up, weights, call.x_TH.dtype)
    if call.h is not None:
        call.h.zero_()
        call.h[perm.row_to_pair] = h
    y = base.down(h, weights, perm)
    if call.out is not None:
        call.out.copy_(base.finalize(y, call.topk_weights, perm, call.scale))
    if call.rows is not None and call.pair_to_row is not None:
        call.rows[perm.row_to_pair] = y.to(call.rows.dtype)
        call.pair_to_row.fill_(-1)
        call.pair_to_row[perm.row_to_pair] = perm.row_to_pair.to(torch.int32)


def add_gate_up_delta(
    gate_up: torch.Tensor, delta: torch.Tensor, layout: WeightLayout, intermediate: int
) -> None:
    """Add ``delta`` ``[N, 2I]`` as gate | up to ``gate_up`` in the host's columns, in place."""
    sides = ("gate", "up") if layout.gated else ("up",)
    for i, side in enumerate(sides):
        columns = delta[:, i * intermediate : (i + 1) * intermediate]
        gate_up[:, layout.columns(side, intermediate)] += columns
