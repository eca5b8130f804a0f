"""When 4-bit weights run on the CUDA kernels, with which tiles, and why not elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moegraft.backends.cuda import compiler
from moegraft.backends.triton.device import DeviceFacts
from moegraft.backends.triton.tiles import candidates, choose_config, config_ok
from moegraft.backends.triton.weights import fp4_hopper
from moegraft.problem import Problem
from moegraft.quant.experts import quantise_experts
from moegraft.testing import random_weights

HOPPER = DeviceFacts("a Hopper", 90, 132, 232_448)
LAYER = Problem(64, 8, 128, 2048, 768, True, "bfloat16", "nvfp4", "cuda", 16)
needs_compiler = pytest.mark.skipif(
    not compiler.has_compiler(), reason=compiler.why_no_compiler() or ""
)


@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 64, 256, 1024])
@pytest.mark.parametrize("gated", [True, False])
def test_tiles_are_those_that_the_kernels_have_and_run_in_triton_too(
    num_tokens: int, gated: bool
) -> None:
    problem = replace(LAYER, num_tokens=num_tokens, gated=gated)
    config, why = choose_config(problem, HOPPER)
    assert config.cuda_fp4 and not config.merged and "CUDA" in why
    wide = 2 if num_tokens == 256 else 1  # programs of eight warps where rows are many
    rows = (config.gate_up.block_n * (2 if gated else 1), config.down.block_n)
    assert rows == (128 * wide, 128 * wide)
    assert config_ok(config, problem, HOPPER)
    sizes = (768 // config.gate_up.block_n, 2048 // 128)
    programs = [min(8 * num_tokens, 128) * tiles for tiles in sizes]
    for parts, count in zip((config.gate_up_parts, config.down_parts), programs, strict=True):
        assert parts == 1 or count * parts <= 4 * HOPPER.num_sms
        assert parts > 1 or num_tokens > 1


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "warps", "stages"),
    [
        (LAYER, 4, 3),
        (replace(LAYER, num_tokens=128), 8, 3),
        (replace(LAYER, num_tokens=256), 8, 3),
        (replace(LAYER, num_tokens=512), 4, 2),
        (replace(LAYER, num_tokens=256, hidden=8192, intermediate=8192), 4, 3),
        (replace(LAYER, num_tokens=2, num_experts=2), 4, 3),
    ],
    ids=["few rows", "8 rows", "16", "32", "no room for two", "parts share the K loop"],
)
def test_programs_of_eight_warps_where_rows_are_many_and_two_have_room(
    problem: Problem, warps: int, stages: int
) -> None:
    config, _ = choose_config(problem, HOPPER)
    found = {(tile.num_warps, tile.num_stages) for tile in (config.gate_up, config.down)}
    assert config.cuda_fp4 and found == {(warps, stages)}


@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 64, 256])
def test_tuning_tries_tiles_that_the_kernels_have(num_tokens: int) -> None:
    problem = replace(LAYER, num_tokens=num_tokens)
    start, _ = choose_config(problem, HOPPER)
    found = list(candidates(problem, HOPPER))
    assert found[0] == start and len(set(found)) == len(found) > 10
    assert all(config.cuda_fp4 and config_ok(config, problem, HOPPER) for config in found)
    # And leaves the others: of its neighbours, and of tables that people edit.
    for tile in (
        replace(start.gate_up, block_n=32), replace(start.gate_up, block_k=64),
        replace(start.gate_up, num_warps=2), replace(start.gate_up, num_stages=1),
        replace(start.gate_up, num_warps=8 if start.gate_up.num_warps == 4 else 4),
        replace(start.gate_up, num_stages=30),
    ):  # fmt: skip
        assert not fp4_hopper.tiles_ok(replace(start, gate_up=tile), problem), tile
    assert not config_ok(replace(start, merged=True), problem, HOPPER)
    eights = [config for config in found if config.down.num_warps == 8]
    assert bool(eights) == (num_tokens > 1), "with parts a group has four warps"
    parts = [replace(config, gate_up_parts=2, down_parts=2) for config in eights]
    assert not any(config_ok(config, problem, HOPPER) for config in parts)
    assert not config_ok(start, replace(problem, dtype="float16"), HOPPER)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "bfloat16"),
        ({"weight_format": "fp8-block"}, "4-bit"),
        ({"intermediate": 784}, "multiples of 32, not H=2048 and I=784"),
        ({"hidden": 32_768}, "16384 columns"),
        ({"num_tokens": 1025}, "64 rows"),
        ({"activation": "custom"}, "functions"),
        ({"post_norm": True}, "functions"),
    ],
)
def test_other_layers_run_on_triton_and_it_is_known_why(
    changes: dict[str, Any], reason: str
) -> None:
    problem = replace(LAYER, **changes)
    found = fp4_hopper.why_triton(problem, HOPPER)
    assert found is not None and reason in found
    assert not choose_config(problem, HOPPER)[0].cuda_fp4


@pytest.mark.parametrize("capability", [80, 89, 100])
def test_they_are_for_hopper_alone(capability: int) -> None:
    assert "9.0" in (fp4_hopper.why_triton(LAYER, replace(HOPPER, capability=capability)) or "")
    assert fp4_hopper.why_triton(LAYER, replace(HOPPER, interpreted=True)) is not None


def test_experts_apart_or_at_odd_addresses_are_left_to_triton() -> None:
    weights = quantise_experts(random_weights(4, 64, 32, dtype=torch.bfloat16), "mxfp4")
    assert fp4_hopper.can_read(weights)
    assert fp4_hopper.can_read(replace(weights, down=weights.down.repeat(1, 2, 1)[:, :64]))
    wide = weights.down.repeat(1, 1, 2)[:, :, :16]
    assert not fp4_hopper.can_read(replace(weights, down=wide)), "rows apart"
    room = torch.empty(weights.down.numel() + 16, dtype=torch.uint8)
    odd = room[4:][: weights.down.numel()].view(weights.down.shape)
    assert not fp4_hopper.can_read(replace(weights, down=odd))
    scales = weights.scales
    assert scales is not None
    apart = scales.down.repeat(1, 1, 2)[:, :, :1]
    assert not fp4_hopper.can_read(replace(weights, scales=replace(scales, down=apart)))
    assert not fp4_hopper.can_read(random_weights(4, 64, 32))
