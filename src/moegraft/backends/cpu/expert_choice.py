"""Experts and weights from a router's logits, vectorised in torch."""

from __future__ import annotations

import torch

from moegraft.routing import EPSILON, RoutingRule


def choose(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32 and weights fp32 ``[T, K]``; see :class:`moegraft.routing.RoutingRule`."""
    values = logits.float()
    scores = values.softmax(1) if rule.scoring == "softmax" else values.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    choice = choice.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    # A stable sort, unlike top-k, takes the lower number where two are equal.
    if rule.num_groups > rule.top_groups:
        grouped = choice.unflatten(1, (rule.num_groups, -1))
        count = 1 if rule.group_score == "max" else min(2, grouped.shape[2])
        best = grouped.topk(count, dim=2).values.sum(2)
        groups = best.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_groups]
        dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
        # Below -inf, which an expert that takes part may have.
        order = torch.where(dropped[:, :, None], 1, 0).expand_as(grouped).flatten(1)
    else:
        order = torch.zeros_like(choice, dtype=torch.int64)
    by_choice = choice.sort(dim=1, descending=True, stable=True).indices
    by_group = order.gather(1, by_choice).sort(dim=1, stable=True).indices
    ids = by_choice.gather(1, by_group)[:, : rule.top_k]
    weights = scores.gather(1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + EPSILON)
    return ids.to(torch.int32), weights * rule.scale
