"""From a router's logits to experts and weights, plain or packed, in one launch."""

from __future__ import annotations

from typing import cast

import torch

from moegraft.errors import MoegraftError
from moegraft.ops.pack import MAX_PACKED_EXPERT, pack_topk
from moegraft.ops.sums import uses_triton
from moegraft.routing import GroupScore, RoutingRule, Scoring


@torch.library.custom_op(
    "moegraft::choose_experts",
    mutates_args=("ids", "weights"),
    schema="(Tensor logits, Tensor? bias, int top_k, str scoring, bool renormalise, "
    "int num_groups, int top_groups, str group_score, float scale, str backend, Tensor(a!) ids, "
    "Tensor(b!)? weights) -> ()",
)
def choose_experts_op(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    renormalise: bool,
    num_groups: int,
    top_groups: int,
    group_score: str,
    scale: float,
    backend: str,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
) -> None:
    """Write ids and weights, or packed pairs to ``ids`` without ``weights``."""
    rule = RoutingRule(
        top_k, cast(Scoring, scoring), renormalise, num_groups, top_groups,
        cast(GroupScore, group_score), scale,
    )  # fmt: skip
    if uses_triton(ids, backend):
        from moegraft.backends.triton.expert_choice import run_choose

        run_choose(logits, rule, bias, ids, weights)
        return
    from moegraft.backends.cpu.expert_choice import choose

    found_ids, found_weights = choose(logits, rule, bias)
    if weights is None:
        ids.copy_(pack_topk(found_ids, found_weights))
    else:
        ids.copy_(found_ids)
        weights.copy_(found_weights)


choose_experts_op.register_fake(lambda *args, **kwargs: None)


def choose_experts(
    logits: torch.Tensor,
    rule: RoutingRule,
    bias: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts.

    Args:
        logits: float ``[T, E]``.
        rule: how; see :class:`moegraft.routing.RoutingRule`.
        bias: float ``[E]``, added to the scores for the choice alone (DeepSeek's correction bias).
        backend: force a backend by name.

    Returns:
        ids int32 ``[T, K]``, best first, and weights fp32 ``[T, K]``, ``rule.scale`` included: give
        the layer no scaling factor besides.

    Raises:
        MoegraftError: shapes, dtypes or devices disagree.
    """
    logits, bias = _checked(logits, rule, bias)
    shape = (logits.shape[0], rule.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _run(logits, rule, bias, backend, ids, weights)
    return ids, weights


def choose_experts_packed(
    logits: torch.Tensor,
    rule: RoutingRule,
    bias: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Choose each token's experts; as :func:`choose_experts`, but packed.

    Returns:
        int32 ``[T, K]`` as of :func:`moegraft.ops.pack_topk`: weights are rounded to bf16.
    """
    logits, bias = _checked(logits, rule, bias)
    if logits.shape[1] - 1 > MAX_PACKED_EXPERT:
        raise MoegraftError(
            f"{logits.shape[1]} experts can't be packed: ids up to {MAX_PACKED_EXPERT} can."
        )
    shape = (logits.shape[0], rule.top_k)
    packed = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _run(logits, rule, bias, backend, packed, None)
    return packed


def _run(
    logits: torch.Tensor,
    rule: RoutingRule,
    bias: torch.Tensor | None,
    backend: str | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
) -> None:
    choose_experts_op(
        logits, bias, rule.top_k, rule.scoring, rule.renormalise, rule.num_groups,
        rule.top_groups, rule.group_score, rule.scale, backend or "", ids, weights,
    )  # fmt: skip


def _checked(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise MoegraftError(
            f"logits are {logits.dtype} {tuple(logits.shape)}; expected float [T, E]."
        )
    num_experts = logits.shape[1]
    rule.check_experts(num_experts)
    if bias is not None and (
        tuple(bias.shape) != (num_experts,)
        or not bias.is_floating_point()
        or bias.device != logits.device
    ):
        raise MoegraftError(
            f"bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}; expected float "
            f"[{num_experts}] on {logits.device}."
        )
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, None if bias is None else bias.contiguous()
