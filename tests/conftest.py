"""Settings and fixtures for all tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from typing import get_args

# Without a GPU the kernels run in Triton's interpreter; it must be asked for before anything (torch
# and transformers do) imports triton.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

import compiled
import interpreter_dot
import moegraft.backends.cpu as cpu
from moegraft.backends import Choice

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    interpreter_dot.install()

# The tests run tiny problems in several processes: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(params=[*get_args(cpu.LoraMethod), "compiled"])
def lora_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one way to LoRA on the CPU for every batch size: a method on torch's operators, or the
    compiled kernels."""
    if request.param == "compiled":
        compiled.require()
        monkeypatch.setenv("MOEGRAFT_BACKEND", "cpp")
        return "compiled"
    choice = Choice(cpu.CpuStages(request.param), "serial", "forced by the test")
    monkeypatch.setenv("MOEGRAFT_BACKEND", "cpu")
    monkeypatch.setattr(cpu, "choose", lambda problem, mode: choice)
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def ranks_end_with_the_last_test() -> Iterator[None]:
    """Processes that tests share leave before what they measured is added up."""
    yield
    if "ranks" in sys.modules:
        sys.modules["ranks"].stop_shared()
