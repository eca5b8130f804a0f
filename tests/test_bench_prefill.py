"""``bench prefill`` on a CPU with tiny layers: what it draws, counts, checks and writes."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from moegraft.bench import commands, harness, records
from moegraft.bench.cases import random_layer, random_table
from moegraft.bench.decode import wrong
from moegraft.bench.harness import MachineLimits, Timer
from moegraft.bench.prefill import PrefillSettings, limits_with_rows_us, run_prefill
from moegraft.bench.prefill_case import batch_slots, make_prefill_case
from moegraft.bench.prefill_options import (
    BASE_ONLY,
    BATCHES,
    INTERLEAVED,
    ONE,
    PREFILL_SUITES,
    SEQUENCES,
    PrefillRequest,
    prefill_requests,
    prefill_suite,
)
from moegraft.bench.prefill_report import prefill_table
from moegraft.bench.shapes import MODELS, ModelShape
from moegraft.bench.traffic import Traffic
from moegraft.errors import MoegraftError

CPU = torch.device("cpu")
TINY = ModelShape("tiny", "tiny", 8, 32, 24, 2)


def request_of(tokens: int, batch: str = SEQUENCES) -> PrefillRequest:
    live = 1 if batch == ONE else 2
    return PrefillRequest(TINY, tokens, 4, live, 6, modes=("auto", "serial"), batch=batch)


@pytest.fixture(scope="module")
def found() -> list[records.Record]:
    """Records of a real, tiny run: every kind of batch."""
    requests = [request_of(40, batch) for batch in BATCHES]
    return list(run_prefill(requests, CPU, PrefillSettings(3, "abc")))


def test_a_whole_measurement(found: list[records.Record]) -> None:
    assert [r["batch"] for r in found] == list(BATCHES) and not wrong(found)
    assert [r["live"] for r in found] == [2, 2, 1, 0]
    for record in found:
        base, ours = record["base"], record["modes"]["serial"]
        assert ours["chosen"] and "base rows equal base" in ours["checked"]["bits"]
        assert ours["checked"]["rows"] == 16 and ours["checked"]["delta_error"] < 2e-2
        assert math.isclose(ours["retention"], base["us"] / ours["us"])
        flops = record["traffic"]["base_flops"]
        assert math.isclose(base["tflops"], flops / base["us"] / 1e6)
        assert math.isclose(
            ours["tflops"], (flops + record["traffic"]["lora_flops"]) / ours["us"] / 1e6
        )
        limit = record["limit_us"]
        assert limit["base"] <= limit["base_with_rows"] <= limit["lora_with_rows"]
        assert math.isclose(ours["share_of_limit"], limit["lora"] / ours["us"])
        assert min(base["eager_us"], ours["eager_us"], ours["idle_us"]) > 0
        assert record["grouped_mm_us"] > 0
    only_base = found[-1]
    assert only_base["traffic"]["lora_flops"] == only_base["traffic"]["factor_bytes"] == 0
    assert only_base["modes"]["serial"]["checked"]["delta_error"] == 0


def test_the_table_has_a_row_per_record(found: list[records.Record]) -> None:
    lines = prefill_table(found).splitlines()
    assert lines[2].split()[:6] == ["model", "T", "rank", "adapters", "kind", "batch"]
    assert [line.split()[5] for line in lines[4:]] == list(BATCHES)
    assert all(line.split()[6] == "serial*" for line in lines[4:])
    assert prefill_table([]) == "no records"


def test_stored_peers_stand_beside_the_same_case_without_lora_where_no_adapter_is_live() -> None:
    tiny_q30 = ModelShape("q30", "as q30 to the peers", 8, 32, 24, 2)
    requests = [
        PrefillRequest(tiny_q30, 512, 16, 8, 8, batch=batch) for batch in (INTERLEAVED, BASE_ONLY)
    ]
    mixed, idle = run_prefill(requests, CPU, PrefillSettings(1, "abc"))
    assert {p["system"]: (p["stored_base_us"], p["stored_lora_us"]) for p in mixed["peers"]} == {
        "vLLM 0.33": (328, 667),
        "SGLang 0.5.23": (328, 473),
    }
    assert all(p["base_us"] and p["lora_us"] is None for p in idle["peers"])
    sglang = mixed["peers"][1]
    faster = sglang["lora_us"] / next(iter(mixed["modes"].values()))["us"]
    cell = f"{sglang['base_us']:.0f}/{sglang['lora_us']:.0f} SGLang 0.5.23  {faster:>6.2f}"
    assert prefill_table([mixed]).endswith(cell)
    assert prefill_table([idle]).endswith("-")


def test_adapters_lie_in_a_batch_as_its_name_says() -> None:
    def slots(tokens: int, batch: str) -> list[int]:
        return batch_slots(request_of(tokens, batch)).tolist()

    assert slots(7, SEQUENCES) == [0, 0, 0, 0, 3, 3, 3]
    assert slots(7, INTERLEAVED) == [0, 3, 0, 3, 0, 3, 0]
    assert slots(3, ONE) == [0, 0, 0] and slots(3, BASE_ONLY) == [-1, -1, -1]


def test_the_draw_of_a_size_does_not_depend_on_batch_and_rank() -> None:
    weights = random_layer(TINY, CPU)
    cases = [
        make_prefill_case(
            request_of(20, batch), weights, random_table(TINY, rank, 6, "fused", CPU), 0
        )
        for batch, rank in ((SEQUENCES, 4), (INTERLEAVED, 8))
    ]
    (first,), (second,) = (case.sets for case in cases)
    assert torch.equal(first.x, second.x) and torch.equal(first.topk_ids, second.topk_ids)
    assert torch.equal(first.topk_weights, second.topk_weights)


def test_sets_rotate_only_where_a_batch_leaves_experts_out() -> None:
    many = ModelShape("many", "many", 64, 32, 24, 2)
    weights, table = random_layer(many, CPU), random_table(many, 4, 6, "separate", CPU)
    for tokens, more in ((4, True), (2000, False)):
        request = PrefillRequest(many, tokens, 4, 2, 6)
        case = make_prefill_case(request, weights, table, l2_size=4 * many.expert_bytes)
        assert (len(case.sets) > 1) == more
        assert case.reuse_bytes() >= 16 * many.expert_bytes


def test_rows_between_the_products_count_in_the_second_limit_only() -> None:
    limits = MachineLimits(read=1e6, copy=1e6, dense=1e6, l2_bytes=0)
    traffic = Traffic(100.0, 20.0, 3.0, 7.0, base_flops=50.0, lora_flops=60.0)
    assert limits_with_rows_us(limits, traffic) == {"base_with_rows": 110, "lora_with_rows": 130}
    (record,) = run_prefill([request_of(16)], CPU, PrefillSettings(1))
    pairs = 16 * 2
    assert record["traffic"]["row_bytes"] == 2 * pairs * (32 + 24) * 2
    assert record["traffic"]["activation_bytes"] == 2 * 16 * 32 * 2


def test_replays_in_turns_run_equally_often() -> None:
    runs = {"a": 0, "b": 0}

    def count(name: str) -> None:
        runs[name] += 1

    timings = Timer(CPU, 5).measure_in_turns({n: lambda n=n: count(n) for n in runs}, parts=2)
    assert runs["a"] == runs["b"] > 5
    assert all(0 <= t.low <= t.median <= t.high for t in timings.values())


def test_requests_are_checked() -> None:
    with pytest.raises(MoegraftError, match="no batch 'mixed'"):
        PrefillRequest(TINY, 8, batch="mixed")
    with pytest.raises(MoegraftError, match="uses one adapter, not 8"):
        PrefillRequest(TINY, 8, batch=ONE)
    with pytest.raises(MoegraftError, match=r"--batch ',' names none"):
        prefill_requests(["q30"], batches=",")
    with pytest.raises(MoegraftError, match="no suite 'all'"):
        prefill_suite("all", ["q30"])
    once = prefill_requests(["q30"], "512", adapters="2,8", batches=f"{ONE},{SEQUENCES}")
    assert [(r.batch, r.live) for r in once] == [(ONE, 1), (SEQUENCES, 2), (SEQUENCES, 8)]


def test_rows_of_pairs_count_as_memory() -> None:
    small, large = (PrefillRequest(MODELS["q30"], t) for t in (512, 65536))
    pairs = (65536 - 512) * 8
    rows = large.bytes_needed - small.bytes_needed
    assert rows > pairs * (2 * 2048 + 2 * 768 + 2 * 2 * 768), "less than x, h and gate_up in bf16"
    assert large.bytes_needed < 100e9, "the record suite must fit 140 GB"


@pytest.mark.parametrize("suite", PREFILL_SUITES)
def test_suites_share_weights_and_adapters_of_neighbours(suite: str) -> None:
    requests = prefill_suite(suite, ["q30", "q35"])
    keys = [(r.shape.name, r.rank, r.slots, r.kind) for r in requests]
    changes = sum(a != b for a, b in itertools.pairwise(keys))
    assert len(set(requests)) == len(requests) and len(set(keys)) == changes + 1


def test_the_record_suite_has_the_cases_of_the_bars() -> None:
    cases = {(r.tokens, r.rank, r.batch) for r in prefill_suite("record", ["q30"])}
    assert cases >= {(t, 16, SEQUENCES) for t in (512, 1024, 2048, 8192, 32768, 65536)}
    assert cases >= {(8192, 16, INTERLEAVED), (8192, 64, SEQUENCES), (8192, 16, ONE)}


def test_the_command_writes_records_and_counts_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "require_gpu", lambda: CPU)
    path = tmp_path / "records.jsonl"
    result = commands.prefill([request_of(16)], repeats=1, commit="abc", out=path)
    assert result.exit_code == 0 and result.document["wrong"] == []
    (record,) = records.read([path], records.PREFILL)
    assert record == json.loads(json.dumps(result.document["records"][0]))
    assert result.text.startswith("cpu: read") and "sequences" in result.text
    with pytest.raises(MoegraftError, match="--repeats must be at least 1"):
        commands.prefill([], repeats=0)
