"""The specification: the layer in fp32 (or fp64) torch, loops allowed, no tricks.

Read it beside the maths. For token t with slot a and each of its pairs (e, w)::

    gate = W_gate[e] x + b_gate[e] + s_gate[a] * B_gate[a,e] (A_gate[a,e] x)
    up   = W_up[e]   x + b_up[e]   + s_up[a]   * B_up[a,e]   (A_up[a,e]   x)
    h    = act(gate, up)                                  # rounded to the activation dtype
    y    = W_down[e] h + b_down[e] + s_down[a] * B_down[a,e] (A_down[a,e] h)
    out[t] = scale * sum_k w * y                          # w * norm(y) where experts have a norm

``W`` is the stored weights' exact value, whatever their format; a W8A8 format rounds the x and h
that W meets, never those that A meets. A pair whose expert is -1 or on another rank contributes
exactly 0. A slot of -1, or a factor that an adapter lacks, contributes no delta.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moegraft.activations import apply_activation
from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import expert_matrix, weight_format_of
from moegraft.sites import LINEAR_PROJECTION
from moegraft.types import ExpertWeights, LoraFactor, SiteFactors


def lora_delta(factor: LoraFactor | None, entry: int, x: torch.Tensor) -> torch.Tensor | float:
    """Return ``scale * B[entry] (A[entry] x)`` in x's dtype; 0.0 when there is no factor.

    ``x`` is ``[in]``; an expert dimension of 1 is shared by all experts; entry -1 means none.
    """
    if factor is None or entry < 0 or factor.rank == 0:
        return 0.0
    lora_a = factor.lora_A[entry if factor.lora_A.shape[0] > 1 else 0].to(x.dtype)
    lora_b = factor.lora_B[entry if factor.lora_B.shape[0] > 1 else 0].to(x.dtype)
    return factor.scale * (lora_b @ (lora_a @ x))


def base_input(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Return ``x`` ``[in]`` as the base product reads it: rounded where the format says so."""
    found = weight_format_of(weights)
    if found is None or found.activation_group is None:
        return x
    return rounded_activations(x.float()[None], found)[0].to(x.dtype)


def moe_lora_reference(
    x_TH: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    adapters: Sequence[SiteFactors | None] = (),
    token_slots: Sequence[int] | None = None,
    *,
    expert_offset: int = 0,
    scale: float = 1.0,
    compute_dtype: torch.dtype = torch.float32,
    round_h: bool = True,
) -> torch.Tensor:
    """Run the layer one pair at a time.

    Args:
        x_TH: ``[T, H]`` activations.
        topk_ids: ``[T, K]`` global expert ids; outside ``[expert_offset, expert_offset + E)`` = 0.
        topk_weights: ``[T, K]``.
        weights: base weights of the E local experts.
        adapters: what each slot holds; None = empty slot.
        token_slots: slot per token, -1 = base; None = all base.
        expert_offset: global id of local expert 0.
        scale: routed scaling factor.
        compute_dtype: fp32, or fp64 for an error yardstick.
        round_h: round h to x's dtype between the two projections, as every backend does.

    Returns:
        ``[T, H]`` in ``compute_dtype``.
    """
    num_tokens, top_k = topk_ids.shape
    out = torch.zeros(num_tokens, weights.hidden, dtype=compute_dtype, device=x_TH.device)
    names = ("gate", "up") if weights.layout.gated else ("up",)
    columns = {name: weights.layout.columns(name, weights.intermediate) for name in names}
    for t in range(num_tokens):
        slot = -1 if token_slots is None else int(token_slots[t])
        adapter = adapters[slot] if slot >= 0 else None
        x = x_TH[t].to(compute_dtype)
        for k in range(top_k):
            e = int(topk_ids[t, k]) - expert_offset
            if not 0 <= e < weights.num_experts:
                continue
            factors = {} if adapter is None else adapter.projections
            entry = -1 if adapter is None else adapter.entry(e)
            gate_up = expert_matrix(weights, "gate_up", e, compute_dtype) @ base_input(x, weights)
            if weights.gate_up_bias is not None:
                gate_up = gate_up + weights.gate_up_bias[e].to(compute_dtype)
            for name, where in columns.items():
                gate_up[where] += lora_delta(factors.get(name), entry, x)
            h = apply_activation(
                gate_up[None], weights.activation, weights.layout, weights.intermediate
            )[0]
            if round_h:
                h = h.to(x_TH.dtype).to(compute_dtype)
            y = expert_matrix(weights, "down", e, compute_dtype) @ base_input(h, weights)
            if weights.down_bias is not None:
                y = y + weights.down_bias[e].to(compute_dtype)
            y = y + lora_delta(factors.get("down"), entry, h)
            if weights.post_norm is not None:
                y = weights.post_norm(y[None])[0]
            out[t] += topk_weights[t, k].to(compute_dtype) * y
    return scale * out


def linear_lora_reference(
    x: torch.Tensor,
    adapters: Sequence[SiteFactors | None],
    token_slots: Sequence[int],
    out_features: int,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the delta of a dense linear, ``[T, out]``, one token at a time; 0 for slot -1."""
    out = torch.zeros(x.shape[0], out_features, dtype=compute_dtype, device=x.device)
    for t, slot in enumerate(token_slots):
        adapter = adapters[slot] if slot >= 0 else None
        if adapter is not None:
            factor = adapter.projections.get(LINEAR_PROJECTION)
            out[t] += lora_delta(factor, 0, x[t].to(compute_dtype))
    return out
