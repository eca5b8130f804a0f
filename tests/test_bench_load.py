"""``bench load`` on a small model: every part is measured, recorded and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moegraft.adapters import AdapterUpdater, bind, check_bound, read_adapter
from moegraft.adapters.checksum import checksum_of
from moegraft.bench import __main__ as main
from moegraft.bench import records
from moegraft.bench.load import LoadBench, LoadOptions, load_line, run_load
from moegraft.bench.load_case import LoadCase
from moegraft.bench.load_phases import _Load, phases
from moegraft.bench.report import load_table
from moegraft.errors import MoegraftError
from moegraft.packing import pack_adapter

CASE = LoadCase(layers=2, experts=12, hidden=32, intermediate=16, rank=4)
PHASES = [
    "header", "memory", "read and name", "finite", "keys", "bind", "places", "order", "checksum",
]  # fmt: skip
PARTS = ["read", "read again", "unchecked", "load"]
PARTS += [*(f"phase: {name}" for name in PHASES), "small adapters"]


def test_the_file_is_what_the_case_says_and_binds_in_full(tmp_path: Path) -> None:
    folder = CASE.write(tmp_path / "adapter")
    source = read_adapter(folder)
    assert len(source.tensors) == 2 * 12 * 3 * 2
    found = bind(source, CASE.spec)
    check_bound(found.report, CASE.spec)
    stacked = CASE.stacked(1)["down"]
    factor = found.factors["model.layers.1.mlp.experts"].projections["down"]
    entry = found.factors["model.layers.1.mlp.experts"].entry(11)
    assert torch.equal(factor.lora_A[entry], stacked[0][11])
    assert torch.equal(factor.lora_B[entry], stacked[1][11])
    assert bool(torch.isfinite(stacked[0]).all()) and 0 < float(stacked[0].abs().max()) < 1


def test_the_default_is_36864_tensors_of_1660_megabytes() -> None:
    case = LoadCase()
    tensors = case.layers * case.experts * 3 * 2
    values = case.layers * case.experts * 3 * case.rank * (case.hidden + case.intermediate)
    assert tensors == 36864 and 2 * values == 1_660_944_384


def test_stacked_and_single_tensors_are_the_adapter_of_the_file(tmp_path: Path) -> None:
    bench = LoadBench(LoadOptions(CASE), torch.device("cpu"), CASE.write(tmp_path / "adapter"))
    bench.load()
    stacked = CASE.stacked_tensors(torch.device("cpu"))
    single = CASE.single_experts(stacked)
    assert len(single) == 12 * len(stacked) == 2 * 12 * 3 * 2
    updater = AdapterUpdater(bench.store, bench.bind)
    checksum = bench.store.info("large").checksum
    for tensors in (stacked, single):
        for _ in range(3):
            assert updater.update("large", tensors, CASE.config).checksum == checksum


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has more parts")
def test_every_part_has_a_record_with_its_bar(tmp_path: Path) -> None:
    told: list[str] = []
    options = LoadOptions(CASE, adapters=40, repeats=1, folder=tmp_path, commit="abc")
    found = list(run_load(options, told.append))
    assert [record["part"] for record in found] == PARTS
    assert all(record["seconds"] > 0 for record in found)
    bars = {record["part"]: record["bar"] for record in found if "bar" in record}
    assert bars == {"unchecked": 2.0, "load": 3.0, "small adapters": 1.25}
    for record in found:
        assert record["schema"] == records.LOAD and record["commit"] == "abc"
        if "bar" in record:
            assert record["met"] == (record["ratio"] <= record["bar"])
            assert ("met" if record["met"] else "MISSED") in load_line(record)
    assert told[1:] == [load_line(record) for record in found]
    assert [line.split("  ")[0] for line in load_table(found).splitlines()[2:]] == PARTS
    assert not list(tmp_path.iterdir()), "the adapter's file was left behind"
    assert load_table([]) == "no records"


def test_both_loads_store_what_a_plain_packing_does(tmp_path: Path) -> None:
    options = LoadOptions(CASE, folder=tmp_path)
    bench = LoadBench(options, torch.device("cpu"), CASE.write(tmp_path / "adapter"))
    bench.load()
    packed = bench.packed()
    bound = bind(read_adapter(bench.folder), CASE.spec)
    wanted = pack_adapter(bound.factors, bench.bank.layout, torch.bfloat16)
    for site, (begin, end) in wanted.spans.items():
        own_begin, own_end = packed.spans[site]
        assert torch.equal(packed.data[own_begin:own_end], wanted.data[begin:end])
    assert bench.store.add("plain", bound).checksum == bench.store.info("large").checksum


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has more parts")
def test_the_command_writes_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.jsonl"
    arguments = ["load", "--layers", "1", "--repeats", "1", "--adapters", "40", "--commit", "abc"]
    code = main.main([*arguments, "--folder", str(tmp_path), "--out", str(out), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0 and [r["part"] for r in document["records"]] == PARTS
    assert [r["part"] for r in records.read([out], records.LOAD)] == PARTS
    assert set(document["missed"]) <= set(PARTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"repeats": 0}, "--repeats must be"), ({"adapters": 10}, "--adapters must be at least 40")],
)
def test_options_that_measure_nothing_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(MoegraftError, match=message):
        LoadOptions(CASE, **options)
    with pytest.raises(MoegraftError, match="--layers must be at least 1"):
        LoadCase(layers=0)


def test_a_folder_without_room_is_named(tmp_path: Path) -> None:
    options = LoadOptions(CASE, folder=tmp_path / "missing")
    with pytest.raises(MoegraftError, match=r"There is no room for the adapter: .*missing"):
        list(run_load(options))


def test_the_phases_of_a_load_are_a_load_and_their_shares_are_all_of_it(tmp_path: Path) -> None:
    options = LoadOptions(CASE, repeats=1, folder=tmp_path)
    bench = LoadBench(options, torch.device("cpu"), CASE.write(tmp_path / "adapter"))
    found = list(phases(bench))
    assert [record["part"] for record in found] == [f"phase: {name}" for name in PHASES]
    assert abs(sum(record["ratio"] for record in found) - 1) < 1e-6
    packed = _Load(bench, {}).run()
    bench.load()
    assert checksum_of(packed, bench.bank.layout) == bench.store.info("large").checksum
