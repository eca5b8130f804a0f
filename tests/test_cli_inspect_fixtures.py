"""``moegraft inspect`` on every fixture: producer, layout, what binds; bad files in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from moegraft.cli import main
from tiny import FIXTURES

MODELS = FIXTURES / "models"
ADAPTERS = sorted(
    str(path.parent.relative_to(FIXTURES)) for path in FIXTURES.rglob("adapter_config.json")
)
#: PEFT 0.17, which wrote the per-expert files, leaves no version.
UNKNOWN = "unknown (PEFT before 0.18, or another program)"
#: Layout of a file under layouts/ -> (reader, producer).
LAYOUTS = {
    "peft": ("peft_fused", "PEFT 0.21.2"),
    "peft_swapped": ("peft_fused", "PEFT 0.19.0"),
    "unsloth_grouped": ("peft_fused", "Unsloth, with PEFT 0.21.2"),
    "unsloth_marked": ("peft_fused", "Unsloth, with PEFT 0.21.2"),
    "unsloth_rank_major": ("peft_fused", "Unsloth, with PEFT 0.21.2"),
    "per_expert": ("per_expert", UNKNOWN),
    "tinker_per_expert": ("per_expert", UNKNOWN),
    "mixed": ("per_expert, per_projection", UNKNOWN),
    "shared_2d": ("per_projection", "VeOmni"),
}
_STACKED = ("per_projection", UNKNOWN)


def expected(case: str) -> tuple[str, str, str]:
    """Model, reader of the experts ("" without any), producer."""
    parts = case.split("/")
    if parts[0] == "layouts":
        return (parts[1], *LAYOUTS.get(parts[3], _STACKED))
    if parts[0] == "veomni":
        return parts[1], "per_projection", "VeOmni"
    if parts[0] == "per_expert":
        return parts[1], "per_expert", UNKNOWN
    experts = any(".experts." in key for key in tiny.tensors_of(case))
    return parts[2], "peft_fused" if experts else "", f"PEFT {parts[1]}"


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and stdout."""
    code = main(["inspect", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_every_fixture_is_inspected() -> None:
    assert len(ADAPTERS) == len(tiny.ALL_CASES) + 44


@pytest.mark.parametrize("case", ADAPTERS)
def test_every_fixture_shows_producer_layout_and_what_binds(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, reader, producer = expected(case)
    arguments = (FIXTURES / case, "--model", MODELS / model)
    code, text = inspect(capsys, *arguments, "--json")
    document = json.loads(text)
    report = document["binding"]["report"]
    assert document["config"]["producer"] == report["producer"] == producer
    refused = case in tiny.REFUSED_CASES
    assert (code, document["binding"]["binds"]) == ((2, False) if refused else (0, True))
    assert report["bound"] + len(report["refused"]) == report["total"]
    layouts = sorted(set(report["layouts"]) - {"linear", "linear_vectors"})
    if not refused:
        assert ", ".join(layouts) == reader
        places = {cover["place"] for cover in document["binding"]["coverage"]}
        assert places and all(place.startswith("model.layers.") for place in places)
    code, text = inspect(capsys, *arguments)
    words = " ".join(text.split())
    assert f"producer {producer}" in words
    assert all(f"{name}: " in words for name in report["layouts"])
    assert f"{report['bound']} of {report['total']} tensors can be bound" in words
    assert ("the adapter binds in full" in words) != refused


@pytest.mark.parametrize("case", [case for case in ADAPTERS if case.startswith("layouts/")])
def test_without_a_model_the_layout_is_guessed_from_the_file(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = inspect(capsys, FIXTURES / case)
    words = " ".join(text.split())
    reader = expected(case)[1]
    guesses = {
        "peft_fused": "fused experts: 2 wrapped parameters",
        "per_expert": "one factor pair per expert",
        "per_projection": "one factor pair per projection",
    }
    assert code == 0
    for name, guess in guesses.items():
        assert (guess in words) == (name in reader.split(", "))


def _config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return rewrite


def _only(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors.clear()
    tensors[name] = torch.ones(2, 2)


KEY = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: What is done to a good folder -> words of the reason.
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no adapter at"),
    "no config": (lambda f: (f / CONFIG).unlink(), "is missing"),
    "pickle": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "is a pickle file"),
    "damaged": (lambda f: (f / WEIGHTS).write_bytes(b"nothing"), "not a readable safetensors file"),
    "no json": (lambda f: (f / CONFIG).write_text("{"), "adapter_config.json"),
    "other method": (_config(peft_type="IA3"), "only LORA adapters"),
    "other maths": (_config(use_qalora=True), "use_qalora"),
    "nan": (_tensors(lambda t: t[KEY].fill_(torch.nan)), "NaN or infinite"),
    "dtype": (_tensors(lambda t: t.update({KEY: t[KEY].long()})), "must be float32"),
    "no factor": (_tensors(lambda t: _only(t, "x")), "is a LoRA factor"),
    "half a pair": (_tensors(lambda t: t.pop(KEY)), "partner"),
    "shape": (_tensors(lambda t: t.update({KEY: torch.ones(12, 7)})), "do not fit down"),
    "name": (_tensors(lambda t: t.update({"model.x.lora_A": torch.ones(3, 2)})), "no such module"),
    "full tensor": (_tensors(lambda t: t.update({"lm_head.weight": torch.ones(2)})), "full tensor"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_gives_one_line(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(tiny.folder(tiny.EXPERTS), folder)
    change, words = BAD[kind]
    change(folder)
    code = main(["inspect", str(folder), "--model", str(MODELS / "qwen3_moe"), "--json"])
    captured = capsys.readouterr()
    reason = json.loads(captured.out)["error"]
    assert code == 2 and words in reason and "\n" not in reason
    assert "Traceback" not in captured.err
