"""Routing: every rule against the loops of the reference, and against transformers' own routers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from families import families, hidden_of
from moegraft import ops
from moegraft.errors import MoegraftError, PlanError
from moegraft.plan import make_plan
from moegraft.problem import Problem
from moegraft.routing import RoutingRule, choose_reference
from moegraft.testing import assert_bit_equal, poisoned_empty, random_weights
from ops_cases import BACKENDS

on_both = pytest.mark.parametrize("backend", BACKENDS)
RULES = {
    "qwen": RoutingRule(8),
    "not normalised": RoutingRule(3, renormalise=False, scale=1.5),
    "one expert": RoutingRule(1, "sigmoid", False),
    "all experts": RoutingRule(24, "sigmoid"),
    "deepseek v3": RoutingRule(4, "sigmoid", True, 4, 2, "top2", 2.5),
    "deepseek v2": RoutingRule(3, "softmax", False, 4, 3, "max", 16.0),
    "groups of one": RoutingRule(5, "sigmoid", True, 24, 7, "top2"),
    "one group of many": RoutingRule(6, "softmax", True, 3, 1, "max"),
    "all groups": RoutingRule(6, "softmax", True, 4, 4),
}


def logits_of(num_tokens: int, num_experts: int = 24, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_tokens, num_experts, generator=generator)


def check(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    with poisoned_empty():
        ids, weights = ops.choose_experts(logits, rule, bias, backend)
    expected_ids, expected = choose_reference(logits.float(), rule, bias)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    return ids, weights


@on_both
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_matches_the_reference(name: str, with_bias: bool, backend: str) -> None:
    bias = logits_of(1, seed=5)[0] / 4 if with_bias else None
    ids, weights = check(logits_of(9), RULES[name], bias, backend)
    if RULES[name].renormalise:
        torch.testing.assert_close(weights.sum(1), torch.full((9,), RULES[name].scale))
    if with_bias and RULES[name].top_k < 24:
        plain, _ = ops.choose_experts(logits_of(9), RULES[name], None, backend)
        assert not torch.equal(ids, plain)


@on_both
@pytest.mark.parametrize("num_experts", [1, 5, 17, 128, 160, 512])
def test_any_number_of_experts_and_dtype(num_experts: int, backend: str) -> None:
    rule = RoutingRule(min(num_experts, 8))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = logits_of(3, num_experts).to(dtype)
        # Rounded logits tie: the lower number comes first in all.
        check(logits, rule, None, backend)


@on_both
def test_packed_pairs_are_those_of_pack_topk(backend: str) -> None:
    rule, bias = RULES["deepseek v3"], logits_of(1, seed=5)[0] / 4
    ids, weights = ops.choose_experts(logits_of(9), rule, bias, backend)
    packed = ops.choose_experts_packed(logits_of(9), rule, bias, backend)
    assert torch.equal(packed, ops.pack_topk(ids, weights))
    back_ids, back = ops.unpack_topk(packed)
    assert torch.equal(back_ids, ids) and torch.equal(back, weights.bfloat16().float())


@on_both
def test_equal_choices_go_to_the_lower_number(backend: str) -> None:
    rule = RoutingRule(5, "sigmoid", True, 4, 2)
    ids, _ = check(torch.zeros(2, 24), rule, None, backend)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    logits = torch.zeros(1, 24)
    logits[0, [7, 20]] = 1.0
    ids, _ = check(logits, rule, None, backend)
    assert ids.tolist() == [[7, 20, 6, 8, 9]]


@on_both
def test_ids_stay_in_range_whatever_the_logits(backend: str) -> None:
    rows = [
        torch.full((24,), float("-inf")),
        torch.full((24,), float("nan")),
        torch.full((24,), 3e38),
        torch.full((24,), -3e38),
        torch.zeros(24).index_fill(0, torch.tensor([3, 9]), float("nan")),
        torch.zeros(24).index_fill(0, torch.tensor([3]), float("inf")),
        torch.full((24,), float("-inf")).index_fill(0, torch.tensor([20]), 0.0),
    ]
    for rule, bias in itertools.product(RULES.values(), (None, logits_of(1, seed=5)[0])):
        ids, _ = ops.choose_experts(torch.stack(rows), rule, bias, backend)
        assert bool(((ids >= 0) & (ids < 24)).all())
        assert all(len(set(row)) == rule.top_k for row in ids.tolist())
        packed = ops.choose_experts_packed(torch.stack(rows), rule, bias, backend)
        assert torch.equal(packed >> 16, ids)


@on_both
def test_a_broken_row_changes_no_other(backend: str) -> None:
    logits = logits_of(5)
    ids, weights = ops.choose_experts(logits, RULES["deepseek v3"], None, backend)
    logits[2] = float("nan")
    again = ops.choose_experts(logits, RULES["deepseek v3"], None, backend)
    others = [0, 1, 3, 4]
    assert torch.equal(again[0][others], ids[others])
    assert_bit_equal(again[1][others], weights[others])


@on_both
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one(num_tokens: int, backend: str) -> None:
    ids, weights = check(logits_of(num_tokens), RULES["qwen"], None, backend)
    assert ids.shape == weights.shape == (num_tokens, 8)


@on_both
def test_logits_may_be_a_view_with_any_strides(backend: str) -> None:
    wide = logits_of(6, 48)
    check(wide[::2, :24], RULES["qwen"], None, backend)
    check(wide.T[:24].T, RULES["qwen"], None, backend)
    check(wide[:, ::2], RULES["qwen"], wide[0, 1::2], backend)


@on_both
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_and_compile_find_nothing(packed: bool, backend: str) -> None:
    logits, bias = logits_of(4), logits_of(1)[0]
    ids, weights = torch.zeros(4, 3, dtype=torch.int32), None if packed else torch.zeros(4, 3)
    args = (logits, bias, 3, "sigmoid", True, 4, 2, "top2", 2.5, backend, ids, weights)
    torch.library.opcheck(torch.ops.moegraft.choose_experts, args)
    rule = RoutingRule(3, "sigmoid", True, 4, 2, "top2", 2.5)
    run = ops.choose_experts_packed if packed else ops.choose_experts

    def step(x: torch.Tensor) -> Any:
        return run(x * 2, rule, bias, backend)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, expected in zip(_flat(compiled(logits)), _flat(step(logits)), strict=True):
        assert torch.equal(found, expected)
    torch.compiler.reset()


def _flat(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Qwen3MoeExperts", RoutingRule(2, renormalise=False)),
        ("MixtralExperts", RoutingRule(2)),
        ("GptOssExperts", RoutingRule(2)),
        ("DeepseekV3Experts", RoutingRule(2, "sigmoid", True, 2, 1, "top2", 2.5)),
        ("Glm4MoeExperts", RoutingRule(2, "sigmoid", True, 2, 1, "top2", 1.0)),
    ],
)
@on_both
def test_a_rule_is_that_of_transformers_own_router(
    name: str, rule: RoutingRule, backend: str
) -> None:
    family = families()[name]
    config = family.config()
    if rule.num_groups > 1:
        config.topk_group = rule.top_groups
    torch.manual_seed(0)
    model = family.model(config).eval()
    experts = next(m for m in model.modules() if isinstance(m, family.experts))
    block = next(m for m in model.modules() if getattr(m, "experts", None) is experts)
    router = getattr(block, "gate", None) or block.router
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    for buffer in router.buffers():
        torch.nn.init.normal_(buffer, std=0.3)
    seen: dict[str, Any] = {}
    router.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    experts.register_forward_pre_hook(lambda m, args: seen.update(ids=args[1], weights=args[2]))
    hidden_of(model, torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1)))
    x = seen["x"].reshape(-1, seen["x"].shape[-1])
    logits = F.linear(x, router.weight, getattr(router, "bias", None))
    bias = getattr(router, "e_score_correction_bias", None)
    ids, weights = ops.choose_experts(logits.detach(), rule, bias, backend)
    order = seen["ids"].argsort(1)
    ours = ids.argsort(1)
    assert torch.equal(ids.gather(1, ours).long(), seen["ids"].gather(1, order).long())
    found = weights.gather(1, ours)
    torch.testing.assert_close(
        found, seen["weights"].float().gather(1, order), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RoutingRule(0), "at least one expert"),
        (lambda: RoutingRule(2, num_groups=2, top_groups=3), "top_groups 3 of 2"),
        (lambda: RoutingRule(2, "softplus"), "scoring 'softplus'"),  # type: ignore[arg-type]
        (lambda: RoutingRule(2, group_score="mean"), "group_score 'mean'"),  # type: ignore[arg-type]
        (lambda: RoutingRule(2, scale=float("nan")), "must be finite"),
        (lambda: ops.choose_experts(logits_of(2), RoutingRule(2, num_groups=5)), "5 groups"),
        (
            lambda: ops.choose_experts(logits_of(2), RoutingRule(7, num_groups=4)),
            "only 6 of 24 experts",
        ),
        (lambda: ops.choose_experts(logits_of(2)[0], RoutingRule(2)), r"\[T, E\]"),
        (lambda: ops.choose_experts(logits_of(2).int(), RoutingRule(2)), "expected float"),
        (lambda: ops.choose_experts(logits_of(2), RoutingRule(2), torch.ones(5)), r"float \[24\]"),
        (
            lambda: ops.choose_experts_packed(torch.zeros(1, 2**15 + 1), RoutingRule(2)),
            "can't be packed",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, says: str) -> None:
    with pytest.raises(MoegraftError, match=says):
        make()


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="no backend 'tpu'"):
        ops.choose_experts(logits_of(2), RoutingRule(2), None, "tpu")


@on_both
def test_routing_leaves_the_backends_own_choice_alone(backend: str) -> None:
    ops.choose_experts(logits_of(2), RoutingRule(2), None, backend)
    plan = make_plan(Problem.of(random_weights(4, 24, 20), 3, 2), backend)
    assert plan.backend == backend
