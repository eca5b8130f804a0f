"""``moegraft quantize``: documents, text, errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegraft.cli import main
from quantised_models import check_served, make_model, rounded, save


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_moe", "nvfp4"), ("gpt_oss", "mxfp4"), ("mixtral", "fp8-block")]
)
def test_the_command_writes_a_checkpoint_that_is_served(
    model_type: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = save(make_model(model_type), tmp_path / "plain")
    arguments = ["quantize", str(plain), str(tmp_path / "q"), "--format", name]
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == name and document["matrices"] in (16, 24)
    assert document["expert_bytes"]["after"] < 0.3 * document["expert_bytes"]["before"]
    stored = "fp8-block-w8a16" if name == "fp8-block" else None
    check_served(tmp_path / "q", rounded(make_model(model_type), name), stored)
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*arguments[:-1], "nvfp4-w4a4"]) == 2
    assert "Blackwell" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path / "text"), "--format", name]) == 0
    assert "matrices, |W' - W|" in capsys.readouterr().out
