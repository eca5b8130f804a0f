"""``bench cpu`` at small sizes: every way is right, timed, recorded, compared and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import compiled
from moegraft.bench import __main__ as main
from moegraft.bench import records
from moegraft.bench.cpu import BAR_SHAPE, CpuOptions, bars_of, run_cpu
from moegraft.bench.cpu_layer import _check_agreement
from moegraft.bench.cpu_model import SmallModel
from moegraft.bench.cpu_report import cpu_line, cpu_table
from moegraft.bench.cpu_turns import in_turns
from moegraft.bench.shapes import model_shape
from moegraft.cli import main as cli
from moegraft.errors import MoegraftError

SMALL = SmallModel(layers=1, hidden=32, intermediate=16, num_experts=4, top_k=2, vocabulary=64,
                   adapters=2, rank=4, steps=2)  # fmt: skip
WAYS = {"cpp base", "cpp lora", "cpu base", "cpu lora", "grouped_mm", "eager"}


def test_every_case_is_recorded_with_its_limit_and_all_ways() -> None:
    compiled.require()
    told: list[str] = []
    options = CpuOptions(
        shape=model_shape("4,32,16,2"), tokens="1,5", turns=3, model=SMALL, commit="abc", threads=1
    )
    before = torch.get_num_threads()
    found = list(run_cpu(options, told.append))
    assert torch.get_num_threads() == before
    layers = [record for record in found if record["part"] == "layer"]
    assert [(r["dtype"], r["tokens"]) for r in layers] == [
        ("bfloat16", 1), ("bfloat16", 5), ("float32", 1), ("float32", 5),
    ]  # fmt: skip
    for record in layers:
        assert record["schema"] == records.CPU and record["commit"] == "abc"
        assert set(record["ways"]) == WAYS and record["threads"] == 1
        assert all(0 < way["us_least"] <= way["us"] for way in record["ways"].values())
        values = 3 * 32 * 16 * record["touched_experts"]
        size = 2 if record["dtype"] == "bfloat16" else 4
        rates = record["limits"]
        memory = values * size / rates["read_gb_s"] / 1e3
        arithmetic = 2 * record["tokens"] * 2 * 3 * 32 * 16 / rates["product_gflops"] / 1e3
        assert record["limit_us"] == pytest.approx(max(memory, arithmetic))
        assert record["limit_is"] == ("memory" if memory >= arithmetic else "arithmetic")
        assert record["bars"] == []
    (model,) = (record for record in found if record["part"] == "model")
    assert set(model["ways"]) == {"mixed", "base", "peft"} and len(model["bars"]) == 1
    text = cpu_table(found)
    assert "bfloat16 T=5" in text and "model, decode" in text
    assert all(cpu_line(record) for record in found)


def test_the_bars_compare_the_first_backend() -> None:
    record = {
        "part": "layer", "model": BAR_SHAPE.name, "dtype": "bfloat16", "tokens": 64,
        "backends": ["cpp", "cpu"], "limit_us": 50.0, "limit_us_least": 25.0,
        "ways": {name: {"us": us, "us_least": us / 2} for name, us in (
            ("cpp base", 100.0), ("cpp lora", 121.0), ("cpu base", 9.0), ("cpu lora", 9.0),
            ("grouped_mm", 130.0), ("eager", 9.0))},
    }  # fmt: skip
    assert [(bar["value"], bar["bar"], bar["met"]) for bar in bars_of(record)] == [
        (1.3, 1.3, True), (2.0, 2.5, True), (1.21, 1.2, False),
    ]  # fmt: skip
    faster = {**record, "dtype": "float32"}
    assert [(bar["bar"], bar["met"]) for bar in bars_of(faster)] == [(1.5, False), (1.2, False)]
    assert bars_of({**record, "tokens": 63}) == []


def test_ways_that_differ_are_not_timed() -> None:
    ways = {
        "cpp base": lambda: torch.ones(3), "cpp lora": lambda: torch.ones(3),
        "grouped_mm": lambda: torch.full((3,), 1.01),
    }  # fmt: skip
    with pytest.raises(MoegraftError, match=r"grouped_mm and cpp base differ by 0\.01"):
        _check_agreement(ways, torch.float32)
    _check_agreement(ways, torch.bfloat16)


def test_ways_take_turns_and_stop_in_time() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in "ab"}
    assert set(in_turns(ways, turns=5, seconds=60.0)) == {"a", "b"}
    assert "".join(order) == "ab" * 6
    order.clear()
    in_turns(ways, turns=5, seconds=0.0)
    assert "".join(order) == "ab" * 4


def test_both_commands_write_records_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "cpu.jsonl", tmp_path / "cpu.png"
    options = ["--model", "4,32,16,2", "--tokens", "1,5", "--repeats", "1", "--json",
               "--backends", "cpu", "--out", str(out)]  # fmt: skip
    assert main.main(["cpu", *options, "--no-small-model", "--plot", str(picture)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["records"]) == len(records.read([out], records.CPU)) == 4
    assert document["pictures"] == [str(picture)] and picture.stat().st_size > 10_000
    assert cli(["bench", "cpu", *options, "--no-small-model"]) == 0
    assert len(records.read([out], records.CPU)) == 8


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtypes": "float64"}, "choose from bfloat16, float32"),
        ({"tokens": "0"}, "--tokens"),
        ({"turns": 0}, "turns must be at least 1"),
        ({"threads": 0}, "--threads must be at least 1"),
        ({"shape": model_shape("gpt_oss_20b")}, "is no SwiGLU model"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(MoegraftError, match=reason):
        CpuOptions(**options)  # type: ignore[arg-type]
