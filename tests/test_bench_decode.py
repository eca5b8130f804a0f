"""``bench decode`` on a CPU with tiny layers: what it counts, checks and writes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from moegraft.bench import layer_runs, options
from moegraft.bench.cases import (
    draw_factors,
    make_case,
    random_layer,
    random_table,
    rotated_ids,
    spread_slots,
)
from moegraft.bench.decode import DecodeSettings, run_decode, wrong
from moegraft.bench.harness import MachineLimits, Timer, Timing
from moegraft.bench.layer_runs import CheckedRun, Expected, LayerRun, WrongResultError
from moegraft.bench.made import refuse_too_large
from moegraft.bench.options import DecodeRequest, decode_requests, suite_requests
from moegraft.bench.report import decode_line, decode_table
from moegraft.bench.shapes import MODELS, ModelShape, model_shape
from moegraft.bench.traffic import expert_bytes, layer_traffic, reuse_bytes
from moegraft.call import Mode
from moegraft.errors import MoegraftError
from moegraft.layer import MoeLoraLayer
from moegraft.testing.generate import FACTOR_KINDS

CPU = torch.device("cpu")
TINY = ModelShape("tiny", "tiny", 8, 32, 24, 2)
QUICK = DecodeSettings(repeats=3, cold=True, commit="abc")


def tiny_case(tokens: int = 4, kind: str = "separate", shape: ModelShape = TINY, l2: int = 0):
    request = DecodeRequest(shape, tokens, rank=4, live=2, slots=6, kind=kind)
    table = random_table(shape, 4, 6, kind, CPU)
    return make_case(request, random_layer(shape, CPU), table, l2)


def test_the_names_are_those_of_layers_and_factors() -> None:
    assert set(options.MODES) - {options.AUTO} == set(get_args(Mode)) - {"base"}
    assert set(options.KINDS) == set(FACTOR_KINDS)


@pytest.mark.parametrize("kind", options.KINDS)
@pytest.mark.parametrize("style", ["swiglu", "gpt_oss", "relu2"])
def test_a_whole_measurement(kind: str, style: str) -> None:
    shape = replace(TINY, kind=style)
    requests = [
        DecodeRequest(shape, t, rank=4, live=2, slots=6, kind=kind, modes=("auto", "serial"))
        for t in (1, 5)
    ]
    found = list(run_decode(requests, CPU, QUICK))
    assert [r["tokens"] for r in found] == [1, 5] and not wrong(found)
    for record in found:
        serial = record["modes"]["serial"]
        assert serial["us_low"] <= serial["us"] <= serial["us_high"] and serial["cold_us"] > 0
        assert serial["checked"]["delta_error"] < 2e-2
        assert "base rows equal base" in serial["checked"]["bits"]
        assert math.isclose(serial["retention"], record["base"]["us"] / serial["us"])
        assert 0 < record["limit_us"]["base"] < record["limit_us"]["lora"]
    assert found[0]["live"] == 1 and found[1]["live"] == 2
    assert decode_line(found[0]).startswith("  tiny T=1 rank 4, base")
    table = decode_table(found)
    assert "serial*" in table or "serial" in table
    assert "2/6" in table


def test_a_mode_that_no_backend_has_is_a_note_not_a_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = DecodeRequest(TINY, 2, rank=4, live=1, slots=2, modes=("in_kernel",))
    (record,) = run_decode([request], CPU, QUICK)
    assert "us" not in record["modes"]["in_kernel"] and "in_kernel" in decode_table([record])
    assert record["modes"]["in_kernel"]["note"]


def test_a_wrong_layer_is_never_timed() -> None:
    case = tiny_case()
    expected = Expected(case)
    draw_factors(case.table, case.live[0], torch.Generator().manual_seed(5))
    with pytest.raises(WrongResultError, match="output"):
        CheckedRun(LayerRun.of_layer(case, None), expected, Timer(CPU, 1))


def test_a_wrong_base_has_no_figures_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_once = Expected.check_base

    def check(self: Expected, base: torch.Tensor) -> dict[str, object]:
        return wrong_once(self, 1.1 * base)

    monkeypatch.setattr(Expected, "check_base", check)
    (record,) = run_decode([DecodeRequest(TINY, 2, rank=4, live=1, slots=2)], CPU, QUICK)
    assert set(record["base"]) == {"error"} and record["modes"] == {}
    assert wrong([record]) == [record["base"]["error"]] and "output" in decode_table([record])


@pytest.mark.parametrize("lora", [True, False])
def test_kernels_without_room_are_errors_and_the_other_cases_go_on(
    lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose kernels with adapters, or base kernels, find no room on the device."""
    errors = pytest.importorskip("triton.runtime.errors")

    class OneRefuses(MoeLoraLayer):
        def __call__(self, x_TH, topk_ids, topk_weights, slots=None):  # type: ignore[no-untyped-def]
            if (slots is not None) == lora:
                raise errors.OutOfResources(300_000, 232_448, "shared memory")
            return super().__call__(x_TH, topk_ids, topk_weights, slots)

    monkeypatch.setattr(layer_runs, "MoeLoraLayer", OneRefuses)
    requests = [DecodeRequest(TINY, t, rank=4, live=2, slots=6) for t in (1, 5)]
    found = list(run_decode(requests, CPU, QUICK))
    assert len(found) == len(wrong(found)) == 2
    for record, text in zip(found, wrong(found), strict=True):
        assert "shared memory" in text and f"T={record['tokens']}" in text
        assert ("us" in record["base"]) == lora


