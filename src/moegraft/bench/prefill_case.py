"""Inputs of a prefill measurement, drawn on the device: at large T a host takes seconds."""

from __future__ import annotations

import torch

from moegraft.bench.cases import DecodeCase, Inputs, rotated_ids, spread_slots
from moegraft.bench.harness import L2_TIMES
from moegraft.bench.prefill_options import BASE_ONLY, SEQUENCES, PrefillRequest
from moegraft.bench.traffic import expert_bytes
from moegraft.factor_table import SiteTable
from moegraft.types import ExpertWeights


def batch_slots(request: PrefillRequest) -> torch.Tensor:
    """Return the adapter slot of each token, int32 ``[T]``; -1 = base row."""
    tokens = torch.arange(request.tokens)
    if request.batch == BASE_ONLY:
        return torch.full_like(tokens, -1, dtype=torch.int32)
    used = torch.tensor(spread_slots(request.slots, request.live), dtype=torch.int32)
    if request.batch == SEQUENCES:
        return used[tokens * request.live // request.tokens]
    return used[tokens % request.live]


def make_prefill_case(
    request: PrefillRequest,
    weights: ExpertWeights,
    table: SiteTable,
    l2_size: int,
    seed: int = 0,
) -> DecodeCase:
    """Draw inputs: one set where the layer itself moves :data:`L2_TIMES` times the L2, else more.

    The batch and the rank do not change the draw, so that rows of one T can be compared.
    """
    device, tokens, top_k = weights.device, request.tokens, request.shape.top_k
    on_host = torch.Generator().manual_seed(1000 * seed + tokens)
    generator = torch.Generator(device).manual_seed(1000 * seed + tokens)
    distance = L2_TIMES * l2_size
    id_sets = rotated_ids(
        tokens, top_k, weights.num_experts, expert_bytes(weights), distance, on_host, at_least=1
    )
    sets = []
    for ids in id_sets:
        x = torch.empty(tokens, weights.hidden, device=device, dtype=weights.dtype)
        x.normal_(generator=generator)
        scores = torch.randn(tokens, top_k, device=device, generator=generator)
        sets.append(Inputs(x, ids.to(device), torch.softmax(scores, 1)))
    slots = batch_slots(request)
    live = tuple(sorted(set(slots[slots >= 0].tolist())))
    return DecodeCase(request, weights, table, tuple(sets), slots.to(device), live)
