"""What surrounds a measurement: stored peers, records, pictures, both command lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from moegraft.bench import __main__ as module_cli
from moegraft.bench import commands, decode, harness, records
from moegraft.bench.curves import kept_curves, share_curves, time_curves
from moegraft.bench.decode import DecodeSettings, run_decode
from moegraft.bench.options import KINDS, DecodeRequest
from moegraft.bench.peer_figures import COPY_RATE, FIGURES, VLLM_END_TO_END
from moegraft.bench.peers import peers_of, scaled_us
from moegraft.bench.plot import plot_layers
from moegraft.bench.report import best_peer, text_table
from moegraft.bench.shapes import MODELS, ModelShape
from moegraft.cli import main
from moegraft.errors import MoegraftError

TINY = ModelShape("tiny", "tiny", 8, 32, 24, 2)


@pytest.fixture(scope="module")
def found() -> list[records.Record]:
    """Records of a real, tiny run, with the stored peers of another case beside them."""
    requests = [DecodeRequest(TINY, t, rank=4, live=2, slots=4) for t in (1, 4)]
    made = list(run_decode(requests, torch.device("cpu"), DecodeSettings(2, commit="abc")))
    for record in made:
        record["peers"] = peers_of("q30", record["tokens"], 16, 8, "separate", COPY_RATE)
    return made


def test_every_stored_figure_is_of_a_known_case() -> None:
    assert len(FIGURES) == len({(f.system, f.model, f.tokens, f.rank, f.adapters, f.kind, f.weights)
                                for f in FIGURES})  # fmt: skip
    for figure in FIGURES:
        assert figure.model in MODELS and figure.kind in (*KINDS, "unknown")
        assert figure.base_us or figure.lora_us
        if figure.base_us and figure.lora_us:
            assert figure.base_us < figure.lora_us
    assert VLLM_END_TO_END["no LoRA"][16] > VLLM_END_TO_END["8 adapters"][16]


def test_peers_are_those_of_the_same_case_at_this_copy_rate() -> None:
    peers = peers_of("q30", 64, 16, 8, "separate", COPY_RATE)
    assert {p["system"]: p["lora_us"] for p in peers if p["lora_us"]} == {
        "vLLM 0.33": 397,
        "SGLang 0.5.23": 332,
        "SGLang 0.5.23 virtual experts": 444,
    }
    assert peers_of("q30", 64, 16, 4, "separate", COPY_RATE) == []
    assert peers_of("q30", 1, 16, 4, "separate", COPY_RATE), "one token has one adapter anyway"
    assert scaled_us(100.0, 2 * COPY_RATE) == 50.0 and scaled_us(None, 1.0) is None


def test_records_come_back_as_they_were_written(
    tmp_path: Path, found: list[records.Record]
) -> None:
    path = tmp_path / "new" / "records.jsonl"
    path.parent.mkdir()
    path.write_text('{"model": "an older record"}\n\n')
    for record in found:
        records.append(path, record)
    assert records.read([path], records.DECODE) == json.loads(json.dumps(records.rounded(found)))
    assert found[0]["commit"] == "abc" and found[0]["versions"]["torch"]
    assert records.read([path], records.TUNE) == []
    assert records.rounded({"x": [1.2345678, 3]}) == {"x": [1.2346, 3]}


def test_bad_record_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\nnot json\n")
    with pytest.raises(MoegraftError, match=r"bad\.jsonl, line 2"):
        records.read([bad], records.DECODE)
    with pytest.raises(MoegraftError, match=r"none\.jsonl"):
        records.read([tmp_path / "none.jsonl"], records.DECODE)
    with pytest.raises(MoegraftError, match="can't be written"):
        records.append(bad / "below-a-file.jsonl", {})
    for text, message in (
        (b'{"schema": "moegraft.decode/1", "model": "m"}', r"line 1: the record lacks tokens"),
        (b"[" * 100_000, "line 1, is no JSON"),
        (b"\xff\xfe", "can't be read"),
    ):
        bad.write_bytes(text)
        with pytest.raises(MoegraftError, match=message):
            records.read([bad], records.DECODE)


def test_files_are_tried_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(harness, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(decode, "run_decode", lambda *args: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(MoegraftError, match="records can't be written"):
        commands.decode([], out=tmp_path / "file" / "records.jsonl")
    with pytest.raises(MoegraftError, match=r"must end in one of .*\.png"):
        commands.decode([], plot=tmp_path / "decode.abc")
    with pytest.raises(MoegraftError, match="must end in one of"):
        commands.plot_records([], Path(""))


def test_the_commit_is_asked_from_git(tmp_path: Path) -> None:
    assert records.git_commit(tmp_path) == "unknown"


def test_pictures_are_written(tmp_path: Path, found: list[records.Record]) -> None:
    pytest.importorskip("matplotlib")
    files = plot_layers(found, tmp_path / "pictures" / "tiny.png")
    assert [f.name for f in files] == ["tiny.png", "tiny-limit.png", "tiny-retention.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
    with pytest.raises(MoegraftError, match="nothing to draw"):
        plot_layers(found[:1], tmp_path / "one.png")
    with pytest.raises(MoegraftError, match="can't be written"):
        plot_layers(found, tmp_path / "tiny.abc")


def test_lines_hold_the_records_figures(found: list[records.Record]) -> None:
    first = found[0]
    ours = next(iter(first["modes"].values()))
    times = {c.label: c.points for c in time_curves(found)}
    assert times["moegraft LoRA"][1] == ours["us"] and times["vLLM 0.33"] == {1: 71, 4: 123}
    shares = {c.label: c.points for c in share_curves(found)}
    assert shares["vLLM 0.33"][1] == pytest.approx(100 * first["limit_us"]["lora"] / 71)
    kept = {c.label: c.points for c in kept_curves(found)}
    assert kept["vLLM 0.33"][1] == pytest.approx(100 * 31 / 71)
    assert kept["moegraft LoRA"][1] == pytest.approx(100 * ours["retention"])
    best = best_peer(first)
    assert best is not None and best["system"] == "SGLang 0.5.23"


def test_a_table_is_aligned() -> None:
    assert text_table(("a", "b"), [("xx", "1"), ("y", "22")]) == "a    b\n------\nxx   1\ny   22"


def run_both(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> list[tuple[int, str, str]]:
    """Run both command lines; returns exit code, stdout and stderr of each."""
    done = []
    for run in (lambda: main(["bench", *arguments]), lambda: module_cli.main(arguments)):
        code = run()
        printed = capsys.readouterr()
        done.append((code, printed.out, printed.err))
    return done


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for code, out, err in run_both(["decode", "--suite", "quick", "--json"], capsys):
        assert code == 2 and "no GPU here" in err and "no GPU here" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "q31"], "no model shape 'q31'"),
        (["--tokens", "1,-2"], "--tokens '1,-2'"),
        (["--modes", "fast"], "fast"),
        (["--adapters", "65"], "65 adapters can't be live in 64 slots"),
        (["--suite", "all"], "no suite 'all'"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_options_are_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, out, err in run_both(["decode", *arguments], capsys):
        assert code == 2 and message in err and not out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "mixed"], "no batch 'mixed'"),
        (["--tokens", "0"], "--tokens '0'"),
        (["--adapters", "9"], "9 adapters can't be live in 8 slots"),
        (["--suite", "all"], "no suite 'all'"),
        (["--repeats", "0"], "--repeats"),
        (["--suite", "quick"], "no GPU here"),
    ],
)
def test_wrong_options_of_prefill_are_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "quick" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for code, out, err in run_both(["prefill", *arguments], capsys):
        assert code == 2 and message in err and not out


def test_both_command_lines_measure_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "require_gpu", lambda: torch.device("cpu"))
    path = tmp_path / "prefill.jsonl"
    options = ["--model", "8,32,24,2", "--tokens", "24", "--rank", "4", "--adapters", "2",
               "--batch", "interleaved,base", "--repeats", "1", "--out", str(path)]  # fmt: skip
    for code, out, err in run_both(["prefill", *options, "--json"], capsys):
        document = json.loads(out)
        assert code == 0 and document["wrong"] == document["bars"] == []
        assert [r["batch"] for r in document["records"]] == ["interleaved", "base"]
        assert "T=24 rank=4" in err, "no progress was shown"
    for code, out, _ in run_both(["prefill", *options], capsys):
        assert code == 0 and "TFLOP/s" in out and "8x32x24x2" in out
    assert len(records.read([path], records.PREFILL)) == 8


def test_both_command_lines_draw_records(
    tmp_path: Path, found: list[records.Record], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "r.jsonl", tmp_path / "p.svg"
    for record in found:
        records.append(path, record)
    for code, out, _ in run_both(["plot", str(path), "--to", str(picture)], capsys):
        assert code == 0 and "tiny" in out and "p-limit.svg" in out
    assert picture.stat().st_size > 1000
    for code, out, _ in run_both(["plot", str(path), "--to", str(picture), "--json"], capsys):
        assert code == 0 and json.loads(out)["records"] == 2
    path.write_text("")
    for code, _, err in run_both(["plot", str(path), "--to", str(picture)], capsys):
        assert code == 2 and "no records" in err


def test_the_module_needs_neither_typer_nor_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it in a new process in which the command line's packages can't be imported."""
    import subprocess

    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'click', 'pydantic', 'matplotlib'): sys.modules[name]=None\n"
        "from moegraft.bench.__main__ import main\n"
        "from moegraft.bench.commands import progress\n"
        "with progress() as say: say('working')\n"
        "sys.exit(main(['decode', '--model', 'q31']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "working" in done.stderr and "'q31'" in done.stderr


def test_no_command_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "decode" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        module_cli.main([])
