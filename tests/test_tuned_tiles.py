"""Tables of tuned tiles: what is in them is used when it is right, and never stops a layer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from moegraft.backends.triton import tuned_tiles
from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.device import DeviceFacts
from moegraft.backends.triton.tiles import choose_config
from moegraft.problem import Problem

NAME = "Test GPU 9"
DEVICE = DeviceFacts(NAME, 90, 132, 232_448)
PROBLEM = Problem(64, 8, 128, 2048, 768, True, "bfloat16", "unquantized", "cuda", 16)
TUNED = FusedConfig(16, GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3), delta_programs=99)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuned_tiles, "FOLDER", tmp_path)
    tuned_tiles.load_tuned.cache_clear()
    yield tmp_path
    tuned_tiles.load_tuned.cache_clear()


def entry(config: FusedConfig = TUNED, **changes: Any) -> dict[str, Any]:
    return {"problem": asdict(replace(PROBLEM, **changes)), "config": asdict(config)}


def write(folder: Path, entries: Any, device: str = NAME) -> None:
    text = json.dumps({"device": device, "entries": entries})
    (folder / "test-gpu-9.json").write_text(text)


def test_the_nearest_entry_of_the_shape_is_used(folder: Path) -> None:
    other = replace(TUNED, delta_programs=7)
    write(folder, [entry(other, num_tokens=100), entry(), entry(other, hidden=4096)])
    assert choose_config(PROBLEM, DEVICE) == (TUNED, "tiles tuned for T=64")
    assert choose_config(replace(PROBLEM, num_tokens=120), DEVICE)[0] == other
    assert choose_config(replace(PROBLEM, num_tokens=256), DEVICE)[1] == "tiles by rule"
    assert choose_config(replace(PROBLEM, top_k=4), DEVICE)[1] == "tiles by rule"


def test_an_entry_that_does_not_fit_the_device_is_not_used(folder: Path) -> None:
    write(folder, [entry(replace(TUNED, gate_up=GemmConfig(256, 256, 4, 6)))])
    assert choose_config(PROBLEM, DEVICE)[1] == "tiles by rule"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"device": "Test GPU 9", "entr',
        b"[1]",
        b"{}",
        b"\xff",
        b'{"device": "Other", "entries": []}',
        b'{"device": "Test GPU 9", "entries": 3}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_table_is_named_once_and_the_rules_stand_in(
    folder: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (folder / "test-gpu-9.json").write_bytes(content)
    with caplog.at_level(logging.WARNING, "moegraft"):
        for _ in range(2):
            assert choose_config(PROBLEM, DEVICE)[1] == "tiles by rule"
    assert [record.getMessage().count("test-gpu-9.json") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"block_m": 48},
        {"block_m": 0},
        {"merged": 1},
        {"delta_programs": -1},
        {"unknown": 1},
        {"gate_up": {"block_n": "64", "block_k": 64, "num_warps": 4, "num_stages": 3}},
        {"gate_up": {"block_n": 48, "block_k": 64, "num_warps": 4, "num_stages": 3}},
        {"gate_up": 3},
    ],
)
def test_a_bad_entry_is_left_out_and_the_others_are_used(
    folder: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    bad = entry()
    bad["config"].update(change)
    no_tokens = entry(num_tokens=0)
    write(folder, [bad, no_tokens, {}, 3, entry(num_tokens=70)])
    with caplog.at_level(logging.WARNING, "moegraft"):
        assert choose_config(PROBLEM, DEVICE) == (TUNED, "tiles tuned for T=70")
    assert len(caplog.records) == 4
