"""``bench e2e`` with a tiny model on a CPU, and the search that ``tune`` makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.device import INTERPRETER
from moegraft.backends.triton.tiles import choose_config, config_ok
from moegraft.backends.triton.tuned_tiles import config_of, tuned_file
from moegraft.bench import __main__ as module_cli
from moegraft.bench import records, tune, tuned_table
from moegraft.bench.cases import DecodeCase, make_case, random_layer, random_table
from moegraft.bench.e2e import EndToEndOptions, run_e2e
from moegraft.bench.e2e_model import WholeModel, random_model
from moegraft.bench.harness import Timer
from moegraft.bench.layer_runs import LayerRun
from moegraft.bench.options import DecodeRequest
from moegraft.bench.report import e2e_table, tune_table
from moegraft.bench.shapes import ModelShape
from moegraft.cli import main
from moegraft.errors import MoegraftError
from moegraft.problem import Problem

CPU = torch.device("cpu")
SMALL = WholeModel(2, 64, 48, 8, 2, 4, 2, 16, 256)
START = FusedConfig(16, GemmConfig(64, 128, 4, 3), GemmConfig(128, 64, 4, 4))


def test_a_whole_model_decodes_with_mixed_adapters() -> None:
    options = EndToEndOptions(SMALL, (1, 4), adapters=3, rank=4, prompt=5, steps=8, commit="abc")
    found = list(run_e2e(options, CPU))
    assert [(r["batch"], r["mix"]) for r in found] == [
        (1, "no LoRA"), (1, "1 adapter"), (4, "no LoRA"), (4, "1 adapter"), (4, "3 adapters"),
    ]  # fmt: skip
    for record in found:
        assert record["tokens_s"] == pytest.approx(record["batch"] / record["ms_per_step"] * 1e3)
        assert record["vllm_tokens_s"] is None, "a peer's figure is of another model"
    mixed = found[-1]["checked"]
    assert mixed == {"eager_steps": 4, "rows_unlike_base": mixed["rows"], "rows": 4}
    table = e2e_table(found)
    assert "3 adapters" in table and "WRONG" not in table
    wrong = {**found[0], "error": "tokens differ"}
    del wrong["ms_per_step"]
    assert "WRONG" in e2e_table([wrong])


def test_a_random_model_is_the_real_one_but_for_its_values() -> None:
    from transformers import Qwen3MoeForCausalLM

    model, real = random_model(SMALL, CPU), Qwen3MoeForCausalLM(SMALL.config())
    assert torch.equal(model.model.rotary_emb.inv_freq, real.model.rotary_emb.inv_freq)
    size = sum(p.numel() * 2 for p in model.parameters() if p.dim() > 1)
    assert size == SMALL.weight_bytes
    assert 60.9e9 < WholeModel().weight_bytes < 61.3e9
    again = random_model(SMALL, CPU)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"adapters": 0}, "adapters must be"),
        ({"steps": 4}, "--steps"),
        ({"model": WholeModel(layers=0)}, "--layers"),
    ],
)
def test_end_to_end_options_are_checked(options: dict[str, object], match: str) -> None:
    with pytest.raises(MoegraftError, match=match):
        EndToEndOptions(**options)  # type: ignore[arg-type]


def test_neighbours_differ_by_one_step_in_one_field() -> None:
    found = list(tune.neighbours(START))
    assert len(found) == len(set(found)) and START not in found
    assert FusedConfig(32, START.gate_up, START.down) in found
    assert FusedConfig(16, GemmConfig(128, 128, 4, 3), START.down) in found
    assert FusedConfig(16, GemmConfig(256, 128, 4, 3), START.down) not in found


@pytest.mark.parametrize("rank", [16, 64])
def test_the_search_starts_from_the_backends_choice_and_stays_on_the_device(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "device_facts", lambda: INTERPRETER)
    problem = Problem(64, 8, 128, 2048, 768, True, "bfloat16", "unquantized", "cuda", rank)
    start = tune.start_config(problem)
    assert start == choose_config(problem, INTERPRETER)[0]
    near = list(tune._allowed_near(start, problem, wide=False))
    wide = list(tune._allowed_near(start, problem, wide=True))
    assert near and len(near) < len(list(tune.neighbours(start))) and len(wide) > len(near)
    assert all(config_ok(config, problem, INTERPRETER) for config in wide)


def test_the_search_ends_at_the_best_in_reach() -> None:
    asked: list[int] = []

    def cost(value: int) -> tune.Cost | None:
        asked.append(value)
        return None if value == 3 else tune.Cost(1.0 + abs(value - 6), 1.0 + abs(value - 6))

    def near(value: int) -> list[int]:
        return [value - 1, value + 1, value + 2]

    best, found = tune.descend(0, near, cost, seconds=60)
    assert best == 6 and found.mean == 1.0 and len(asked) == len(set(asked))
    assert tune.descend(0, near, cost, seconds=-1)[0] == 0, "the time was over"
    with pytest.raises(MoegraftError, match="can't run: 3"):
        tune.descend(3, near, cost, seconds=60)


def tiny_case() -> DecodeCase:
    shape = ModelShape("tiny", "tiny", 8, 32, 24, 2)
    request = DecodeRequest(shape, 3, rank=4, live=2, slots=4)
    return make_case(
        request, random_layer(shape, CPU), random_table(shape, 4, 4, "separate", CPU), 0
    )


def test_tiles_are_checked_before_they_are_timed() -> None:
    def run_of(case: DecodeCase, config: FusedConfig, lora: bool) -> LayerRun:
        run = LayerRun.of_layer(case, None, lora)
        if config.block_m == 32:  # tiles that give wrong sums
            right = run._function
            run._function = lambda inputs, slots: 1.1 * right(inputs, slots)
        return run

    tried: dict[FusedConfig, tune.Cost | None] = {}
    measured = tune.Measured(tiny_case(), Timer(CPU, 2), tried, lambda text: None, run_of)
    good = measured(START)
    assert good is not None and good.base_us > 0 and good.lora_us > 0
    bad = FusedConfig(32, START.gate_up, START.down)
    assert measured(bad) is None and tried[bad] is None and "output" in measured.wrong[0]


def tuned_record(tokens: int, lora_us: float) -> records.Record:
    import dataclasses

    config = {"config": dataclasses.asdict(START), "base_us": 10.0}
    return {
        **records.header(records.TUNE, "abc"),
        "model": "tiny",
        "problem": {"num_tokens": tokens, "max_rank": 16},
        "tried": 3,
        "wrong": [],
        "before": {**config, "lora_us": 20.0},
        "after": {**config, "lora_us": lora_us},
    }


def test_a_table_of_tiles_keeps_other_problems(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / tuned_file("NVIDIA H200")
    tuned_table.write_tuned(path, [tuned_record(1, 15.0), tuned_record(4, 16.0)])
    assert tuned_table.write_tuned(path, [tuned_record(4, 12.0)]) == 2
    entries = json.loads(path.read_text())["entries"]
    assert [(e["problem"]["num_tokens"], e["lora_us"]) for e in entries] == [(1, 15.0), (4, 12.0)]
    assert config_of(entries[0]["config"]) == START
    assert "12.0" in tune_table([tuned_record(4, 12.0)])
    path.write_text(json.dumps({"device": "another", "entries": []}))
    with pytest.raises(MoegraftError, match="is for 'another'"):
        tuned_table.write_tuned(path, [tuned_record(1, 1.0)])
    for damaged in ("[1]", '{"device": "NVIDIA H200"', '{"entries": {}}', '{"entries": [{}]}'):
        path.write_text(damaged)
        with pytest.raises(MoegraftError, match="can't be used"):
            tuned_table.write_tuned(path, [tuned_record(1, 1.0)])
        assert path.read_text() == damaged
    with pytest.raises(MoegraftError, match="can't be written"):
        tuned_table.write_tuned(path / "below-a-file.json", [tuned_record(1, 1.0)])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "e2e", "--layers", "0"], "--layers"),
        (["bench", "e2e", "--batch", "x"], "--batch 'x'"),
        (["tune", "--shape", "1,2"], "no model shape '1,2'"),
        (["tune", "--seconds", "0"], "--seconds"),
        (["tune", "--seconds", "nan"], "--seconds"),
        (["tune", "--tokens", "\N{SUPERSCRIPT TWO}"], "--tokens"),
        (["bench", "decode", "--tokens", "9" * 5000], "--tokens"),
        (["bench", "decode", "--kind", ""], "--kind '' names none"),
        (["bench", "decode", "--model", "8,32,24," + "9" * 5000], "no model shape"),
    ],
)
def test_wrong_options_are_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert module_cli.main([a for a in arguments if a != "bench"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["bench", "e2e", "--json"], ["tune"]])
def test_without_a_gpu_they_say_so(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2 and "no GPU here" in capsys.readouterr().err
    assert module_cli.main([a for a in arguments if a != "bench"]) == 2
    assert "no GPU here" in capsys.readouterr().err
