"""The whole layer where each expert has a norm behind it: plain stages, and the host's function.

    permute -> gate_up (+ delta) -> activation -> down (+ delta) -> norm -> finalize

The norm takes whole rows with base and delta in them, so neither the routing weight nor the delta
may join later, as they do in the fused kernels.
"""

from __future__ import annotations

import torch

from moegraft.backends.triton.fused import in_pieces, prepared
from moegraft.backends.triton.stages import TritonStages
from moegraft.backends.triton.workspace import MAX_PAIRS
from moegraft.call import LayerCall


def run_normed(call: LayerCall, stages: TritonStages) -> torch.Tensor:
    """Run a layer whose weights have a ``post_norm``.

    Rows of pairs that are not local hold anything, before the norm and behind it; finalize skips
    them.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    call = prepared(call)
    if call.topk_ids.numel() > MAX_PAIRS:
        return in_pieces(call, lambda piece: run_normed(piece, stages))
    x, weights, table = call.x_TH, call.weights, call.table
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.shape[0]:
        return out
    assert weights.post_norm is not None
    slots = call.slots if call.lora else None
    order = stages.permute(call.topk_ids, slots, weights.num_experts, call.expert_offset)
    gate_up = stages.gate_up(x, weights, order)
    if table is not None and slots is not None:
        stages.lora_shrink_expand(x, table, call.sides, order, slots, gate_up)
    h = stages.activation(gate_up, weights, weights.dtype)
    y = stages.down(h, weights, order)
    if table is not None and slots is not None:
        stages.lora_shrink_expand(h, table, ("down",), order, slots, y)
    return out.copy_(stages.finalize(weights.post_norm(y), call.topk_weights, order, call.scale))
