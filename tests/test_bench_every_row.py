"""The check of all rows that ``bench prefill`` makes before it times anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraft.bench.cases import random_layer, random_table
from moegraft.bench.every_row import EveryRow, layer_by_expert, rows_error
from moegraft.bench.harness import Timer
from moegraft.bench.layer_runs import CheckedBase, CheckedRun, LayerRun, WrongResultError
from moegraft.bench.options import KINDS
from moegraft.bench.prefill_case import make_prefill_case
from moegraft.bench.prefill_options import BASE_ONLY, INTERLEAVED, PrefillRequest
from moegraft.bench.shapes import ModelShape
from moegraft.reference import moe_lora_reference
from moegraft.testing.compare import relative_error

CPU = torch.device("cpu")
TINY = ModelShape("tiny", "tiny", 8, 32, 24, 2)


def case_of(tokens: int, kind: str = "separate", style: str = "swiglu", batch: str = INTERLEAVED):
    shape = replace(TINY, kind=style)
    request = PrefillRequest(shape, tokens, 4, 3, 6, kind=kind, batch=batch)
    table = random_table(shape, 4, 6, kind, CPU)
    return make_prefill_case(request, random_layer(shape, CPU), table, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["swiglu", "gpt_oss", "relu2"])
def test_expert_by_expert_is_the_reference(kind: str, style: str) -> None:
    case = case_of(13, kind, style)
    case.slots[4] = -1
    s = case.sets[0]
    inputs = (s.x, s.topk_ids, s.topk_weights, case.weights)
    factors = [case.table.factors(slot) for slot in range(6)]
    base, lora = layer_by_expert(case)
    # h is rounded to bf16 after sums in another order: a value may fall to the other side.
    assert relative_error(base, moe_lora_reference(*inputs)) < 1e-3
    expected = moe_lora_reference(*inputs, factors, case.slots.tolist())
    assert relative_error(lora, expected) < 1e-3
    assert torch.equal(base[4], lora[4]) and not torch.equal(base[5], lora[5])


def test_a_batch_without_adapters_has_no_delta() -> None:
    base, lora = layer_by_expert(case_of(13, batch=BASE_ONLY))
    assert torch.equal(base, lora)


def test_one_wrong_row_that_the_reference_does_not_see_is_found() -> None:
    case = case_of(200)
    expected = EveryRow(case)
    unseen = next(t for t in range(200) if t not in expected.rows.tolist())
    run = LayerRun.of_layer(case, None)
    lora, base = run.call(0), run.call(0, lora=False)
    found = expected.check(lora, base)
    assert found["all_rows"] == 200 and 0 < found["all_delta_error"] < 2e-2
    for value, message in ((0.0, "all rows, output"), (float("nan"), "all rows, output")):
        wrong = lora.clone()
        wrong[unseen] = value
        super(EveryRow, expected).check(wrong, base)
        with pytest.raises(AssertionError, match=rf"{message}.* worst row {unseen}: "):
            expected.check(wrong, base)
    base_for_lora = lora.clone()
    base_for_lora[unseen] = base[unseen]
    with pytest.raises(AssertionError, match="all rows"):
        expected.check(base_for_lora, base)
    wrong_base = base.clone()
    wrong_base[unseen, 3] = float("inf")
    with pytest.raises(AssertionError, match=rf"1 of 200 rows .* worst row {unseen}"):
        expected.check_base(wrong_base)


def test_rows_are_measured_by_their_own_size_or_the_typical_one() -> None:
    expected = torch.ones(4, 9)
    expected[1] *= 1e-6
    actual = expected.clone()
    actual[1] *= 2
    assert rows_error(actual, expected, 1e-2, "small") < 1e-5, "twice a row near zero"
    actual[2] *= 1.04
    with pytest.raises(AssertionError, match=r"allowed 1\.0e-02"):
        rows_error(actual, expected, 1e-2, "whole")
    assert rows_error(actual, expected, 3e-2, "loose") == pytest.approx(0.04 / 3**0.5, rel=1e-3)
    assert rows_error(torch.zeros(2, 3), torch.zeros(2, 3), 1e-2, "zero") == 0
    with pytest.raises(AssertionError, match="not exactly zero"):
        rows_error(torch.full((2, 3), 1e-9), torch.zeros(2, 3), 1e-2, "zero")


def test_a_layer_with_one_wrong_row_is_never_timed() -> None:
    case, timer = case_of(200), Timer(CPU, 1)
    expected = EveryRow(case)
    layer = LayerRun.of_layer(case, None)
    unseen = next(t for t in range(200) if t not in expected.rows.tolist())

    def wrong(inputs, slots):
        out = layer._function(inputs, slots).clone()
        out[unseen] += 1.0
        return out

    with pytest.raises(WrongResultError, match=f"base: all rows, base.* worst row {unseen}"):
        CheckedBase(LayerRun(case, wrong, "wrong", "", lora=False), expected, timer)
    with pytest.raises(WrongResultError, match=f"all rows.* worst row {unseen}"):
        CheckedRun(LayerRun(case, wrong, "wrong", ""), expected, timer)
