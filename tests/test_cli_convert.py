"""``moegraft convert`` and ``moegraft merge``: documents, text, errors of one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from moegraft.cli import main

MODELS = tiny.FIXTURES / "models"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_convert_writes_what_inspect_binds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = MODELS / "mixtral"
    source = tiny.folder("per_expert/mixtral/plain")
    out = tmp_path / "out"
    code, text, _ = run(capsys, "convert", source, out, "--to", "peft", "--model", model, "--json")
    document = json.loads(text)
    assert code == 0 and document["exact"] and document["refit_error"] == {}
    assert document["tensors"] == {"read": 56, "written": 16}
    assert set(document["from"]) == {"per_expert", "linear"} and document["to"] == "peft"
    code, text, _ = run(capsys, "inspect", out, "--model", model)
    assert code == 0 and "peft_fused" in text and "binds in full" in text
    code, text, _ = run(
        capsys, "convert", out, tmp_path / "back", "--to", "per-expert", "--model", model
    )
    assert code == 0 and "56 tensors" in text and "the same delta for every expert" in text
    written = (tmp_path / "back" / "adapter_model.safetensors").read_bytes()
    assert b"block_sparse_moe.experts.3.w1.lora_A.weight" in written


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_parts_of_an_adapter_alone_are_written_and_the_rest_is_named(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, source = MODELS / "mixtral", tiny.folder("per_expert/mixtral/plain")
    out, only = tmp_path / "out", ("--only", "gate", "--only", "down", "--json")
    if command == "convert":
        call: tuple[object, ...] = (source, out, "--to", "per-expert", "--model", model)
    else:
        call = (model, source, out)
    code, text, _ = run(capsys, command, *call, *only)
    document = json.loads(text)
    assert code == 0 and len(document["left_out"]) == 6
    assert document["left_out"]["model.layers.0.mlp.experts"] == ["up"]
    if command == "convert":
        written = load_file(out / "adapter_model.safetensors")
        assert {name.split(".")[-3] for name in written} == {"w1", "w2"}
    else:
        assert {name.split(".")[-2] for name in document["changed"]} == {"w1", "w2"}
    code, text, _ = run(capsys, "inspect", source, "--model", model, *only)
    assert code == 0 and json.loads(text)["read_options"] == {"only": ["gate", "down"]}


def test_convert_says_the_error_of_a_refit_and_of_rounding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tail = ("--model", MODELS / "qwen3_moe", "--to")
    source = tiny.folder("peft/0.21.2/qwen3_moe/all_linear")
    code, text, _ = run(capsys, "convert", source, tmp_path / "a", *tail, "peft", "--rank", 2)
    assert code == 0 and "gate_up: rank 2, the delta is up to" in text and "not exact" in text
    source = tiny.folder("per_expert/qwen3_moe/rank_pattern_gate")
    code, text, _ = run(capsys, "convert", source, tmp_path / "b", *tail, "peft")
    assert code == 0 and "rounded in" in text and "but for rounding" in " ".join(text.split())


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_errors_are_one_line_and_write_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    model, adapter, out = MODELS / "qwen3_moe", tiny.folder(tiny.EXPERTS), tmp_path / "out"

    def error(source: Path, target: Path, folder: Path = model, to: str = "3d") -> str:
        arguments: tuple[object, ...] = (folder, source, target)
        if command == "convert":
            arguments = (source, target, "--to", to, "--model", folder)
        code, text, message = run(capsys, command, *arguments)
        last = message.splitlines()[-1]
        assert code == 2 and text == "" and last.startswith("error: ")
        assert not out.exists()
        return last

    assert "no adapter at" in error(tmp_path / "none", out)
    assert "exists already" in error(adapter, tmp_path)
    assert "bound 0 of 3" in error(tiny.folder("peft/0.21.2/qwen3_moe/embedding"), out)
    assert "no model folder" in error(adapter, out, tmp_path / "none")
    assert "GptOss" in error(adapter, out, MODELS / "gpt_oss")
    if command == "convert":
        assert "own for each expert" in error(adapter, out, to="shared-outer")
        assert "fused" in error(adapter, out, to="fused")


def test_a_packed_3d_file_for_a_model_that_interleaves_needs_the_callers_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, adapter = tiny.FIXTURES / "layouts/gpt_oss/distinct/stacked_w", tmp_path / "packed"
    tensors = load_file(source / "adapter_model.safetensors")
    for key in [key for key in tensors if ".w1." in key]:
        gate, up = tensors.pop(key), tensors.pop(key.replace(".w1.", ".w3."))
        packed = torch.cat([gate, up], 1) if "lora_B" in key else gate
        tensors[key.replace(".w1.", ".gate_up_proj.")] = packed
    tensors = {key.replace(".w2.", ".down_proj."): t for key, t in tensors.items()}
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    shutil.copy(source / "adapter_config.json", adapter)
    model = MODELS / "gpt_oss"
    code, _, message = run(capsys, "merge", model, adapter, tmp_path / "no")
    assert code == 2 and "--gate-up-rows" in message
    word = ("--gate-up-rows", "concatenated")
    assert run(capsys, "inspect", adapter, "--model", model, *word)[0] == 0
    assert run(capsys, "merge", model, adapter, tmp_path / "a", *word)[0] == 0
    assert run(capsys, "merge", model, source, tmp_path / "b")[0] == 0
    merged = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert merged[0] == merged[1]
    convert = ("convert", adapter, tmp_path / "c", "--to", "peft", "--model", model)
    assert run(capsys, *convert, *word)[0] == 0


def test_merge_writes_a_model_and_says_what_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("merge", MODELS / "gpt_oss", tiny.folder("peft/0.21.2/gpt_oss/experts"))
    code, text, _ = run(capsys, *arguments, tmp_path / "a", "--json")
    document = json.loads(text)
    assert code == 0 and document["files"] == ["model.safetensors"]
    assert len(document["changed"]) == 8 and document["tensors"] == 37
    code, text, _ = run(capsys, *arguments, tmp_path / "b")
    assert code == 0 and "8 of 37 tensors changed" in " ".join(text.split())
    skipped = (*arguments, tmp_path / "c", "--skip", "experts", "--json")
    document = json.loads(run(capsys, *skipped)[1])
    assert len(document["changed"]) == 4 and len(document["skipped"]) == 8