def test_touched_bytes_are_counted_from_the_inputs() -> None:
    case = tiny_case(1)
    w = case.weights
    assert expert_bytes(w) == TINY.expert_bytes == 3 * 32 * 24 * 2
    ids = torch.tensor([[0, 3], [3, 5], [3, -1]])
    traffic = layer_traffic(w, case.table, ids, torch.tensor([0, 3, -1]))
    assert traffic.base_bytes == 3 * TINY.expert_bytes
    assert traffic.factor_bytes == 4 * 4 * 3 * (32 + 24) * 2  # 4 (adapter, expert) pairs, rank 4
    assert traffic.base_flops == 2 * 5 * 3 * 32 * 24
    assert traffic.lora_flops == 2 * 4 * 4 * 3 * (32 + 24)
    assert layer_traffic(w, None, ids, torch.tensor([0, 3, -1])).factor_bytes == 0


@pytest.mark.parametrize(("kind", "a_gate_up", "b_down"), [("fused", 4, 4), ("shared_outer", 2, 2)])
def test_shared_factors_are_counted_once(kind: str, a_gate_up: int, b_down: int) -> None:
    case = tiny_case(1, kind)
    ids = torch.tensor([[0, 3], [3, 5]])
    traffic = layer_traffic(case.weights, case.table, ids, torch.tensor([0, 3]))
    elements = a_gate_up * 32 + 2 * 4 * 24 + 4 * 24 + b_down * 32
    assert traffic.factor_bytes == 4 * elements * 2


def test_rotated_inputs_come_back_to_an_expert_late() -> None:
    generator = torch.Generator().manual_seed(0)
    sets = rotated_ids(1, 8, 128, 100, 3000, generator)
    assert len(sets) == 16 and sum(ids.unique().numel() for ids in sets) == 128
    assert reuse_bytes(sets, 100) == 128 * 100
    for tokens in (2, 4, 16, 64):
        sets = rotated_ids(tokens, 8, 128, 100, 4000, generator)
        assert reuse_bytes(sets, 100) >= 4000
        assert all(ids.sort(1)[0].diff(dim=1).min() > 0 for ids in sets), "an expert came twice"


def test_reuse_counts_the_bytes_between_two_uses() -> None:
    sets = [torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), torch.tensor([[1, 4]])]
    assert reuse_bytes(sets, 10) == 20  # expert 1: the last set, then the first
    assert reuse_bytes(sets[:2], 10) == 40


def test_live_slots_lie_apart() -> None:
    assert spread_slots(64, 8) == (0, 8, 16, 24, 32, 40, 48, 56)
    assert spread_slots(3, 3) == (0, 1, 2)


def test_limits_take_the_larger_of_bytes_and_arithmetic() -> None:
    limits = MachineLimits(read=100.0, copy=90.0, dense=1000.0, l2_bytes=0)
    assert limits.seconds(200.0) == 2.0 and limits.seconds(200.0, 5000.0) == 5.0


def test_a_timing_is_the_median_of_parts() -> None:
    timing = Timing.of([float(i) for i in range(1, 22)], parts=2)
    assert (timing.median, timing.low, timing.high) == (5.5, 1.5, 9.5)


def test_requests_are_checked() -> None:
    for wrong_options, match in (
        ({"tokens": 0}, "tokens must be"),
        ({"live": 9, "slots": 8}, "9 adapters"),
        ({"kind": "odd"}, "no kind"),
        ({"modes": ("fast",)}, "fast"),
    ):
        with pytest.raises(MoegraftError, match=match):
            DecodeRequest(TINY, **{"tokens": 1, **wrong_options})
    with pytest.raises(MoegraftError, match="--tokens '1,x'"):
        decode_requests(["q30"], tokens="1,x")
    with pytest.raises(MoegraftError, match="no suite 'all'"):
        suite_requests("all", ["q30"])
    for text in ("q31", "1,2,3", "4,8,8,5", "4,9,8,2"):
        with pytest.raises(MoegraftError):
            model_shape(text)
    assert model_shape("16,64,32,4").name == "16x64x32x4"


def test_a_request_over_the_memory_says_how_much() -> None:
    big = DecodeRequest(MODELS["kimi_k25"], 1, rank=16, slots=64)
    with pytest.raises(MoegraftError, match=r"needs 5\d\.\d GB .* lower --slots"):
        refuse_too_large(big, 40 * 10**9)
    refuse_too_large(big, 140 * 10**9)


def test_suites_measure_each_model_in_the_order_of_its_tables() -> None:
    found = suite_requests("record", ["q30", "q35"])
    keys = [(r.shape.name, r.rank, r.slots, r.kind) for r in found]
    assert len(set(keys)) == sum(a != b for a, b in itertools.pairwise(keys)) + 1
