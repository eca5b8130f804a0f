"""What the layer refuses, with the numbers that disagree, and before any work is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moegraft.errors import AdapterError, MoegraftError, UnsupportedError
from moegraft.factor_table import site_table
from moegraft.factors import TableLayout, pack_adapter
from moegraft.layer import MoeLoraLayer
from moegraft.linear import LinearLora
from moegraft.sites import expert_site, linear_site
from moegraft.testing import LAYOUTS, layer_case, random_factors, random_weights
from moegraft.types import (
    Activation,
    ExpertWeights,
    LoraFactor,
    SiteFactors,
    TokenSlots,
    WeightLayout,
)

SITE = expert_site("experts", 5, 24, 20)
CASE = layer_case(3, [random_factors(SITE, 4)], [0])
X, IDS, WEIGHTS = CASE.x, CASE.routing.topk_ids, CASE.routing.topk_weights


@pytest.mark.parametrize(
    ("x", "ids", "weights", "slots", "message"),
    [
        (X[:, :20], IDS, WEIGHTS, [0] * 3, r"\(3, 20\).*24"),
        (X[0], IDS, WEIGHTS, [0] * 3, r"\(24,\).*\[T, 24\]"),
        (X.sum(), IDS, WEIGHTS, [0] * 3, r"\(\).*\[T, 24\]"),
        (X, IDS[:2], WEIGHTS[:2], [0] * 3, r"\(2, 2\).*T = 3"),
        (X, IDS, WEIGHTS[:, :1], [0] * 3, r"\(3, 2\).*\(3, 1\)"),
        (X, IDS[:, 0], WEIGHTS[:, 0], [0] * 3, r"\(3,\).*\[T, K\]"),
        (X, IDS.float(), WEIGHTS, [0] * 3, "float32.*int32 or int64"),
        (X, IDS, WEIGHTS, [0] * 4, "3 tokens.*4 adapter slots"),
        (X, IDS, WEIGHTS, [0, -1, 7], "slot 7.*1 slots"),
    ],
)
def test_a_call_with_wrong_shapes_names_the_numbers(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slots: list[int], message: str
) -> None:
    layer = CASE.layer()
    with pytest.raises(MoegraftError, match=message):
        layer(x, ids, weights, TokenSlots.of(slots))


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (expert_site("e", 4, 24, 20), "4 experts.*5 experts"),
        (expert_site("e", 5, 16, 20), "gate 16->20.*H=24"),
        (expert_site("e", 5, 24, 8), "24->8.*I=20"),
        (expert_site("e", 5, 24, 20, LAYOUTS["no_gate"]), "up 24->20, down.*gate_first"),
    ],
)
def test_a_table_for_other_experts_is_refused_when_the_layer_is_built(
    site: object, message: str
) -> None:
    with pytest.raises(MoegraftError, match=message):
        MoeLoraLayer(CASE.weights, site_table(site, []))  # type: ignore[arg-type]


def test_an_unknown_activation_is_refused_when_the_layer_is_built() -> None:
    weights = random_weights(2, 8, 6, activation=Activation("swish"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"swish.*silu, gelu"):
        MoeLoraLayer(weights)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activation("custom"), "custom"),
        (lambda: Activation("silu", custom=torch.relu), "silu"),
        (lambda: ExpertWeights(torch.ones(2, 3), torch.ones(2, 3, 4)), r"\(2, 3\)"),
        (
            lambda: ExpertWeights(torch.ones(2, 6, 4), torch.ones(2, 5, 3)),
            r"\(2, 6, 4\).*\(2, 6, 5",
        ),
        (
            lambda: ExpertWeights(torch.ones(3, 6, 4), torch.ones(2, 4, 3)),
            r"\(3, 6, 4\).*\(2, 6, 4",
        ),
        (
            lambda: ExpertWeights(
                torch.ones(2, 6, 4), torch.ones(2, 4, 3), layout=WeightLayout("no_gate")
            ),
            r"\(2, 6, 4\).*\(2, 3, 4\)",
        ),
        (
            lambda: ExpertWeights(torch.ones(2, 6, 4), torch.ones(2, 4, 3), torch.ones(2, 3)),
            r"\(2, 3\).*\(2, 6\)",
        ),
        (
            lambda: ExpertWeights(
                torch.ones(2, 6, 4), torch.ones(2, 4, 3), down_bias=torch.ones(4)
            ),
            r"\(4,\).*\(2, 4\)",
        ),
        (
            lambda: ExpertWeights(torch.ones(2, 6, 4).half(), torch.ones(2, 4, 3)),
            r"float16.*float32",
        ),
        (lambda: LoraFactor(torch.ones(2, 4), torch.ones(1, 4, 2), 1.0), r"\(2, 4\)"),
        (lambda: LoraFactor(torch.ones(1, 2, 4), torch.ones(1, 4, 3), 1.0), "rank 2.*rank 3"),
        (lambda: LoraFactor(torch.ones(2, 2, 4), torch.ones(3, 4, 2), 1.0), r"\[2, 3\]"),
    ],
)
def test_data_that_disagrees_is_refused_when_it_is_made(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(MoegraftError, match=message):
        make()


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (random_factors(expert_site("e", 5, 16, 20), 4), "gate: .*16 inputs.*24"),
        (random_factors(expert_site("e", 5, 24, 21), 4), "gate: .*21 outputs.*20"),
        (random_factors(expert_site("e", 4, 24, 20), 4), "4 experts, the site has 5"),
        (SiteFactors({"router": CASE.adapters[0].projections["gate"]}), "'router'"),  # type: ignore[union-attr]
        (
            SiteFactors(random_factors(SITE, 4).projections, torch.zeros(4, dtype=torch.int32)),
            r"\(4,\).*\(5,\)",
        ),
        (
            SiteFactors(random_factors(SITE, 4).projections, torch.tensor([0, 1, 5, -1, -1])),
            "-1 to 5.*5 entries",
        ),
        (
            SiteFactors(random_factors(SITE, 4).projections, torch.tensor([0, 1, -2, -1, -1])),
            "-2 to 1",
        ),
    ],
)
def test_factors_that_do_not_fit_their_site_are_refused(factors: SiteFactors, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        site_table(SITE, [factors])


def test_factors_for_a_projection_or_site_that_the_model_lacks_are_refused() -> None:
    ungated = expert_site("experts", 5, 24, 20, LAYOUTS["no_gate"])
    with pytest.raises(AdapterError, match=r"'gate'.*\['up', 'down'\]"):
        site_table(ungated, [random_factors(SITE, 4)])
    with pytest.raises(AdapterError, match=r"'elsewhere'.*no site"):
        pack_adapter({"elsewhere": random_factors(SITE, 4)}, TableLayout.of([SITE]), torch.float32)


@pytest.mark.parametrize(
    ("x", "out", "slots", "message"),
    [
        ((3, 6), (3, 5), 4, "3 input rows, 3 output rows and 4"),
        ((2, 6), (3, 5), 3, "2 input rows, 3 output rows"),
        ((3, 7), (3, 5), 3, r"\(3, 7\).*\[T, 6\]"),
        ((3, 6), (3, 4), 3, r"\(3, 4\).*\[T, 5\]"),
        ((3, 1, 6), (3, 1, 5), 3, r"\(3, 1, 6\)"),
    ],
)
def test_a_linear_with_wrong_shapes_names_the_numbers(
    x: tuple[int, ...], out: tuple[int, ...], slots: int, message: str
) -> None:
    site = linear_site("q_proj", 6, 5)
    linear = LinearLora(
        site_table(site, [random_factors(site, 2)]), torch.float32, torch.device("cpu")
    )
    with pytest.raises(MoegraftError, match=f"q_proj: .*{message}|{message}"):
        linear.add_to(torch.zeros(out), torch.zeros(x), TokenSlots.of([0] * slots))


def test_a_linear_refuses_a_slot_outside_its_table() -> None:
    site = linear_site("q_proj", 6, 5)
    linear = LinearLora(
        site_table(site, [random_factors(site, 2)]), torch.float32, torch.device("cpu")
    )
    with pytest.raises(MoegraftError, match=r"slot 1.*1 slots"):
        linear.add_to(torch.zeros(1, 5), torch.zeros(1, 6), TokenSlots.of([1]))
