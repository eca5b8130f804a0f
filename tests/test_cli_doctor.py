"""``moegraft doctor``."""

from __future__ import annotations

import json

import pytest
import torch

from moegraft._version import __version__
from moegraft.backends.cuda import compiler
from moegraft.cli import doctor, machine, main


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = main(["doctor", "--json"]), json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["versions"]["moegraft"] == __version__
    assert document["versions"]["torch"] == torch.__version__
    assert document["cpu"]["cores"] >= 1
    plans = {(p["device"], p["dtype"], p["phase"]): p for p in document["plans"]}
    assert plans["cpu", "float32", "decode"]["backend"] in ("cpp", "cpu")
    assert plans["cpu", "bfloat16", "prefill"]["reasons"]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "transformers" in text and "prefill" in text and "Problems" in text


def test_doctor_reports_an_impossible_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGRAFT_BACKEND", "abacus")
    code, document = main(["doctor", "--json"]), json.loads(capsys.readouterr().out)
    assert code == 0
    assert all(plan["backend"] is None for plan in document["plans"])
    assert "abacus" in document["plans"][0]["reasons"][0]
    problems = " ".join(entry["problem"] for entry in document["problems"])
    assert "MOEGRAFT_BACKEND=abacus" in problems and "no backend" in problems


def test_doctor_reports_a_bad_log_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGRAFT_LOG", "loud")
    code, document = main(["doctor", "--json"]), json.loads(capsys.readouterr().out)
    assert code == 0
    assert any("MOEGRAFT_LOG='LOUD'" in entry["problem"] for entry in document["problems"])


def test_doctor_knows_old_and_missing_packages() -> None:
    document = {
        "versions": {"torch": "2.1.0+cpu", "transformers": None, "peft": None, "triton": None},
        "cpu": {
            "fast_bfloat16": False,
            "cores": 2,
            "torch_threads": 8,
            "compiled_kernels": {"instructions": None, "why_not": "no C++ compiler"},
        },
        "cuda": [{"name": "gpu"}],
        "plans": [],
    }
    found = {entry["problem"]: entry["remedy"] for entry in doctor.find_problems(document)}
    text = " ".join(found)
    for part in (
        "torch 2.1.0+cpu is older",
        "transformers is not",
        "peft is not",
        "triton",
        "8",
        "no C++",
    ):
        assert part in text
    assert all(found.values())


@pytest.mark.parametrize("why_not", [None, "There is no NVRTC (libnvrtc.so.13 or .12) here."])
def test_doctor_says_whether_a_hopper_has_its_prefill_kernels(
    why_not: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"name": "NVIDIA H200", "index": 0, "memory_bytes": 2**37, "capability": "9.0"}
    monkeypatch.setattr(machine, "cuda_devices", lambda: [gpu])
    monkeypatch.setattr(doctor, "_plans", lambda devices: [])
    monkeypatch.setattr(compiler, "why_no_compiler", lambda: why_not)
    monkeypatch.setattr(compiler, "compiler_version", lambda: (13, 0))
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cuda_compiler"]["nvrtc"] == (None if why_not else "13.0")
    problems = " ".join(entry["problem"] for entry in document["problems"])
    assert ("no compiled prefill kernels (There is no NVRTC" in problems) == bool(why_not)
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"compiled prefill kernels: {'none' if why_not else 'NVRTC 13.0'}" in text
    monkeypatch.setattr(machine, "cuda_devices", lambda: [{**gpu, "capability": "10.0"}])
    assert main(["doctor"]) == 0
    assert "prefill kernels" not in capsys.readouterr().out, "these are Hopper's alone"
