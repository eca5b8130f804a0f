"""``bench decode`` and ``bench prefill`` of quantised experts, on a CPU with tiny layers."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moegraft.bench import __main__ as module_cli
from moegraft.bench import harness, options, records
from moegraft.bench.bars import bars_table
from moegraft.bench.cases import draw_factors, draw_layer, make_case, random_table
from moegraft.bench.decode import DecodeSettings, run_decode, wrong
from moegraft.bench.decode_bars import BARS, decode_bars
from moegraft.bench.every_row import EveryRow, layer_by_expert
from moegraft.bench.harness import MachineLimits, Timer
from moegraft.bench.layer_runs import CheckedBase, CheckedRun, Expected, LayerRun, WrongResultError
from moegraft.bench.made import check_format, quantised_layer
from moegraft.bench.options import DecodeRequest, decode_requests, default_models, suite_requests
from moegraft.bench.peers import peers_of
from moegraft.bench.plot import plot_layers
from moegraft.bench.prefill import PrefillSettings, run_prefill
from moegraft.bench.prefill_bars import prefill_bars
from moegraft.bench.prefill_case import make_prefill_case
from moegraft.bench.prefill_options import PrefillRequest, prefill_requests, prefill_suite
from moegraft.bench.report import decode_line, decode_table
from moegraft.bench.shapes import MODELS, ModelShape
from moegraft.bench.traffic import expert_bytes, layer_traffic
from moegraft.cli import main
from moegraft.errors import MoegraftError, PlanError
from moegraft.quant.experts import quantise_experts
from moegraft.quant.formats import FORMATS, UNQUANTIZED
from moegraft.reference import moe_lora_reference
from moegraft.testing.compare import relative_error

CPU = torch.device("cpu")
TINY = ModelShape("tiny", "tiny", 4, 160, 96, 2)
QUICK = DecodeSettings(repeats=2, commit="abc")


def shape_of(style: str) -> ModelShape:
    return replace(TINY, kind=style)


def styles(weight_format: str) -> list[str]:
    """Gate and up that are interleaved can share no block of rows."""
    rows = FORMATS[weight_format].block[0]
    return ["swiglu", "relu2", *(["gpt_oss"] if rows <= 1 else [])]


CASES = [(name, style) for name in FORMATS for style in styles(name)]


def test_the_name_of_no_format_is_that_of_the_formats() -> None:
    assert options.UNQUANTIZED == UNQUANTIZED


@pytest.mark.parametrize(("weight_format", "style"), CASES)
def test_a_whole_measurement(weight_format: str, style: str) -> None:
    requests = [
        DecodeRequest(shape_of(style), t, 4, 2, 3, weight_format=weight_format) for t in (1, 5)
    ]
    found = list(run_decode(requests, CPU, QUICK))
    assert not wrong(found) and [r["weight_format"] for r in found] == [weight_format] * 2
    sides = TINY.intermediate, TINY.hidden
    form = FORMATS[weight_format]
    gate_up = (1 if style == "relu2" else 2) * form.num_bytes(*sides)
    if style == "gpt_oss":  # one matrix of both, whose 16-bit biases count too
        gate_up = form.num_bytes(2 * sides[0], sides[1]) + 2 * (2 * sides[0] + sides[1])
    per_expert = gate_up + form.num_bytes(*reversed(sides))
    for record in found:
        (ours,) = record["modes"].values()
        assert ours["checked"]["delta_error"] < 2e-2
        assert "base rows equal base" in ours["checked"]["bits"]
        touched = record["traffic"]["base_bytes"] / per_expert
        assert math.isclose(touched, round(touched)) if record["tokens"] == 1 else 2 <= touched <= 4
        assert record["bf16_base"]["us"] > 0 and record["grouped_mm_us"] is None
        assert record["bf16_base"]["checked"]["output_error"] < 1e-2
        assert math.isclose(ours["share_of_limit"], record["limit_us"]["lora"] / ours["us"])
    assert f"tiny {weight_format} T=1" in decode_line(found[0])
    ratio = found[1]["bf16_base"]["us"] / found[1]["base"]["us"]
    assert f"tiny {weight_format} T=5: base {ratio:.2f} times as fast" in decode_table(found)


@pytest.mark.parametrize(("weight_format", "style"), CASES)
def test_a_layer_is_its_drawn_experts_quantised(weight_format: str, style: str) -> None:
    shape = shape_of(style)
    made = quantised_layer(shape, weight_format, CPU, seed=3)
    generator = torch.Generator().manual_seed(3)
    drawn = [draw_layer(replace(shape, num_experts=1), generator) for _ in range(4)]
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    parts = {name: [getattr(one, name) for one in drawn] for name in names}
    whole = replace(
        drawn[0],
        **{name: None if p[0] is None else torch.cat(p) for name, p in parts.items()},
    )
    wanted = quantise_experts(whole, weight_format)
    assert (made.layout, made.activation) == (wanted.layout, wanted.activation)
    pairs = [(getattr(made, name), getattr(wanted, name)) for name in names]
    names = ("gate_up", "down", "gate_up_global", "down_global")
    pairs += [(getattr(made.scales, name), getattr(wanted.scales, name)) for name in names]
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize(("weight_format", "style"), CASES)
def test_all_rows_are_checked_with_dequantised_weights(weight_format: str, style: str) -> None:
    shape = shape_of(style)
    request = PrefillRequest(shape, 13, 4, 2, 3, weight_format=weight_format)
    table = random_table(shape, 4, 3, "separate", CPU)
    case = make_prefill_case(request, quantised_layer(shape, weight_format, CPU), table, 0)
    s = case.sets[0]
    inputs = (s.x, s.topk_ids, s.topk_weights, case.weights)
    base, lora = layer_by_expert(case)
    factors = [table.factors(slot) for slot in range(3)]
    # h is rounded after sums in another order: where FP8 has few bits, that shows.
    assert relative_error(base, moe_lora_reference(*inputs)) < 4e-3
    expected = moe_lora_reference(*inputs, factors, case.slots.tolist())
    assert relative_error(lora, expected) < 4e-3
    plain = replace(case, weights=draw_layer(shape, torch.Generator().manual_seed(0)))
    assert relative_error(layer_by_expert(plain)[0], base) > 4e-3, "nothing was quantised"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_prefill_times_bf16_in_turns(weight_format: str) -> None:
    request = PrefillRequest(TINY, 40, 4, 2, 3, weight_format=weight_format)
    (record,) = run_prefill([request], CPU, PrefillSettings(2, "abc"))
    assert not wrong([record]) and record["grouped_mm_us"] is None
    (ours,) = record["modes"].values()
    assert ours["checked"]["all_rows"] == 40 and ours["checked"]["all_delta_error"] < 2e-2
    assert record["bf16_base"]["us"] > 0 and record["bf16_base"]["checked"]["all_rows"] == 40
    fp8 = record["traffic"]["base_fp8_flops"]
    assert fp8 == (record["traffic"]["base_flops"] if weight_format == "fp8-block" else 0)
    assert ("dense_fp8_tflops" in record["limits"]) <= (weight_format == "fp8-block")


def test_fp8_products_have_a_rate_of_their_own() -> None:
    limits = MachineLimits(read=1e6, copy=1e6, dense=100.0, l2_bytes=0, dense_fp8=200.0)
    assert limits.seconds(0.0, 100.0, 400.0) == 3.0
    assert replace(limits, dense_fp8=None).seconds(0.0, 100.0, 400.0) == 5.0
    assert replace(limits, dense_fp8=50.0).seconds(0.0, 100.0, 400.0) == 5.0, "bf16 holds FP8"
    assert limits.record()["dense_fp8_tflops"] == 200e-12


def test_arithmetic_is_counted_in_values_not_in_bytes() -> None:
    weights = quantised_layer(TINY, "nvfp4", CPU)
    ids, slots = torch.tensor([[0, 3], [3, -1]]), torch.tensor([0, -1])
    traffic = layer_traffic(weights, None, ids, slots)
    assert traffic.base_flops == 2 * 3 * 3 * 160 * 96 and traffic.base_fp8_flops == 0
    assert traffic.base_bytes == 2 * expert_bytes(weights)
    assert expert_bytes(weights) == 3 * (160 * 96 // 2 + 160 * 96 // 16) + 3 * 4


@pytest.mark.parametrize("checks", [Expected, EveryRow])
def test_a_wrong_scale_is_found(checks: type[Expected]) -> None:
    request = DecodeRequest(TINY, 6, 4, 2, 3, weight_format="nvfp4")
    weights = quantised_layer(TINY, "nvfp4", CPU)
    assert weights.scales is not None and weights.scales.down_global is not None
    case = make_case(request, weights, random_table(TINY, 4, 3, "separate", CPU), 0)
    expected = checks(case)
    draw_factors(case.table, case.live[0], torch.Generator().manual_seed(5))
    with pytest.raises(WrongResultError, match=r"delta|output"):
        CheckedRun(LayerRun.of_layer(case, None), expected, Timer(CPU, 1))
    weights.scales.down_global.mul_(1.1)
    with pytest.raises(WrongResultError, match="output"):
        CheckedBase(LayerRun.of_layer(case, "base", lora=False), expected, Timer(CPU, 1))


def test_a_wrong_bf16_layer_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Expected.check_base

    def off(self: Expected, base: torch.Tensor) -> dict[str, object]:
        return check(self, base if self.quantised else 1.1 * base)

    def remember(self: Expected, case: object) -> None:
        init(self, case)  # type: ignore[arg-type]
        self.quantised = case.weights.scales is not None  # type: ignore[attr-defined]

    init = Expected.__init__
    monkeypatch.setattr(Expected, "__init__", remember)
    monkeypatch.setattr(Expected, "check_base", off)
    request = DecodeRequest(TINY, 2, 4, 1, 2, weight_format="fp8-channel")
    (record,) = run_decode([request], CPU, QUICK)
    assert set(record["bf16_base"]) == {"error"} and "us" in record["base"]
    assert wrong([record]) == [record["bf16_base"]["error"]]
    assert "bf16_base: " in decode_table([record])
    of_prefill = PrefillRequest(TINY, 12, 4, 1, 2, weight_format="fp8-channel")
    (record,) = run_prefill([of_prefill], CPU, PrefillSettings(1, "abc"))
    assert set(record["bf16_base"]) == {"error"} and "us" in record["base"]


def test_where_no_backend_runs_a_format_it_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("MOEGRAFT_BACKEND", "triton")
    said: list[str] = []
    requests = decode_requests(["4,160,96,2"], "1", weight_format="nvfp4")
    with pytest.raises(PlanError, match="can't run a layer with bfloat16 nvfp4 weights on cpu"):
        list(run_decode(requests, CPU, QUICK, said.append))
    of_prefill = prefill_requests(["4,160,96,2"], "12", weight_format="nvfp4")
    with pytest.raises(PlanError, match="nvfp4"):
        list(run_prefill(of_prefill, CPU, PrefillSettings(1, "abc"), said.append))
    assert said == []
    check_format(replace(requests[0], weight_format=UNQUANTIZED), CPU)  # never refused here


def test_formats_that_a_model_can_not_have_are_refused() -> None:
    for name, match in (("fp8", "no weight format 'fp8'"), ("nvfp4-w4a4", "Blackwell")):
        with pytest.raises(MoegraftError, match=f"--format: .*{match}"):
            DecodeRequest(TINY, 1, weight_format=name)
    with pytest.raises(MoegraftError, match=r"--format fp8-block: .* interleaved"):
        DecodeRequest(MODELS["gpt_oss_20b"], 1, weight_format="fp8-block")
    DecodeRequest(MODELS["gpt_oss_20b"], 1, weight_format="fp8-tensor")


def test_memory_is_that_of_the_format_and_of_bf16_beside_it() -> None:
    plain = DecodeRequest(TINY, 1, slots=8)
    more = replace(plain, weight_format="nvfp4").bytes_needed - plain.bytes_needed
    assert more == 4 * expert_bytes(quantised_layer(TINY, "nvfp4", CPU))


def test_peers_with_fp8_stand_beside_blocks_only() -> None:
    def vllm(weight_format: str, kind: str = "separate", model: str = "q30") -> list[float]:
        found = peers_of(model, 64, 16, 8, kind, 4.3e12, weight_format)
        return [p["lora_us"] for p in found]

    assert vllm("fp8-block") == vllm("fp8-block-w8a16", "fused") == [265]
    assert vllm("fp8-block", model="q35") == [280]
    assert vllm("fp8-channel") == vllm("nvfp4") == vllm("mxfp4") == []
    assert 265 not in vllm(UNQUANTIZED)


def test_suites_are_the_cases_that_have_bars() -> None:
    for bar in BARS:
        models = default_models(bar.weight_format)
        suite = suite_requests("record", models, bar.weight_format)
        cases = {(r.shape.name, r.tokens, r.weight_format) for r in suite}
        assert cases >= {(m, t, bar.weight_format) for m in bar.models for t in bar.tokens}
        assert {m for m, _, _ in cases} == set(models) and {r.live for r in suite} == {8}
        assert {r.tokens for r in suite} == {1, 16, 64, 256}
    (one,) = prefill_suite("record", ["q30"], "fp8-block")
    assert (one.tokens, one.weight_format, one.batch) == (8192, "fp8-block", "sequences")
    with pytest.raises(MoegraftError, match="no suite 'all'"):
        suite_requests("all", ["q30"], "nvfp4")


@pytest.fixture(scope="module")
def small() -> records.Record:
    """A real record, whose figures the tests of bars replace."""
    request = DecodeRequest(TINY, 1, 4, 1, 2, weight_format="nvfp4")
    (record,) = run_decode([request], CPU, QUICK)
    return record


def of_an_h200(
    small: records.Record, model: str, weight_format: str, tokens: int, base: float, lora: float
) -> records.Record:
    made = copy.deepcopy(small)
    made |= {"device": "NVIDIA H200", "model": model, "weight_format": weight_format}
    made |= {"tokens": tokens, "adapters": 8, "rank": 16}
    made["peers"] = peers_of(model, tokens, 16, 8, "separate", 4.3e12, weight_format)
    made["base"]["us"], made["bf16_base"]["us"] = base, 300.0
    (mode,) = made["modes"].values()
    mode |= {"us": lora, "share_of_limit": 160 / lora}
    return made


def test_bars_of_fp8_are_met_or_missed(small: records.Record) -> None:
    found = [
        of_an_h200(small, model, "fp8-block", t, 150, us)
        for model, t, us in (("q30", 1, 27), ("q30", 64, 180), ("q30", 256, 256), ("q35", 256, 298))
    ]
    outcomes = {(o.model, o.tokens, o.bar.what): o for o in decode_bars(found)}
    peer, share = "LoRA over the best peer without LoRA", "LoRA, share of its limit"
    assert {key: o.met for key, o in outcomes.items()} == {
        ("q30", 1, peer): True,
        ("q30", 64, peer): True,
        ("q30", 64, share): False,
        ("q30", 256, peer): False,
        ("q35", 256, peer): True,
    }
    assert outcomes["q30", 64, peer].value == pytest.approx(180 / 166)
    text = bars_table(decode_bars(found))
    assert "q30 fp8-block" in text and "MISSED" in text and "<= 1.3" in text
    assert not decode_bars([{**r, "weight_format": "fp8-channel"} for r in found])
    assert not decode_bars([{**r, "device": "cpu"} for r in found])


@pytest.mark.parametrize(("weight_format", "model"), [("nvfp4", "q30"), ("mxfp4", "gpt_oss_20b")])
def test_bars_of_4_bits_are_against_bf16(
    small: records.Record, weight_format: str, model: str
) -> None:
    good = of_an_h200(small, model, weight_format, 64, 100, 200)
    assert [(o.value, o.met) for o in decode_bars([good])] == [(3.0, True), (0.8, True)]
    slow = of_an_h200(small, model, weight_format, 64, 150, 260)
    assert [o.met for o in decode_bars([good, slow])] == [False, False]
    del slow["bf16_base"]["us"]
    assert next(o.value for o in decode_bars([slow])) is None


def test_a_bar_on_the_base_asks_the_base_of_its_own_format(small: records.Record) -> None:
    bf16 = of_an_h200(small, "q30", UNQUANTIZED, 8192, 1000, 1050)
    fp8 = of_an_h200(small, "q30", "fp8-block", 8192, 1000, 1050)
    for record, tflops in ((bf16, 630.0), (fp8, 590.0)):
        record |= {"batch": "sequences", "grouped_mm_us": 1286.0}
        record["base"]["tflops"] = tflops
        (mode,) = record["modes"].values()
        mode |= {"retention": 0.95, "share_with_rows": 0.9}
    met = {(o.bar.weight_format, o.bar.what): o.met for o in prefill_bars([bf16, fp8])}
    assert met[UNQUANTIZED, "base over LoRA"] is True and met["fp8-block", "base, TFLOP/s"] is False
    assert met["fp8-block", "base over LoRA"] is None
    fp8["base"]["tflops"] = 610.0
    met = {(o.bar.weight_format, o.bar.what): o.met for o in prefill_bars([bf16, fp8])}
    assert met["fp8-block", "base over LoRA"] is True


def test_pictures_have_a_panel_per_format(small: records.Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [
        of_an_h200(small, "q30", weight_format, t, 100, 120)
        for weight_format in ("nvfp4", UNQUANTIZED)
        for t in (1, 64)
    ]
    for record in found:
        if record["weight_format"] == UNQUANTIZED:  # as those of before there were formats
            del record["weight_format"], record["bf16_base"]
    drawn = plot_layers(found, tmp_path / "formats.svg")[0].read_text()
    assert "Qwen3-30B-A3B nvfp4: rank 16" in drawn and "Qwen3-30B-A3B: rank 16" in drawn


def test_both_command_lines_measure_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "require_gpu", lambda: CPU)
    path = tmp_path / "formats.jsonl"
    lines = (lambda a: main(["bench", *a]), module_cli.main)
    common = ["--model", "4,160,96,2", "--rank", "4", "--adapters", "2", "--slots", "2",
              "--repeats", "1", "--format", "mxfp4", "--out", str(path), "--json"]  # fmt: skip
    for run in lines:
        for command, tokens in (("decode", "3"), ("prefill", "12")):
            assert run([command, "--tokens", tokens, *common]) == 0
            document = json.loads(capsys.readouterr().out)
            (record,) = document["records"]
            assert record["weight_format"] == "mxfp4" and document["bars"] == []
        assert run(["decode", "--format", "fp3"]) == 2
        assert "no weight format 'fp3'" in capsys.readouterr().err
    assert len(records.read([path], records.DECODE)) == 2
