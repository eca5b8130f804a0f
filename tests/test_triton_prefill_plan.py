"""When a layer takes the kernels for many rows per expert, which ones, and what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from moegraft.backends import triton as backend
from moegraft.backends.triton import device
from moegraft.backends.triton.device import INTERPRETER
from moegraft.backends.triton.prefill import config as prefill
from moegraft.backends.triton.prefill.config import (
    FP8_BLOCK_M,
    HOPPER_BLOCK_M,
    MIN_ROWS_FP8,
    PrefillConfig,
    prefill_config,
)
from moegraft.problem import Problem

MANY = Problem(
    num_tokens=4096, top_k=8, num_experts=128, hidden=2048, intermediate=768, gated=True,
    dtype="bfloat16", weight_format="unquantized", device_type="cuda", max_rank=16,
)  # fmt: skip
H200 = replace(INTERPRETER, interpreted=False)


def test_it_is_for_many_rows_of_16_bits_only() -> None:
    assert prefill_config(MANY, INTERPRETER) == PrefillConfig()
    assert prefill_config(replace(MANY, num_tokens=1024), INTERPRETER) is None
    assert prefill_config(replace(MANY, dtype="float32"), INTERPRETER) is None
    assert prefill_config(MANY, replace(INTERPRETER, capability=80)) is None
    assert prefill_config(MANY, replace(INTERPRETER, shared_memory=101_376)) is None


def test_hopper_gemms_run_whole_tiles_of_bfloat16_on_hopper_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "why_no_compiler", lambda: None)
    few = replace(MANY, num_tokens=1024)
    found = prefill_config(few, H200)
    assert found is not None and found.hopper, "64 rows per expert are enough for these"
    assert found.block_m == HOPPER_BLOCK_M and found.row_step == 16
    assert prefill_config(replace(MANY, num_tokens=512), H200) is None
    for other in ({"dtype": "float16"}, {"intermediate": 704}, {"hidden": 2112}):
        assert prefill_config(replace(MANY, **other), H200) == PrefillConfig()
    blackwell = replace(H200, capability=100)
    assert prefill_config(MANY, blackwell) == PrefillConfig(), "no wgmma on Blackwell"
    monkeypatch.setattr(prefill, "why_no_compiler", lambda: "There is no NVRTC")
    assert prefill_config(few, H200) is None
    assert prefill_config(MANY, H200) == PrefillConfig(), "portable ones without a compiler"


@pytest.mark.parametrize(
    ("changes", "refusal", "reason"),
    [
        ({}, None, None),
        ({}, "There is no NVRTC", "portable GEMMs: There is no NVRTC"),
        ({"dtype": "float16"}, None, "the Hopper GEMMs take bfloat16, not float16"),
        ({"intermediate": 704}, None, "multiples of 128, not H=2048 and I=704"),
    ],
)
def test_the_plan_says_why_a_hopper_runs_the_portable_gemms(
    changes: dict[str, str | int],
    refusal: str | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "device_facts", lambda: H200)
    monkeypatch.setattr(prefill, "why_no_compiler", lambda: refusal)
    problem = replace(MANY, **changes)  # type: ignore[arg-type]
    why = backend.choose(problem).why
    assert why.startswith("many rows per expert")
    assert (reason in why) if reason else ("portable" not in why)
    monkeypatch.setattr(device, "device_facts", lambda: replace(H200, capability=100))
    assert "portable" not in backend.choose(problem).why, "other GPUs have no others"


FP8 = replace(MANY, weight_format="fp8-block")


def test_fp8_gemms_run_fp8_weights_with_fp8_rows_on_hopper_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "why_no_compiler", lambda: None)
    least = MIN_ROWS_FP8 * FP8.num_experts // FP8.top_k
    found = prefill_config(replace(FP8, num_tokens=least), H200)
    assert found is not None and found.hopper
    assert found.block_m == FP8_BLOCK_M and found.row_step == 16
    for other in ({"num_tokens": least - 1}, {"dtype": "float16"}, {"intermediate": 704}):
        assert prefill_config(replace(FP8, **other), H200) is None, other
    for name in ("fp8-block-w8a16", "fp8-channel", "fp8-tensor", "nvfp4", "mxfp4"):
        assert prefill_config(replace(FP8, weight_format=name), H200) is None, name
    for facts in (replace(H200, capability=100), replace(H200, capability=89), INTERPRETER):
        assert prefill_config(FP8, facts) is None


@pytest.mark.parametrize(
    ("changes", "refusal", "says"),
    [
        ({}, None, "many rows per expert"),
        ({"intermediate": 704}, None, "multiples of 128, not H=2048 and I=704"),
        ({"dtype": "float16"}, None, "the Hopper GEMMs take bfloat16, not float16"),
        ({}, "There is no NVRTC", "not GEMMs for many rows (There is no NVRTC)"),
        ({"num_tokens": 64, "intermediate": 704}, None, None),
        ({"weight_format": "nvfp4", "intermediate": 704}, None, None),
    ],
)
def test_the_plan_says_why_fp8_weights_stay_with_the_decode_kernels(
    changes: dict[str, str | int],
    refusal: str | None,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "device_facts", lambda: H200)
    monkeypatch.setattr(prefill, "why_no_compiler", lambda: refusal)
    why = backend.choose(replace(FP8, **changes)).why  # type: ignore[arg-type]
    assert (says in why) if says else ("many rows" not in why)
