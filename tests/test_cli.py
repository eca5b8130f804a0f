"""The command line without models: entry point, errors, inspect, doctor."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moegraft._version import __version__
from moegraft.cli import main, output

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = FIXTURES / "models"
PEFT = FIXTURES / "peft" / "0.21.2"
PER_EXPERT = FIXTURES / "per_expert"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """Run with --json; stdout must be one document and nothing else."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def run_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run what must fail; return its one message, which --json repeats on stdout."""
    assert main([*map(str, arguments)]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    assert main([*map(str, arguments), "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": message.removeprefix("error: ")}
    assert "Traceback" not in captured.err
    return message


def test_entry_point_prints_version_and_help() -> None:
    script = Path(sys.executable).parent / "moegraft"
    command = [str(script)] if script.exists() else [sys.executable, "-m", "moegraft.cli"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"moegraft {__version__}\n", "")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert all(command in text for command in ("demo", "generate", "inspect", "doctor"))


def test_missing_typer_says_how_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_typer(name: str, *rest: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *rest, **kwargs)

    for name in [n for n in sys.modules if n.startswith("moegraft.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_typer)
    assert main(["doctor", "--json"]) == 2
    captured = capsys.readouterr()
    message = json.loads(captured.out)["error"]
    assert "pip install -e '.[cli]'" in message and "clone" in message
    assert captured.err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["inspect"], "Missing argument"),
        (["doctor", "--frob"], "--frob"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["demo", "--max-new-tokens", "many"], "--max-new-tokens"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    message = run_error(capsys, *arguments)
    assert part in message and "--help" in message


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert output.visible("a\x1b[31mb\n\tc\u00e9") == "a\\x1b[31mb\n\tc\u00e9"


def test_inspect_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    folder = PEFT / "qwen3_moe" / "patterns"
    code, document = run_json(capsys, "inspect", folder)
    assert code == 0 and "binding" not in document
    config = document["config"]
    assert (config["producer"], config["r"], config["lora_alpha"]) == ("PEFT 0.21.2", 3, 6)
    assert config["rank_pattern"]["q_proj"] == 6
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert sum(group["count"] for group in document["tensors"]) == 16
    assert {group["kind"] for group in document["tensors"]} == {"lora_A", "lora_B"}
    guesses = " / ".join(document["guesses"])
    assert "2 layers" in guesses and "4 experts" in guesses
    assert "hidden size 24, experts' size 16; orientation normal" in guesses
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "PEFT 0.21.2" in text and "mlp.experts" in text and "[12, 24]" in text


def test_inspect_guesses_swapped_orientation(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_json(capsys, "inspect", FIXTURES / "peft/0.18.0/qwen3_moe/experts")
    assert any("orientation swapped" in guess for guess in document["guesses"])


def test_inspect_guesses_per_expert(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_json(capsys, "inspect", PER_EXPERT / "qwen3_moe" / "subset")
    assert any("2 experts" in g and "at least 3" in g for g in document["guesses"])


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_inspect_with_only_a_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    shutil.copy(MODELS / model / "config.json", tmp_path)
    code, document = run_json(capsys, "inspect", PEFT / model / "experts", "--model", tmp_path)
    binding = document["binding"]
    report = binding["report"]
    assert code == 0 and binding["binds"] and "error" not in document
    assert report["bound"] == report["total"] > 0 and not report["refused"]
    assert set(report["layouts"]) == {"peft_fused", "linear"}
    down = next(c for c in binding["coverage"] if c["place"].endswith("experts down"))
    assert (down["layers_text"], down["experts_text"]) == ("2/2", "4/4")
    assert (down["ranks"], down["scales"]) == ([3], [2.0])
    memory = binding["memory"]
    assert memory["num_bytes"] == memory["kinds"]["experts"] + memory["kinds"]["linear"] > 0
    assert memory["dtype"] == "float32"


def test_inspect_shows_partial_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = PER_EXPERT / "mixtral" / "subset", MODELS / "mixtral"
    _, document = run_json(capsys, "inspect", folder, "--model", model)
    assert {c["experts_text"] for c in document["binding"]["coverage"]} == {"2/4"}
    assert main(["inspect", str(folder), "--model", str(model)]) == 0
    captured = capsys.readouterr()
    assert "2/4" in captured.out and "binds in full" in captured.out
    assert re.search(r"In the bank it takes [\d,]+ bytes \(float32\)", captured.out)
    assert "Loading weights" not in captured.err


def test_inspect_prints_the_whole_report_of_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("inspect", PEFT / "qwen3_moe" / "modules_to_save", "--model", MODELS / "qwen3_moe")
    code, document = run_json(capsys, *arguments)
    assert code == 2 and "lm_head" in document["error"] and document["binding"]["memory"] is None
    assert 0 < document["binding"]["report"]["bound"] < document["binding"]["report"]["total"]
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert (
        "Refused" in captured.out
        and "modules_to_save" in captured.out
        and "lm_head" in captured.out
    )
    assert "would be refused" in captured.out


def test_inspect_counts_in_words_and_per_projection(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused = PEFT / "qwen3_moe" / "modules_to_save"
    assert main(["inspect", str(refused), "--model", str(MODELS / "qwen3_moe")]) == 2
    assert "1 tensor: it is a full tensor" in capsys.readouterr().out
    source = PER_EXPERT / "qwen3_moe" / "plain"
    shutil.copy(source / "adapter_config.json", tmp_path)
    tensors = load_file(source / "adapter_model.safetensors")
    kept = {k: t for k, t in tensors.items() if not re.search(r"experts\.[13]\.down_proj", k)}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    _, document = run_json(capsys, "inspect", tmp_path, "--model", MODELS / "qwen3_moe")
    found = {c["place"].split()[-1]: c["experts_text"] for c in document["binding"]["coverage"]}
    assert (found["gate"], found["up"], found["down"]) == ("4/4", "4/4", "2/4")


def test_inspect_reads_as_the_options_say(capsys: pytest.CaptureFixture[str]) -> None:
    dora = ("inspect", PEFT / "qwen3_moe" / "dora_attention", "--model", MODELS / "qwen3_moe")
    assert main([*map(str, dora), "--skip", "lora_magnitude_vector"]) == 2
    assert "--skip" not in capsys.readouterr().out
    full = ("inspect", PEFT / "qwen3_moe" / "modules_to_save", "--model", MODELS / "qwen3_moe")
    _, document = run_json(capsys, *full)
    assert "--skip" in document["error"] and "--skip" in document["binding"]["hint"]
    assert main([*map(str, full)]) == 2
    assert "--skip 'REGEX'" in capsys.readouterr().out
    code, document = run_json(capsys, *full, "--skip", "no_such", "--skip", "lm_head")
    report = document["binding"]["report"]
    assert code == 0 and len(report["skipped"]) == report["total"] - report["bound"] > 0
    assert document["read_options"] == {"skip": ["no_such", "lm_head"]}
    assert main([*map(str, full), "--skip", "no_such", "--skip", "lm_head"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Skipped 1 tensor" in text and "binds without what was skipped" in text
    assert "skip 'no_such' matches no tensor's name" in text
    experts = ("inspect", PEFT / "qwen3_moe" / "experts", "--model", MODELS / "qwen3_moe")
    layout = ("--expert-b-layout", "grouped_by_expert", "--orientation", "normal")
    _, document = run_json(capsys, *experts, *layout)
    assert "grouped_by_expert (by option)" in document["binding"]["report"]["layouts"]["peft_fused"]


def test_inspect_options_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = PEFT / "qwen3_moe" / "experts"
    assert "need --model" in run_error(capsys, "inspect", adapter, "--skip", "x")
    assert "not a regular" in run_error(capsys, "inspect", adapter, "--skip", "(")
    assert "sideways" in run_error(capsys, "inspect", adapter, "--orientation", "sideways")


def test_inspect_on_the_wrong_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(
        capsys, "inspect", PEFT / "gpt_oss" / "experts", "--model", MODELS / "qwen3_moe"
    )
    assert code == 2 and not document["binding"]["binds"]
    assert document["binding"]["report"]["refused"]


def test_inspect_finds_nothing_to_bind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = PEFT / "qwen3_moe" / "experts"
    shutil.copy(source / "adapter_config.json", tmp_path)
    tensors = load_file(source / "adapter_model.safetensors")
    renamed = {key.replace("layers", "blocks"): value for key, value in tensors.items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    command = ("inspect", tmp_path, "--model", MODELS / "qwen3_moe")
    code, document = run_json(capsys, *command)
    assert code == 2 and "bound 0 of 16" in document["error"]
    assert main([*map(str, command)]) == 2
    text = capsys.readouterr().out
    assert "Was it trained for another model?" in text and "--skip" not in text
    assert "0 of 16 tensors can be bound: " in " ".join(text.split())
    embedding = ("inspect", PEFT / "qwen3_moe" / "embedding", "--model", MODELS / "qwen3_moe")
    assert main([*map(str, embedding)]) == 2
    text = capsys.readouterr().out
    assert "LoRA on embeddings" in text and "another model" not in text


def test_inspect_missing_paths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no adapter at" in run_error(capsys, "inspect", tmp_path / "none")
    adapter = PEFT / "qwen3_moe" / "experts"
    assert "no model folder" in run_error(capsys, "inspect", adapter, "--model", tmp_path / "none")
    assert "no config.json" in run_error(capsys, "inspect", adapter, "--model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "no_such_model" in run_error(capsys, "inspect", adapter, "--model", tmp_path)


def test_inspect_names_the_adapters_inside_a_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = run_error(capsys, "inspect", PEFT / "gpt_oss")
    assert "adapters inside" in message and str(PEFT / "gpt_oss" / "experts") in message


def test_inspect_lists_projections_in_order_and_marks_routers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    router = ("inspect", PEFT / "qwen3_moe" / "router", "--model", MODELS / "qwen3_moe")
    _, document = run_json(capsys, *router)
    places = [c["place"].split(".")[-1] for c in document["binding"]["coverage"]]
    assert places == ["experts gate", "experts up", "experts down", "gate (router)"]
    per_expert = ("inspect", PER_EXPERT / "qwen3_moe" / "plain", "--model", MODELS / "qwen3_moe")
    _, document = run_json(capsys, *per_expert)
    places = [c["place"].split(".")[-1] for c in document["binding"]["coverage"]]
    assert [p for p in places if "experts" in p] == ["experts gate", "experts up", "experts down"]


def test_inspect_refuses_pickle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "pickle" in run_error(capsys, "inspect", tmp_path)


def test_inspect_refuses_nan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = PEFT / "qwen3_moe" / "experts"
    shutil.copy(source / "adapter_config.json", tmp_path)
    tensors = load_file(source / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    message = run_error(capsys, "inspect", tmp_path, "--model", MODELS / "qwen3_moe")
    assert "NaN" in message and name in message
