"""The CUDA kernels over 4-bit weights on a Hopper GPU: whole layers, and exact weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from layer_cases import GpuCase, mixed_case

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.launch import run_route
from moegraft.backends.triton.launch_delta import gate_up_tiles
from moegraft.backends.triton.tiles import choose_config
from moegraft.backends.triton.weights import fp4_hopper
from moegraft.backends.triton.weights.rows import run_base_rows
from moegraft.backends.triton.workspace import make_workspace
from moegraft.call import Mode
from moegraft.problem import Problem
from moegraft.quant.experts import expert_matrix, quantise_experts
from moegraft.testing import ACTIVATIONS, LAYOUTS, assert_bit_equal, assert_close, random_weights
from moegraft.types import ExpertWeights

BF16 = torch.bfloat16
FUSED: tuple[Mode, ...] = ("in_kernel", "fused_serial")
NAMES = ("nvfp4", "mxfp4")


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    problem = Problem(1, 2, 8, 256, 128, True, "bfloat16", "nvfp4", "cuda")
    return fp4_hopper.why_triton(problem, device_facts())


_REASON = _missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_REASON is not None, reason=_REASON or "")]


def tiles_of(weights: ExpertWeights, num_tokens: int, top_k: int, rank: int = 0) -> FusedConfig:
    config, _ = choose_config(Problem.of(weights, num_tokens, top_k, rank), device_facts())
    assert config.cuda_fp4 and fp4_hopper.can_read(weights)
    return config


def gpu_case(name: str, num_tokens: int, **options: Any) -> GpuCase:
    options = {"sizes": (8, 256, 128), "minus_ones": 0.05, "scale": 1.5, **options}
    case = mixed_case(num_tokens, weight_format=name, **options)
    return GpuCase(case, tiles_of(case.weights, num_tokens, 2, case.table().max_rank))


@pytest.mark.parametrize("num_tokens", [1, 9, 64, 120, 200])
@pytest.mark.parametrize("name", NAMES)
def test_layers_of_every_size(name: str, num_tokens: int) -> None:
    gpu_case(name, num_tokens).check(FUSED)


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_eight_warps_have_the_bits_of_four(name: str) -> None:
    gpu = gpu_case(name, 64, sizes=(8, 416, 160))  # 16 rows per expert
    assert gpu.config.gate_up.num_warps == gpu.config.down.num_warps == 8
    gpu.check(FUSED)
    gate_up, down = (
        replace(tile, block_n=tile.block_n // 2, num_warps=4)
        for tile in (gpu.config.gate_up, gpu.config.down)
    )
    four = replace(gpu, config=replace(gpu.config, gate_up=gate_up, down=down))
    assert_bit_equal(gpu.run("in_kernel"), four.run("in_kernel"), "eight warps, four")


@pytest.mark.parametrize("layout", ["up_first", "no_gate", "interleaved"])
@pytest.mark.parametrize("name", NAMES)
def test_partial_steps_and_tiles_in_every_order_of_gate_and_up(name: str, layout: str) -> None:
    activation = {"no_gate": "relu2", "interleaved": "clamped"}.get(layout, "gelu_tanh")
    options = {"layout": LAYOUTS[layout], "activation": ACTIVATIONS[activation], "biases": True}
    gpu_case(name, 33, sizes=(7, 416, 160), **options).check(FUSED)


@pytest.mark.parametrize("name", NAMES)
def test_they_agree_with_the_kernels_in_triton(name: str) -> None:
    gpu = gpu_case(name, 64, sizes=(16, 1024, 512))
    for base in (True, False):
        config = gpu.config.overlapping(True)
        ours = run_layer(gpu.call(base), config)
        theirs = run_layer(gpu.call(base), replace(config, cuda_fp4=False))
        assert_close(ours.cpu(), theirs.cpu(), BF16)


@pytest.mark.parametrize("name", NAMES)
def test_weights_at_odd_addresses_run_on_the_kernels_in_triton(name: str) -> None:
    gpu = gpu_case(name, 9)
    w = gpu.case.weights
    room = torch.empty(w.down.numel() + 4, dtype=torch.uint8, device="cuda")
    odd = room[4:].view(w.down.shape).copy_(w.down)
    shifted = replace(gpu, case=replace(gpu.case, weights=replace(w, down=odd)))
    assert not fp4_hopper.can_read(shifted.case.weights)
    found = shifted.run("in_kernel")
    triton_alone = replace(gpu, config=replace(gpu.config, cuda_fp4=False))
    assert_bit_equal(found, triton_alone.run("in_kernel"), "odd addresses")


@pytest.mark.parametrize("num_rows", [5, 16, 30, 64])
@pytest.mark.parametrize("name", NAMES)
def test_one_hot_rows_read_the_exact_weights(name: str, num_rows: int) -> None:
    """relu of x W minus relu of -x W is W; down gets its rows as they are."""
    plain = random_weights(
        3, 288, 160, layout=LAYOUTS["no_gate"], activation=ACTIVATIONS["relu"], dtype=BF16,
        device="cuda",
    )  # fmt: skip
    weights = quantise_experts(plain, name)
    scales = weights.scales
    assert scales is not None
    if scales.down_global is not None and scales.gate_up_global is not None:
        up, down = (
            torch.exp2(torch.log2(s).round()) for s in (scales.gate_up_global, scales.down_global)
        )
        scales = replace(scales, gate_up_global=up, down_global=down)
        weights = replace(weights, scales=scales)
    config = replace(tiles_of(weights, 3 * num_rows, 1), block_m=16 if num_rows <= 16 else 64)
    config = config.overlapping(False)
    ids = torch.full((num_rows, 1), 1, dtype=torch.int32, device="cuda")
    ones = torch.ones(num_rows, 1, device="cuda")
    ws = make_workspace(weights, num_rows, config.block_m, True, BF16, top_k=1, eights=True)
    assert ws.base_h is not None
    for first in range(0, 160, num_rows):
        rows = torch.zeros(num_rows, 288, dtype=BF16, device="cuda")
        count = min(num_rows, 160 - first)
        rows[range(count), range(first, first + count)] = 1.0
        found = []
        for x in (rows, -rows):
            run_route(ids, None, 3, ws, config, 0, x, ws.base_x)
            fp4_hopper.run_gate_up(weights, ws, 1, config, None)
            back = torch.empty_like(ws.h)
            for j in range(8):
                back[:, j::8] = ws.base_h.values[:, j % 4 * 2 + j // 4 :: 8]
            found.append(back[:count].float())
        wanted = expert_matrix(weights, "gate_up", 1).T[first : first + count]
        assert torch.equal(found[0] - found[1], wanted)
        run_base_rows(rows[:, :160].contiguous(), ws.base_h)
        ws.h_counter.fill_(gate_up_tiles(weights, config))
        fp4_hopper.run_down(ones, weights, ws, config)
        wanted = expert_matrix(weights, "down", 1).T[first : first + count]
        assert torch.equal(ws.y[:count].float(), wanted)
