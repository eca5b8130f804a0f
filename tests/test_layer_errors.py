"""What the layer refuses, with the numbers that disagree, and before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moegraft.errors import AdapterError, MoegraftError, PlanError, UnsupportedError
from moegraft.factor_table import site_table
from moegraft.factors import TableLayout
from moegraft.layer import MoeLoraLayer
from moegraft.linear import LinearLora
from moegraft.packing import pack_adapter
from moegraft.sites import expert_site, linear_site
from moegraft.testing import LAYOUTS, layer_case, random_factors, random_weights
from moegraft.testing.cases import table_on
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
        (X.double(), IDS, WEIGHTS, [0] * 3, "x is torch.float64; expected float32, bfloat16"),
        (X.long(), IDS, WEIGHTS, [0] * 3, "x is torch.int64"),
        (X, IDS, WEIGHTS.bool(), [0] * 3, "topk_weights are torch.bool; expected a float"),
        (X, IDS[:, :0], WEIGHTS[:, :0], [0] * 3, r"\(3, 0\): no expert per token"),
        (X.to("meta"), IDS, WEIGHTS, [0] * 3, "x is on meta, the experts' weights on cpu"),
        (X, IDS.to("meta"), WEIGHTS, [0] * 3, "topk_ids is on meta"),
        (X, IDS, WEIGHTS.to("meta"), [0] * 3, "topk_weights is on meta"),
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


@pytest.mark.parametrize("slots", [[0.5], [True], [[0]], ["a"], None, 3, torch.zeros(1), [2**70]])
def test_slots_that_are_no_whole_numbers_are_refused(slots: Any) -> None:
    with pytest.raises(MoegraftError, match="The adapter slots"):
        TokenSlots.of(slots)


def test_slots_of_no_token_are_none() -> None:
    assert TokenSlots.of([]).live == TokenSlots.of(torch.zeros(0)).live == ()


def test_captured_slots_are_refused_where_live_ones_decide() -> None:
    layer = MoeLoraLayer(CASE.weights, CASE.table(), backend="cpu")
    slots = TokenSlots.captured(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(MoegraftError, match=r"captured are for CUDA graphs.*Use TokenSlots\.of"):
        layer(X, IDS, WEIGHTS, slots)


@pytest.mark.parametrize("slots", [torch.zeros(3, 1), torch.zeros(3).to("meta")])
def test_slots_made_by_hand_are_checked(slots: torch.Tensor) -> None:
    layer = MoeLoraLayer(CASE.weights, CASE.table())
    with pytest.raises(MoegraftError, match=r"slots are torch\.int32 \(3, 1\)|slots are on meta"):
        layer(X, IDS, WEIGHTS, TokenSlots(slots.int(), (0,)))


def test_a_table_on_another_device_is_refused() -> None:
    with pytest.raises(MoegraftError, match="The factor table is on meta, the weights on cpu"):
        MoeLoraLayer(CASE.weights, table_on(CASE.table(), "meta"))


def test_an_unknown_mode_order_or_offset_is_refused() -> None:
    wrong: Any = "in_kernal"
    with pytest.raises(PlanError, match="no mode 'in_kernal'; choose one of in_kernel, fused_"):
        MoeLoraLayer(CASE.weights, mode=wrong)
    with pytest.raises(MoegraftError, match="no gate_up_order 'in_kernal'; choose one of gate_fir"):
        WeightLayout(wrong)
    with pytest.raises(MoegraftError, match="expert_offset=-1 is below 0"):
        MoeLoraLayer(CASE.weights, expert_offset=-1)


@pytest.mark.parametrize("bias", [torch.zeros(5, 24, device="meta"), torch.zeros(5, 24).long()])
def test_biases_of_another_kind_are_refused(bias: torch.Tensor) -> None:
    with pytest.raises(MoegraftError, match="A bias is torch"):
        ExpertWeights(CASE.weights.gate_up, CASE.weights.down, down_bias=bias)
