"""``import moegraft``: cheap, quiet about everything but a bad setting, and complete."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import moegraft


def in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("module", ["moegraft", "moegraft.cli.app"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    done = in_a_new_process(f"import sys, {module}; print(*sys.modules)")
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "numpy", "safetensors", "transformers", "peft", "pydantic"}


def test_layers_and_ops_on_a_cpu_run_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # importing it is an error
from dataclasses import replace
from moegraft import ops
from moegraft.testing import assert_case, layer_case, random_factors
case = layer_case(5, (), (0, -1), num_experts=4, hidden=32, intermediate=16)
case = replace(case, adapters=(random_factors(case.site, 4),))
assert_case(case, case.layer())
routing, w = case.routing, case.weights
packed = ops.pack_topk(routing.topk_ids, routing.topk_weights)
rows = ops.routed_moe_lora(packed, case.x, w.gate_up, w.down, do_finalize=False)
ops.finalize_moe_lora(*rows)
print("ran")
"""
    done = in_a_new_process(code, TRITON_INTERPRET="")
    assert done.stdout == "ran\n"


def test_every_public_name_is_there() -> None:
    for name in moegraft.__all__:
        assert getattr(moegraft, name) is not None
    assert set(moegraft.__all__) <= set(dir(moegraft))
    assert moegraft.ReadOptions is moegraft.ReadOptions
    with pytest.raises(AttributeError, match="'no_such_name'"):
        moegraft.no_such_name  # noqa: B018


def test_a_bad_log_level_is_a_warning_not_an_error() -> None:
    code = "import moegraft, logging; print(logging.getLogger('moegraft').level)"
    done = in_a_new_process(code, MOEGRAFT_LOG="loud")
    assert done.stdout.strip() == "30"
    assert "MOEGRAFT_LOG='LOUD' is not a logging level" in done.stderr
    assert in_a_new_process(code, MOEGRAFT_LOG="").stderr == ""
