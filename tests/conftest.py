"""Settings and fixtures for all tests."""

from __future__ import annotations

import pytest
import torch

import moegraft.backends.cpu as cpu

# The tests run tiny problems in several processes: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(params=["gathered", "segments"])
def lora_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one LoRA method of the CPU backend for every batch size."""
    monkeypatch.setattr(cpu, "MAX_GATHERED_ROWS", 10**9 if request.param == "gathered" else -1)
    return str(request.param)
