"""The bars of prefill, and the pictures that join prefill to decode."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from moegraft.bench import commands, records
from moegraft.bench.bars import bars_table
from moegraft.bench.curves import kept_curves, share_curves, split, time_curves
from moegraft.bench.decode import DecodeSettings, run_decode
from moegraft.bench.options import DecodeRequest
from moegraft.bench.peers import peers_of
from moegraft.bench.plot import plot_layers
from moegraft.bench.prefill import PrefillSettings, run_prefill
from moegraft.bench.prefill_bars import BARS, prefill_bars
from moegraft.bench.prefill_options import (
    BASE_ONLY,
    INTERLEAVED,
    SEQUENCES,
    PrefillRequest,
    default_prefill_models,
    prefill_suite,
)
from moegraft.bench.shapes import ModelShape
from moegraft.errors import MoegraftError

CPU = torch.device("cpu")
#: Small, under the name of the model that bars and peers are for.
SMALL = ModelShape("q30", "small", 8, 32, 24, 2)


@pytest.fixture(scope="module")
def prefilled() -> list[records.Record]:
    """Records of a real, tiny run: two sizes, adapters in sequences, interleaved and none."""
    requests = [
        PrefillRequest(SMALL, t, 4, 2, 4, batch=batch)
        for batch in (SEQUENCES, INTERLEAVED, BASE_ONLY)
        for t in (64, 96)
    ]
    return list(run_prefill(requests, CPU, PrefillSettings(2, "abc")))


@pytest.fixture(scope="module")
def decoded() -> list[records.Record]:
    """Records of decode at smaller sizes of the same case."""
    requests = [DecodeRequest(SMALL, t, rank=4, live=2, slots=4) for t in (1, 8)]
    return list(run_decode(requests, CPU, DecodeSettings(2, commit="def")))


def of_an_h200(
    record: records.Record, tokens: int, base_us: float, lora_us: float, **fields: object
) -> records.Record:
    """Return a record with other figures, as if it were of q30 with 8 adapters on an H200."""
    made = copy.deepcopy(record)
    made |= {"device": "NVIDIA H200", "tokens": tokens, "adapters": 8, "rank": 16, **fields}
    made["peers"] = peers_of("q30", tokens, made["rank"], 8, "separate", 4.3e12)
    made["base"] |= {"us": base_us, "tflops": 618_000 / base_us}
    made["grouped_mm_us"] = 1286.0
    (mode,) = made["modes"].values()
    mode |= {"us": lora_us, "retention": base_us / lora_us, "share_with_rows": 800 / lora_us}
    return made


def met(found: list[records.Record]) -> dict[str, bool | None]:
    return {o.bar.what: o.met for o in prefill_bars(found)}


def test_bars_are_met_or_missed_by_the_figures(prefilled: list[records.Record]) -> None:
    good = of_an_h200(prefilled[0], 8192, base_us=1000, lora_us=1050)
    assert met([good]) == {
        "base, TFLOP/s": True,
        "grouped_mm over base": True,
        "base over LoRA": True,
        "best peer's LoRA over ours": True,
        "LoRA over the best peer without LoRA": True,
    }
    values = {o.bar.what: o.value for o in prefill_bars([good])}
    assert values["base, TFLOP/s"] == 618 and values["grouped_mm over base"] == 1.286
    assert values["best peer's LoRA over ours"] == 1871 / 1050
    assert values["LoRA over the best peer without LoRA"] == 1050 / 1431
    slow = of_an_h200(prefilled[0], 8192, base_us=1000, lora_us=1300)
    assert set(met([good, slow]).values()) == {True, False}, "the later record counts"
    assert met([slow])["LoRA over the best peer without LoRA"] is False
    text = bars_table(prefill_bars([slow]))
    assert "MISSED" in text and ">= 0.93" in text and "<= 0.9" in text


def test_retention_does_not_count_on_a_slow_base(prefilled: list[records.Record]) -> None:
    slow_base = of_an_h200(prefilled[0], 8192, base_us=1200, lora_us=1210)
    found = met([slow_base])
    assert found["base, TFLOP/s"] is False and found["base over LoRA"] is None
    assert "base below its bar" in bars_table(prefill_bars([slow_base]))
    alone = of_an_h200(prefilled[0], 32768, base_us=4000, lora_us=4100)
    assert met([alone])["base over LoRA"] is None, "its base was not measured at 8192"


def test_bars_need_their_device_and_their_case(prefilled: list[records.Record]) -> None:
    assert prefill_bars(prefilled) == [] and bars_table([]) == ""
    good = of_an_h200(prefilled[0], 512, 300, 400)
    assert set(met([good])) == {"LoRA over its limit with rows", "best peer's LoRA over ours"}
    for other in ({"device": "NVIDIA L4"}, {"adapters": 4}, {"kind": "fused"}, {"rank": 8}):
        assert not prefill_bars([{**good, **other}])


def test_what_is_wrong_misses_its_bars(prefilled: list[records.Record]) -> None:
    wrong_lora = of_an_h200(prefilled[0], 8192, 1000, 1050)
    wrong_lora["modes"] = {"in_kernel": {"error": "off"}}
    found = met([wrong_lora])
    assert found["base, TFLOP/s"] is True and found["base over LoRA"] is False
    wrong_base = {**wrong_lora, "modes": {}, "base": {"error": "off"}, "grouped_mm_us": None}
    assert not any(met([wrong_base]).values()) and len(met([wrong_base])) == 5


def test_every_bar_is_measured_by_the_record_suite() -> None:
    for bar in BARS:
        models = default_prefill_models(bar.weight_format)
        suite = {
            (r.shape.name, r.tokens, r.rank, r.batch, r.weight_format)
            for r in prefill_suite("record", models, bar.weight_format)
        }
        for model in bar.models:
            cases = {(model, t, bar.rank, bar.batch, bar.weight_format) for t in bar.tokens}
            assert suite >= cases, bar
        if bar.stretch is not None:
            assert bar.reached(bar.stretch) and bar.reached(bar.bar)


def test_prefill_continues_the_lines_of_decode(
    prefilled: list[records.Record], decoded: list[records.Record]
) -> None:
    shown = [r for r in prefilled if r["batch"] != BASE_ONLY]
    rows, mixed = split([*decoded, *shown])
    assert [r["tokens"] for r in rows] == [1, 8, 64, 96] and len(mixed) == 2
    for curves_of in (time_curves, share_curves, kept_curves):
        curves = {c.label: c.points for c in curves_of([*decoded, *shown])}
        ours = curves.get("moegraft LoRA") or curves["LoRA"]
        assert list(ours) == [1, 8, 64, 96] and list(curves["LoRA, interleaved"]) == [64, 96]
    (mode,) = mixed[1]["modes"].values()
    assert curves["LoRA, interleaved"][96] == pytest.approx(100 * mode["retention"])
    assert split(mixed) == (mixed, []), "alone, interleaved batches are the main lines"


def test_one_picture_shows_decode_and_prefill(
    tmp_path: Path, prefilled: list[records.Record], decoded: list[records.Record]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "both.jsonl"
    for record in [*decoded, *prefilled]:
        records.append(path, record)
    result = commands.plot_records([path], tmp_path / "both.svg")
    assert result.document["records"] == 8
    tables = result.text.split("\n\n")
    assert len(tables) == 4 and "interleaved" in tables[3] and "TFLOP/s" in tables[3]
    drawn = (tmp_path / "both-retention.svg").read_text()
    assert drawn.count("<!-- LoRA, interleaved -->") == 1, "one panel for one case"
    assert "<!-- cpu, commit def, abc;" in drawn
    with pytest.raises(MoegraftError, match="nothing to draw"):
        plot_layers([r for r in prefilled if r["batch"] == BASE_ONLY], tmp_path / "x.svg")
