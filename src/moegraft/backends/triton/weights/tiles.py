"""Tiles of layers with quantised weights: by rules, and whether given ones can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.problem import Problem
from moegraft.quant.formats import WeightFormat, format_of

#: Mean rows per expert up to which a block has 16, or 32 rows; 64 above.
_ROWS_16, _ROWS_32 = 12, 28
#: Up to this many pairs the delta's programs lead the GEMMs' launches: one token, and a few.
_ONE_TOKEN, _FEW_PAIRS = 12, 32


def quantised_config(problem: Problem) -> FusedConfig:
    """Return the tiles that a problem starts from, whatever shared memory the device has."""
    rows = problem.num_pairs / problem.num_experts
    delta = GemmConfig(128, 128, 2 if problem.max_rank <= 16 else 4, 6)
    if problem.dtype == "float32":
        delta = GemmConfig(64, 64, 4, 2)
    gate_up, down = GemmConfig(128, 128, 4, 3, True), GemmConfig(128, 128, 4, 4, True)
    if problem.num_pairs <= _FEW_PAIRS:
        one = problem.num_pairs <= _ONE_TOKEN
        gate_up, down = replace(gate_up, num_stages=4), replace(down, block_n=64 if one else 128)
        few = FusedConfig(16, gate_up, down, replace(delta, num_warps=4), merged=True)
        return replace(few, gate_up_splits=1 if one else 2, down_splits=4)
    if rows <= _ROWS_16:
        return FusedConfig(16, gate_up, down, delta)
    if rows <= _ROWS_32:
        return FusedConfig(32, gate_up, down, delta)
    gate_up, down = (replace(tile, num_warps=8) for tile in (gate_up, down))
    return FusedConfig(64, gate_up, down, delta)


def quantised_candidates(problem: Problem) -> Iterator[FusedConfig]:
    """Yield tiles that are worth a try; not all of them need fit."""
    start = quantised_config(problem)
    for block_m, warps, stages, columns, more in product(
        (16, 32, 64), (4, 8), (3, 4, 5), (64, 128), (3, 4, 5)
    ):
        gate_up = GemmConfig(128, 128, warps, stages, True)
        down = GemmConfig(columns, 128, 4, more, True)
        yield replace(start, block_m=block_m, gate_up=gate_up, down=down)


def smaller(config: FusedConfig) -> FusedConfig:
    """Return tiles that take less shared memory."""

    def fewer(tile: GemmConfig) -> GemmConfig:
        return replace(tile, num_stages=max(tile.num_stages - 1, 2))

    fewer_stages = replace(
        config,
        gate_up=fewer(config.gate_up),
        down=fewer(config.down),
        delta=fewer(config.delta),
    )
    if fewer_stages != config:
        return fewer_stages
    delta = replace(config.delta, block_k=max(config.delta.block_k // 2, 16))
    return replace(config, block_m=max(config.block_m // 2, 16), delta=delta)


def tiles_ok(config: FusedConfig, problem: Problem) -> bool:
    """True when the tiles are those of the format: whole groups of scales, and the right side."""
    found = format_of(problem.weight_format)
    tiles = (config.gate_up, config.down)
    if found.activation_group is not None:
        group = found.activation_group
        steps = all(tile.block_k == group and tile.swap for tile in tiles)
        return steps and config.gate_up.block_n == group and group % config.down.block_n == 0
    return True


def stage_bytes(config: FusedConfig, tile: GemmConfig, sides: int, problem: Problem) -> int:
    """Return the bytes of one stage of a product's K loop."""
    found: WeightFormat = format_of(problem.weight_format)
    itemsize = 4 if problem.dtype == "float32" else 2
    rows = config.block_m * (1 if found.activation_group is not None else itemsize)
    return (rows + sides * tile.block_n * found.bits // 8) * tile.block_k
