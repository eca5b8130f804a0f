"""The GEMMs over 4-bit weights on Hopper where experts have few rows, in CUDA C++.

They stand for gate_up_activation and for down's grouped_gemm between the same launches, with the
same workspace; see :mod:`moegraft.backends.cuda.fp4_decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
import triton

from moegraft.backends.cuda.compiler import why_no_compiler
from moegraft.backends.cuda.fp4_decode import STEP, Fp4Arguments, Fp4Spec
from moegraft.backends.cuda.products import kernel
from moegraft.backends.triton.activation import column_constants
from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.device import DeviceFacts
from moegraft.backends.triton.launch_delta import gate_up_tiles
from moegraft.backends.triton.weights.arguments import gate_up_arguments
from moegraft.backends.triton.workspace import Workspace
from moegraft.problem import Problem
from moegraft.types import ExpertWeights

#: Columns that a thread reads at once: rows of weights are whole numbers of them.
_COLUMNS = 32
#: Shared memory of a multiprocessor, of a program at most, and what each takes beside its own.
_SHARED_MEMORY, _PROGRAM_MEMORY, _RESERVED = 233_472, 232_448, 1024
#: Warps of all programs of a multiprocessor: each has 128 registers per thread then.
_MAX_WARPS = 16
_ALIGNMENT = 16
#: Mean rows per expert up to which these are used: a block has 64 at most.
_MAX_ROWS = 64
#: Mean rows per expert from which a program has eight warps: fewer programs read the same x.
_WIDE_ROWS = 8
#: Columns of the weights whose scales a program has room for, beside three steps of 64 rows.
_MAX_K = 16_384


def is_4_bit_on_hopper(problem: Problem, device: DeviceFacts) -> bool:
    """True for layers that these GEMMs were made for, whether they run them or not."""
    hopper = device.capability == 90 and not device.interpreted
    return hopper and problem.weight_format in ("nvfp4", "mxfp4")


def why_triton(problem: Problem, device: DeviceFacts) -> str | None:
    """Return why these GEMMs do not run a layer; None where they do."""
    hidden, inter = problem.hidden, problem.intermediate
    if not is_4_bit_on_hopper(problem, device):
        return "they are for 4-bit weights on compute capability 9.0"
    if problem.dtype != "bfloat16":
        return f"they take bfloat16, not {problem.dtype}"
    if hidden % _COLUMNS or inter % _COLUMNS:
        return f"they take multiples of {_COLUMNS}, not H={hidden} and I={inter}"
    if problem.activation == "custom" or problem.post_norm:
        return "they take no functions"
    if max(hidden, inter) > _MAX_K:
        return f"they take up to {_MAX_K} columns, not H={hidden} and I={inter}"
    if problem.num_pairs > _MAX_ROWS * problem.num_experts:
        return f"there are more than {_MAX_ROWS} rows per expert"
    return why_no_compiler()


def decode_config(config: FusedConfig, problem: Problem, device: DeviceFacts) -> FusedConfig:
    """Return the tiles of these GEMMs for a problem that they take, from those of Triton's."""
    blocks = min(problem.num_pairs, problem.num_experts)
    tiles = [_tile(config, problem, down) for down in (False, True)]
    sizes = (problem.intermediate, problem.hidden)
    parts = [
        _parts(blocks * triton.cdiv(size_n, tile.block_n), device.num_sms) if config.merged else 1
        for size_n, tile in zip(sizes, tiles, strict=True)
    ]
    return replace(
        config, gate_up=tiles[0], down=tiles[1], gate_up_parts=parts[0], down_parts=parts[1],
        merged=False, cuda_fp4=True,
    )  # fmt: skip


