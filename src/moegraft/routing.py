"""How a router's logits become experts and weights: the rule as data, and its meaning in loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from moegraft.errors import MoegraftError
from moegraft.type_checks import check_choice

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2", "max"]
#: Added to the sum of the chosen scores, so that nothing is divided by 0.
EPSILON = 1e-20


@dataclass(frozen=True)
class RoutingRule:
    """Which experts a token gets, and with what weights.

    ``score = scoring(logits)``; ``choice = score + bias``. With groups, the experts lie in
    ``num_groups`` of equal size, each group's score is the sum of its two best choices (``top2``)
    or its best (``max``), and only experts of the ``top_groups`` best take part. The ``top_k`` best
    choices are taken, best first, the lower number where two are equal. Their weights are their
    *scores*, without the bias, over their sum where ``renormalise``, times ``scale``.

    Attributes:
        top_k: K.
        scoring: over all experts.
        renormalise: whether the weights of a token sum to ``scale``.
        num_groups, top_groups: 1 and 1 = no groups.
        group_score: of a group.
        scale: routed scaling factor.

    Example: Qwen3-MoE is ``RoutingRule(8)``, Mixtral and gpt-oss likewise (softmax over the chosen
    is the same); DeepSeek-V3 ``RoutingRule(8, "sigmoid", True, 8, 4, "top2", 2.5)``.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalise: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2"
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_choice("scoring", self.scoring, get_args(Scoring))
        check_choice("group_score", self.group_score, get_args(GroupScore))
        if self.top_k < 1 or not 1 <= self.top_groups <= self.num_groups:
            raise MoegraftError(
                f"top_k is {self.top_k}, top_groups {self.top_groups} of {self.num_groups}: at "
                "least one expert, and between one group and all of them."
            )
        if not math.isfinite(self.scale):
            raise MoegraftError(f"The routed scaling factor is {self.scale}; it must be finite.")

    def check_experts(self, num_experts: int) -> None:
        """Raise :class:`MoegraftError` unless so many experts can be routed by this rule."""
        if num_experts % self.num_groups:
            raise MoegraftError(
                f"{num_experts} experts can't be in {self.num_groups} groups of equal size."
            )
        available = num_experts // self.num_groups * self.top_groups
        if self.top_k > available:
            raise MoegraftError(
                f"top_k is {self.top_k}, but only {available} of {num_experts} experts take part."
            )


def choose_reference(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route one token at a time: ids int32 ``[T, K]`` and weights ``[T, K]`` in logits' dtype.

    Args:
        logits: float ``[T, E]``.
        rule: see :class:`RoutingRule`.
        bias: ``[E]``, for the choice alone; None = none. A choice that is NaN counts as the lowest.
    """
    num_tokens, num_experts = logits.shape
    rule.check_experts(num_experts)
    ids = torch.empty(num_tokens, rule.top_k, dtype=torch.int32)
    weights = torch.empty(num_tokens, rule.top_k, dtype=logits.dtype)
    size = num_experts // rule.num_groups
    for t in range(num_tokens):
        row = logits[t]
        scores = row.softmax(0) if rule.scoring == "softmax" else row.sigmoid()
        choice = scores if bias is None else scores + bias.to(scores.dtype)
        choices = [-math.inf if math.isnan(c) else c for c in choice.tolist()]
        groups = list(range(rule.num_groups))
        if rule.num_groups > rule.top_groups:
            count = 1 if rule.group_score == "max" else 2
            best = [sorted(choices[g * size : (g + 1) * size])[-count:] for g in groups]
            ranked = sorted(groups, key=lambda g: (-sum(best[g]), g))
            groups = ranked[: rule.top_groups]
        experts = [e for g in groups for e in range(g * size, (g + 1) * size)]
        chosen = sorted(experts, key=lambda e: (-choices[e], e))[: rule.top_k]
        ids[t] = torch.tensor(chosen, dtype=torch.int32)
        found = scores[chosen]
        weights[t] = found / (found.sum() + EPSILON) if rule.renormalise else found
    return ids, weights * rule.scale
