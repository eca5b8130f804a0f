"""The plan says what it takes and why, and refuses with the reason before any forward."""

from __future__ import annotations

import gc
import logging
import re
from dataclasses import replace
from weakref import ref

import pytest
import torch

import compiled
import moegraft.backends.cpp as cpp
from moegraft import processor
from moegraft.backends import BACKENDS
from moegraft.backends.cpp.build import BuildError
from moegraft.backends.cpp.library import best_library
from moegraft.backends.cpu import CpuStages
from moegraft.backends.cpu.grouped import ALL_ROWS
from moegraft.env import configure_logging, forced_backend, log_level
from moegraft.errors import MoegraftError, PlanError
from moegraft.factor_table import site_table
from moegraft.layer import MAX_PLANS, MoeLoraLayer
from moegraft.linear import LinearLora
from moegraft.plan import make_plan
from moegraft.problem import Problem
from moegraft.sites import linear_site
from moegraft.testing import random_weights

PROBLEM = Problem(
    num_tokens=7,
    top_k=2,
    num_experts=5,
    hidden=24,
    intermediate=20,
    gated=True,
    dtype="bfloat16",
    weight_format="unquantized",
    device_type="cpu",
)


@pytest.fixture(autouse=True)
def _no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler: so the reasons are the same everywhere."""
    monkeypatch.delenv("MOEGRAFT_BACKEND", raising=False)
    monkeypatch.setattr(cpp, "best_library", lambda: BuildError("no C++ compiler"))


def test_a_problem_describes_a_layer_call() -> None:
    weights = random_weights(5, 24, 20, dtype=torch.bfloat16)
    assert Problem.of(weights, 7, 2) == PROBLEM
    assert PROBLEM.num_pairs == 14
    linear = Problem.of_linear("float32", "cpu", 3, 8, 6)
    assert (linear.num_pairs, linear.hidden, linear.intermediate, linear.gated) == (3, 8, 6, False)


def test_the_plan_of_a_cpu_problem_says_why() -> None:
    plan = make_plan(PROBLEM)
    assert (plan.backend, plan.problem) == ("cpu", PROBLEM)
    assert plan.reasons[:2] == (
        "cpp: no compiled kernels: no C++ compiler",
        "cpu: first that can run it",
    )
    assert any("LoRA" in reason and "14 rows" in reason for reason in plan.reasons)
    many = make_plan(replace(PROBLEM, num_tokens=1000))
    assert any("segments" in reason and "2000 rows" in reason for reason in many.reasons)


def test_the_plan_takes_compiled_kernels_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled.require()
    monkeypatch.setattr(cpp, "best_library", best_library)
    plan = make_plan(PROBLEM)
    assert plan.backend == "cpp" and plan.run is not None
    assert plan.reasons[0] == "cpp: first that can run it"
    assert re.match(
        "compiled for .*: bfloat16 (by bfloat16 instructions|widened to fp32)", plan.reasons[1]
    )
    for changes, reason in (
        ({"activation": "custom"}, "activation 'custom' is a Python function"),
        ({"post_norm": True}, "the norm behind the experts"),
    ):
        other = make_plan(replace(PROBLEM, **changes))  # type: ignore[arg-type]
        assert other.backend == "cpu" and reason in other.reasons[0]
        with pytest.raises(PlanError, match=reason):
            make_plan(replace(PROBLEM, **changes), "cpp")  # type: ignore[arg-type]


def test_amx_takes_the_base_of_many_rows_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.require()
    monkeypatch.setattr(cpp, "best_library", best_library)
    many = replace(PROBLEM, num_tokens=160)
    assert make_plan(many).run is not None or "amx_bf16" in processor.flags()
    monkeypatch.setattr(processor, "flags", lambda: frozenset({"amx_bf16"}))
    plan = make_plan(many)
    assert plan.backend == "cpp" and plan.run is None
    assert "AMX (64 rows per expert >= 64)" in plan.reasons[1]
    assert isinstance(plan.stages, CpuStages) and plan.stages.own_dtype_rows == ALL_ROWS
    assert make_plan(replace(many, num_tokens=159)).run is not None
    assert make_plan(replace(many, dtype="float32")).run is not None


def test_explain_names_the_problem_the_backend_and_every_reason() -> None:
    plan = make_plan(PROBLEM)
    head, *lines = plan.explain().split("\n")
    assert head == "T=7 K=2 E=5 H=24 I=20 bfloat16 unquantized on cpu: backend cpu, mode serial"
    assert [line.strip() for line in lines] == list(plan.reasons)


def test_a_backend_forced_by_argument_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOEGRAFT_BACKEND", "no_such_backend")
    plan = make_plan(PROBLEM, "cpu")
    assert plan.backend == "cpu" and "cpu: forced" in plan.reasons


def test_a_backend_forced_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_BACKEND", "cpu")
    assert "cpu: forced" in make_plan(PROBLEM).reasons
    monkeypatch.setenv("MOEGRAFT_BACKEND", "")
    assert forced_backend() is None
    assert "cpu: first that can run it" in make_plan(PROBLEM).reasons


def test_an_unknown_backend_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PlanError, match=r"'tpu'.*cpu"):
        make_plan(PROBLEM, "tpu")
    monkeypatch.setenv("MOEGRAFT_BACKEND", "tpu")
    with pytest.raises(PlanError, match="'tpu'"):
        MoeLoraLayer(random_weights(2, 4, 3))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_format": "int3_made_up"}, "int3_made_up"),
        ({"dtype": "float64"}, "float64"),
        ({"device_type": "cuda"}, "the tensors are on cuda, this backend runs on cpu"),
    ],
)
def test_a_forced_backend_refuses_what_it_cannot_run(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=rf"Backend 'cpu' can't.*cpu: .*{reason}"):
        make_plan(replace(PROBLEM, **changes), "cpu")  # type: ignore[arg-type]


def test_when_no_backend_can_the_message_lists_the_reason_of_each() -> None:
    with pytest.raises(PlanError, match="No backend can run") as caught:
        make_plan(replace(PROBLEM, weight_format="int3_made_up"))
    for name in BACKENDS:
        assert f"{name}: " in str(caught.value)


def test_a_device_without_a_backend_is_refused() -> None:
    with pytest.raises(PlanError, match="on made_up"):
        make_plan(replace(PROBLEM, device_type="made_up"))


def test_layers_refuse_when_they_are_built() -> None:
    with pytest.raises(MoegraftError, match="'int3_made_up' have no scales"):
        MoeLoraLayer(replace(random_weights(2, 4, 3), weight_format="int3_made_up"))
    with pytest.raises(PlanError, match="float64"):
        MoeLoraLayer(random_weights(2, 4, 3, dtype=torch.float64))
    table = site_table(linear_site("q_proj", 4, 3), [])
    with pytest.raises(PlanError, match="float64"):
        LinearLora(table, torch.float64, torch.device("cpu"))


def test_a_layer_plans_each_size_once_and_explains_it() -> None:
    layer = MoeLoraLayer(random_weights(2, 4, 3))
    assert layer.plan(5, 2) is layer.plan(5, 2)
    assert "T=5 K=2" in layer.plan(5, 2).explain()
    assert layer.plan(6, 2) is not layer.plan(5, 2)


def test_layers_keep_the_plans_of_a_limited_number_of_sizes() -> None:
    layer = MoeLoraLayer(random_weights(2, 4, 3))
    table = site_table(linear_site("q_proj", 4, 3), [])
    linear = LinearLora(table, torch.float32, torch.device("cpu"))
    plans = [ref(layer.plan(tokens, 2)) for tokens in range(500)]
    plans += [ref(linear.plan(tokens)) for tokens in range(500)]
    gc.collect()
    assert sum(plan() is not None for plan in plans) <= 2 * MAX_PLANS


def test_the_log_level_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("moegraft")
    before = logger.level
    try:
        monkeypatch.setenv("MOEGRAFT_LOG", "debug")
        configure_logging()
        assert logger.level == logging.DEBUG
        monkeypatch.setenv("MOEGRAFT_LOG", "loud")
        with pytest.raises(MoegraftError, match=r"MOEGRAFT_LOG='LOUD'.*WARNING"):
            log_level()
        configure_logging()
        assert logger.level == logging.WARNING
        assert "'LOUD' is not a logging level" in caplog.text
        monkeypatch.delenv("MOEGRAFT_LOG")
        configure_logging()
        assert logger.level == logging.WARNING
    finally:
        logger.setLevel(before)
