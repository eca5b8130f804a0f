"""The whole layer on unfused kernels: modes ``serial`` and ``two_stream``.

    route -> lora_shrink -> lora_expand -> (join) activation -> lora_shrink -> lora_expand -> down
          -> gate_up ------------------------>                                        -> finalize

The delta of gate and up goes to a buffer of its own, and the activation adds it to the pairs that
have one. ``two_stream`` runs the upper row, up to the join, on a side stream; ``serial`` is exactly
these launches on one stream. Nothing they read changes with that, so both give the same bits.

Dependent launch is off in both. With it, a launch may start while earlier ones of its stream still
run, and completion of a stream's last launch is what the events at fork and join stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.fused import in_pieces, prepared
from moegraft.backends.triton.launch import run_down, run_finalize, run_grouped_gemm, run_route
from moegraft.backends.triton.lora_expand import run_lora_delta
from moegraft.backends.triton.lora_shrink import run_lora_shrink
from moegraft.backends.triton.pair_activation import run_add_delta, run_pair_activation
from moegraft.backends.triton.stages import empty_gate_up
from moegraft.backends.triton.weights.rows import run_base_rows
from moegraft.backends.triton.workspace import MAX_PAIRS, Workspace, make_workspace
from moegraft.call import LayerCall
from moegraft.factor_table import SiteTable
from moegraft.streams import beside

#: Above this many tokens the base's own launches fill the machine and leave a side stream nothing.
MAX_TWO_STREAM_TOKENS = 256


@dataclass(frozen=True)
class UnfusedBuffers:
    """Scratch of one call; all of it is allocated before the fork and freed after the join.

    Attributes:
        ws: what the launches share with the fused ones.
        gate_up: fp32 ``[P, 2I]`` in the host's columns.
        ranks: fp32 ``[2 (1 without a gate), P, max_rank]``; None without adapters.
    """

    ws: Workspace
    gate_up: torch.Tensor
    ranks: torch.Tensor | None


def run_unfused(
    call: LayerCall,
    config: FusedConfig,
    two_stream: bool = False,
    max_tokens: int = MAX_TWO_STREAM_TOKENS,
) -> torch.Tensor:
    """Run a layer; without a live adapter the base's launches only.

    Args:
        call: the layer call; its activation may be ``custom``.
        config: tiles.
        two_stream: put the delta of gate and up on a side stream, if the call has a live adapter.
        max_tokens: not for calls with more tokens.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    config = config.overlapping(False)
    call = prepared(call)
    if call.topk_ids.numel() > MAX_PAIRS:
        return in_pieces(call, lambda piece: run_unfused(piece, config, two_stream, max_tokens))
    x, weights = call.x_TH, call.weights
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.shape[0]:
        return out
    buffers = _make_buffers(call, config)
    ws, top_k = buffers.ws, call.topk_ids.shape[1]
    slots = call.slots.slots if call.slots is not None and call.lora else None
    fork = two_stream and call.lora and x.shape[0] <= max_tokens
    run_route(
        call.topk_ids, slots, weights.num_experts, ws, config, call.expert_offset, x, ws.base_x
    )
    with _gate_up_delta(call, buffers, fork):
        run_grouped_gemm(x, weights, ws, top_k, config, buffers.gate_up, False, ws.base_x)
    h = _activate(call, buffers)
    run_base_rows(h, ws.base_h)
    if call.lora:
        assert call.table is not None and buffers.ranks is not None
        _run_delta(h, call.table, ("down",), buffers.ranks, ws, top_k, ws.delta_down)
    run_down(call.topk_weights, weights, replace(ws, h=h), config, None, slots)
    run_finalize(ws, out, top_k, call.scale, config)
    return out


def _make_buffers(call: LayerCall, config: FusedConfig) -> UnfusedBuffers:
    weights, pairs = call.weights, call.topk_ids.numel()
    ranks = None
    if call.lora:
        assert call.table is not None
        shape = (len(call.sides), pairs, call.table.max_rank)
        ranks = torch.empty(shape, dtype=torch.float32, device=weights.device)
    return UnfusedBuffers(
        ws=make_workspace(weights, pairs, config.block_m, call.lora, top_k=call.topk_ids.shape[1]),
        gate_up=empty_gate_up(weights, pairs),
        ranks=ranks,
    )


@contextmanager
def _gate_up_delta(call: LayerCall, buffers: UnfusedBuffers, fork: bool) -> Iterator[None]:
    """Compute the delta of gate and up beside the body, or before it."""
    if not call.lora:
        yield
        return
    table, ranks, ws = call.table, buffers.ranks, buffers.ws
    assert table is not None and ranks is not None
    top_k = call.topk_ids.shape[1]

    def work() -> None:
        _run_delta(call.x_TH, table, call.sides, ranks, ws, top_k, ws.delta_gate_up)

    if fork:
        with beside(call.x_TH.device, work):
            yield
    else:
        work()
        yield


def _run_delta(
    x: torch.Tensor,
    table: SiteTable,
    projections: tuple[str, ...],
    ranks: torch.Tensor,
    ws: Workspace,
    top_k: int,
    out: torch.Tensor | None,
) -> None:
    """Leave the delta of one side in its buffer and mark the pairs that have one."""
    assert out is not None
    run_lora_shrink(x, table, projections, ws, top_k, ranks)
    run_lora_delta(ranks[: len(projections)], table, projections, ws, out)


def _activate(call: LayerCall, buffers: UnfusedBuffers) -> torch.Tensor:
    """Add the delta, apply the activation and return h ``[P, I]``."""
    ws, weights, gate_up = buffers.ws, call.weights, buffers.gate_up
    delta = ws.delta_gate_up if call.lora else None
    custom = weights.activation.custom
    if custom is None:
        run_pair_activation(gate_up, weights, ws.h, ws, delta)
        return ws.h
    if delta is not None:
        run_add_delta(gate_up, weights, ws, delta)
    return custom(gate_up).to(weights.dtype).contiguous()
