"""SGLang's own loading of plugins: the entry point, its list of plugins, the off switch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = """
import logging
logging.basicConfig(level=logging.INFO)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
print("HOOKED", sorted(HookRegistry._patched))
"""


def loaded(**variables: str) -> str:
    """What a process says in which SGLang loads its plugins."""
    result = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return result.stdout + result.stderr


def test_sglang_finds_the_plugin_and_applies_every_hook() -> None:
    from moegraft.hosts.sglang.seams import SEAMS

    text = loaded()
    assert f"HOOKED {sorted(SEAMS)}" in text
    active = "moegraft is active: MoE layers{} with LoRA run on it."
    assert active.format(" and their models' linears") in text and "Failed" not in text
    assert active.format("") in loaded(MOEGRAFT_SGLANG_LINEARS="0")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"MOEGRAFT_SGLANG": "0"}, "moegraft is not active: MOEGRAFT_SGLANG=0 switches it off."),
        ({"SGLANG_PLUGINS": "another"}, "Skipping plugin moegraft"),
    ],
)
def test_it_is_switched_off(variables: dict[str, str], line: str) -> None:
    text = loaded(**variables)
    assert line in text and "HOOKED []" in text
