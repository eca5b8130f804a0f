"""``--adapter-root``: commands read no adapter outside of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moegraft.cli import main
from test_cli import MODELS, PEFT, run_error, run_json

MODEL = MODELS / "qwen3_moe"
REFUSED = "is outside of the folder that adapters may be read from"


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A root with an adapter ``a`` and a link ``out`` to one outside, ``b``."""
    for folder in ("root/a", "b"):
        shutil.copytree(PEFT / "qwen3_moe" / "experts", tmp_path / folder)
    (tmp_path / "root" / "out").symlink_to(tmp_path / "b")
    return tmp_path / "root"


def arguments_of(command: str, adapter: Path, root: Path) -> list[object]:
    """The command line of a command that reads an adapter."""
    out = root.parent / f"{command}-of-{adapter.name}"
    given: dict[str, list[object]] = {
        "inspect": [adapter, "--model", MODEL],
        "convert": [adapter, out, "--model", MODEL, "--to", "per-expert"],
        "merge": [MODEL, adapter, out],
    }
    return [command, *given[command], "--adapter-root", root]


@pytest.mark.parametrize("command", ["inspect", "convert", "merge"])
def test_a_command_reads_inside_its_root_alone(
    command: str, adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run_json(capsys, *arguments_of(command, adapters / "a", adapters))
    assert code == 0 and "error" not in document
    for path in (adapters / "out", adapters.parent / "b", adapters / ".." / "b"):
        assert REFUSED in run_error(capsys, *arguments_of(command, path, adapters))


def test_generate_refuses_an_adapter_outside_of_its_root_before_the_model_is_read(
    adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = Path(__file__).parents[1] / "demo"
    command = ["generate", "--model", demo / "model", "--prompt", "kjv:In", "--max-new-tokens", "1"]
    inside = ["--adapter", f"kjv={demo / 'adapters' / 'kjv'}", "--adapter-root", demo]
    assert main([*map(str, [*command, *inside])]) == 0
    capsys.readouterr()
    outside = ["--adapter", f"kjv={demo / 'adapters' / 'kjv'}", "--adapter-root", adapters]
    assert REFUSED in run_error(capsys, *command, *outside)
    assert "is no folder" in run_error(capsys, *command, *inside[:2], "--adapter-root", "/nowhere")
