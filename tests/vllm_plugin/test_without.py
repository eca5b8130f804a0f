"""vLLM without the plugin: what the tests here ask of it is beyond it, and the switches work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import BASE, Models
from server import running_server

_CLASSES = """
import logging
logging.basicConfig(level=logging.INFO)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.lora import utils
print("OURS" if any("moegraft" in c.__module__ for c in utils._all_lora_classes) else "STOCK")
"""


def test_without_the_plugin_the_same_requests_fail(models: Models, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with running_server(models.base, log, env={"VLLM_PLUGINS": ""}, extension=False) as server:
        # Of the layouts only attention is read without a flag that excludes the others ..
        refused = {
            name: server.load(name, models.adapter(name))
            for name in ("fused", "half", "shared_outer")
        }
        assert all(answer.status >= 400 for answer in refused.values()), refused
        assert server.load("attention", models.adapter("attention")).status == 200
        # .. and the first request ends the engine, be it for an adapter or for the base.
        assert server.complete("attention", [5, 6, 7], 2).status >= 500
        assert server.complete(BASE, [5, 6, 7], 2).status in (0, 500)
    assert "moegraft is active" not in log.read_text()


def test_what_does_not_apply_is_left_to_vllm_with_one_line(models: Models, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with running_server(models.base, log, "--lora-dtype", "bfloat16") as server:
        (counts,) = server.counters()
        assert (counts["expert_layers"], counts["expert_layers_left"]) == (0, 2)
        assert (counts["linear_layers"], counts["linear_layers_left"]) == (6, 0)
    lines = [line for line in log.read_text().splitlines() if "moegraft leaves" in line]
    assert len(lines) == 1, lines
    assert "experts to vLLM, at model.layers.0.mlp.experts" in lines[0]
    assert "adapters are kept as torch.bfloat16, the weights are torch.float32." in lines[0]


@pytest.mark.parametrize(
    ("env", "wanted", "line"),
    [
        ({}, "OURS", "moegraft is active: MoE layers and linears with LoRA run on it."),
        ({"MOEGRAFT_VLLM": "0"}, "STOCK", "moegraft is not active: MOEGRAFT_VLLM=0"),
        ({"MOEGRAFT_VLLM": "maybe"}, "STOCK", "is not a switch; use 0 or 1"),
        ({"MOEGRAFT_VLLM_LINEARS": "0"}, "OURS", "active: MoE layers with LoRA run on it."),
        ({"VLLM_PLUGINS": "another"}, "STOCK", ""),
        ({"VLLM_PLUGINS": "moegraft"}, "OURS", "moegraft is active"),
    ],
    ids=str,
)
def test_the_switches(env: dict[str, str], wanted: str, line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CLASSES],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == wanted
    said = done.stdout + done.stderr
    assert line in said
    assert line or "moegraft" not in said


_NO_SERVER = """
import logging, sys
logging.basicConfig(level=logging.INFO)
sys.modules["vllm.entrypoints.openai.models.serving"] = None  # can't be imported
from vllm.plugins import load_general_plugins
load_general_plugins()
"""


def test_where_the_http_server_can_not_be_imported_the_layers_are_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_SERVER], capture_output=True, text=True, check=True
    )
    assert "moegraft is active" in done.stdout + done.stderr
