"""Tests inside a real vLLM on the CPU; run.sh makes their environment. Skipped without vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from models import Models
    from server import Server

if "vllm" not in packages_distributions():
    collect_ignore_glob = ["test_*.py"]
else:
    # One core each for vLLM's worker and for whoever asks it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    @pytest.fixture(scope="session")
    def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
        """The tiny model, its adapters and what they are merged into."""
        from models import Models  # needs PEFT, which the tests of single classes do without

        return Models(tmp_path_factory.mktemp("models"))

    @pytest.fixture(scope="module")
    def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        """A server with the plugin, with as many slots as half of the adapters."""
        from server import running_server

        log: Path = tmp_path_factory.mktemp("server") / "log.txt"
        with running_server(models.base, log) as server:
            yield server