def _tile(config: FusedConfig, problem: Problem, down: bool) -> GemmConfig:
    """Return the tile of one GEMM: eight warps share rows of x where those are many."""
    few = config.merged or problem.num_pairs < _WIDE_ROWS * problem.num_experts
    stages = 3 if config.block_m < _MAX_ROWS else 2
    spec = _sizes(config.block_m, problem, down, stages, 8)
    if few or config.block_m == _MAX_ROWS or _programs(spec) < 2:
        spec = replace(spec, warps=4)
    return GemmConfig(spec.columns, STEP, spec.warps, stages, True)


def _sizes(block_m: int, problem: Problem, down: bool, stages: int, warps: int) -> Fp4Spec:
    """Return a specialisation for its sizes."""
    nv, gated = problem.weight_format == "nvfp4", problem.gated and not down
    size_k = problem.intermediate if down else problem.hidden
    return Fp4Spec(block_m, size_k, stages, 1, nv, down, gated, 1, warps=warps)


def _programs(spec: Fp4Spec) -> int:
    """Return how many programs a multiprocessor has room for; 64 rows take more registers."""
    most = (_MAX_WARPS - 4 if spec.block_m == _MAX_ROWS else _MAX_WARPS) // (spec.threads // 32)
    return max(min(_SHARED_MEMORY // (spec.shared_bytes + _RESERVED), most), 1)


def _parts(programs: int, num_sms: int) -> int:
    """Return how many groups of warps a program needs, so that the GPU has enough of them."""
    return 4 if programs <= num_sms else 2 if programs <= 2 * num_sms else 1


def tiles_ok(config: FusedConfig, problem: Problem) -> bool:
    """True when the kernels have these tiles, and a multiprocessor room for each program."""
    fits = not config.merged and config.block_m <= _MAX_ROWS
    for down, tile, parts in (
        (False, config.gate_up, config.gate_up_parts),
        (True, config.down, config.down_parts),
    ):
        spec = _sizes(config.block_m, problem, down, tile.num_stages, tile.num_warps)
        fits &= (tile.block_n, tile.block_k) == (spec.columns, STEP)
        fits &= tile.num_warps == 4 or (tile.num_warps == 8 and parts == 1)
        fits &= tile.num_stages > 1
        fits &= spec.sum_bytes <= spec.stages_bytes and spec.shared_bytes <= _PROGRAM_MEMORY
    return fits


def candidates(start: FusedConfig) -> Iterator[FusedConfig]:
    """Yield tiles of these GEMMs that are worth a try; not all of them need fit."""
    sizes = ((16, 32, 64), (4, 8), (2, 3, 4), (2, 3, 4))
    for block_m, warps, stages, down_stages in product(*sizes):
        gate_up, down = (
            replace(tile, block_n=tile.block_n * warps // tile.num_warps, num_warps=warps)
            for tile in (start.gate_up, start.down)
        )
        yield replace(
            start, block_m=block_m, gate_up=replace(gate_up, num_stages=stages),
            down=replace(down, num_stages=down_stages),
        )  # fmt: skip


def can_read(weights: ExpertWeights) -> bool:
    """True when an expert's values and scales lie together, on whole 16 bytes."""
    scales = weights.scales
    if scales is None:
        return False
    return all(
        part[0].is_contiguous()
        and not any(n % _ALIGNMENT for n in (part.stride(0), part.data_ptr()))
        for part in (weights.gate_up, weights.down, scales.gate_up, scales.down)
    )


def run_gate_up(
    weights: ExpertWeights,
    ws: Workspace,
    top_k: int,
    config: FusedConfig,
    slots: torch.Tensor | None,
) -> None:
    """Launch gate_up and the activation; with ``slots`` int32 ``[T]`` it adds the delta.

    h itself is only written with slots: nobody but adapters reads it.
    """
    act, columns = weights.activation, column_constants(weights)
    form = gate_up_arguments(weights, ws.base_x)
    bias = weights.gate_up_bias
    spec = _spec(weights, config, False, top_k, ws)
    spec = replace(
        spec, starts=(columns["GATE_START"], columns["UP_START"]), step=columns["COLUMN_STEP"],
        global_index=(form["GATE_GLOBAL"], form["UP_GLOBAL"]), kind=act.kind, alpha=act.alpha,
        limit=act.limit, up_shift=act.up_shift, bias=None if bias is None else bias.dtype,
    )  # fmt: skip
    assert ws.base_x is not None and ws.base_h is not None
    p = _arguments(weights, False, ws, ws.base_x.values, ws.base_h.values)
    if slots is not None:
        assert ws.delta_gate_up is not None
        spec = replace(spec, delta=ws.delta_gate_up.dtype)
        p.slots, p.states = slots.data_ptr(), ws.states.data_ptr()
        p.delta, p.splits = ws.delta_gate_up.data_ptr(), config.gate_up_splits
        p.h = ws.h.data_ptr()
        if not weights.layout.gated:  # the states of up are the first ones then
            assert spec.step == 1
    p.num_tiles = gate_up_tiles(weights, config)
    _launch(spec, p, ws, config)


def run_down(
    topk_weights: torch.Tensor, weights: ExpertWeights, ws: Workspace, config: FusedConfig
) -> None:
    """Launch down with the routing weight; no delta joins here."""
    bias = weights.down_bias
    spec = replace(
        _spec(weights, config, True, 1, ws),
        bias=None if bias is None else bias.dtype,
        weight=topk_weights.dtype,
    )
    assert ws.base_h is not None
    p = _arguments(weights, True, ws, ws.base_h.values, ws.y)
    p.topk_weights, p.h_tiles = topk_weights.data_ptr(), gate_up_tiles(weights, config)
    p.num_tiles = triton.cdiv(weights.hidden, spec.columns)
    _launch(spec, p, ws, config)


def _spec(
    weights: ExpertWeights, config: FusedConfig, down: bool, top_k: int, ws: Workspace
) -> Fp4Spec:
    tile = config.down if down else config.gate_up
    size_k = weights.intermediate if down else weights.hidden
    spec = Fp4Spec(
        config.block_m, size_k, tile.num_stages, 1, weights.weight_format == "nvfp4", down,
        weights.layout.gated and not down, top_k,
        parts=config.down_parts if down else config.gate_up_parts, warps=tile.num_warps,
    )  # fmt: skip
    assert spec.columns == tile.block_n, "tiles of fp4_decode"
    while spec.parts > 1 and spec.shared_bytes > _PROGRAM_MEMORY:
        spec = replace(spec, parts=spec.parts // 2)
    return replace(spec, programs=_programs(spec))


def _arguments(
    weights: ExpertWeights, down: bool, ws: Workspace, x: torch.Tensor, out: torch.Tensor
) -> Fp4Arguments:
    scales = weights.scales
    assert scales is not None
    weight, bias = weights.gate_up, weights.gate_up_bias
    grid, whole = scales.gate_up, scales.gate_up_global
    if down:
        weight, bias = weights.down, weights.down_bias
        grid, whole = scales.down, scales.down_global
    return Fp4Arguments(
        x=x.data_ptr(), weight=weight.data_ptr(), scales=grid.data_ptr(),
        globals=0 if whole is None else whole.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(), row_pair=ws.row_pair.data_ptr(),
        block_info=ws.block_info.data_ptr(), h_counter=ws.h_counter.data_ptr(),
        out=out.data_ptr(), x_stride=x.stride(0) * x.element_size(),
        weight_stride_e=weight.stride(0), scale_stride_e=grid.stride(0),
        out_stride=out.stride(0) * out.element_size(),
        global_stride=0 if whole is None else whole.stride(0),
        bias_stride=0 if bias is None else bias.stride(0),
        size_n=weights.hidden if down else weights.intermediate, num_pairs=ws.num_pairs,
    )  # fmt: skip


def _launch(spec: Fp4Spec, p: Fp4Arguments, ws: Workspace, config: FusedConfig) -> None:
    programs = ws.num_blocks * p.num_tiles
    kernel(spec, ws.h.device.index).launch(programs, p, overlap=config.pdl)
