"""Tiles of layers with quantised weights: by rules, and whether given ones can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.problem import Problem
from moegraft.quant.formats import format_of

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
    rules = _fp8_block if _is_w8a8(problem) else _fp4 if _is_4_bit(problem) else _fp8_wide
    if problem.num_pairs <= _FEW_PAIRS:
        one = problem.num_pairs <= _ONE_TOKEN
        gate_up, down = rules(1 if one else 2)
        few = FusedConfig(16, gate_up, down, replace(delta, num_warps=4), merged=True)
        return replace(few, gate_up_splits=1 if one else 2, down_splits=4)
    block_m = 16 if rows <= _ROWS_16 else 32 if rows <= _ROWS_32 else 64
    gate_up, down = rules(block_m)
    return FusedConfig(block_m, gate_up, down, delta)


def _fp8_block(block_m: int) -> tuple[GemmConfig, GemmConfig]:
    """Tiles of gate_up and down; ``block_m`` 1 = one token, 2 = a few."""
    gate_up, down = GemmConfig(128, 128, 4, 3, True), GemmConfig(128, 128, 4, 4, True)
    if block_m <= 2:
        return replace(gate_up, num_stages=4), replace(down, block_n=64 if block_m == 1 else 128)
    warps = 8 if block_m == 64 else 4
    return replace(gate_up, num_warps=warps), replace(down, num_warps=warps)


def _fp4(block_m: int) -> tuple[GemmConfig, GemmConfig]:
    """As :func:`_fp8_block`."""
    gate_up, down = GemmConfig(64, 128, 4, 4, True), GemmConfig(128, 128, 4, 4, True)
    return (gate_up, replace(down, block_n=64)) if block_m == 1 else (gate_up, down)


def _fp8_wide(block_m: int) -> tuple[GemmConfig, GemmConfig]:
    """As :func:`_fp8_block`: wide enough that all warps share the loads of x."""
    if block_m == 1:
        return GemmConfig(32, 128, 4, 4), GemmConfig(64, 128, 4, 4)
    warps = 8 if block_m == 64 else 4
    return GemmConfig(64, 128, warps, 4), GemmConfig(128, 128, warps, 4)


def quantised_candidates(problem: Problem) -> Iterator[FusedConfig]:
    """Yield tiles that are worth a try; not all of them need fit."""
    start = quantised_config(problem)
    if _is_w8a8(problem):
        gate_ups = [GemmConfig(128, 128, w, s, True) for w in (4, 8) for s in (2, 3, 4, 5)]
        downs = [GemmConfig(n, 128, 4, s, True) for n in (64, 128) for s in (3, 4, 5)]
    else:
        swap = _is_4_bit(problem)
        gate_ups = [
            GemmConfig(n, k, w, s, swap)
            for n, k, w, s in product((32, 64, 128), (128, 256), (4, 8), (3, 4, 5))
            if n * k <= 128 * 128
        ]
        downs = gate_ups
    for block_m, gate_up, down in product((16, 32, 64), gate_ups, downs):
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
    tiles = (config.gate_up, config.down)
    if _is_w8a8(problem):
        group = format_of(problem.weight_format).activation_group or 0
        steps = all(tile.block_k == group and tile.swap for tile in tiles)
        return steps and config.gate_up.block_n == group and group % config.down.block_n == 0
    one_block = not _is_blocks(problem) or all(
        128 % tile.block_n == 0 and 128 % tile.block_k == 0 for tile in tiles
    )
    swap = _is_4_bit(problem)
    wide = not swap or all(tile.block_n >= 64 and tile.block_k >= 32 for tile in tiles)
    return one_block and wide and all(tile.swap == swap for tile in tiles)


def stage_bytes(config: FusedConfig, tile: GemmConfig, sides: int, problem: Problem) -> int:
    """Return the bytes of one stage of a product's K loop, without scales."""
    itemsize = 1 if _is_w8a8(problem) else 4 if problem.dtype == "float32" else 2
    bits = format_of(problem.weight_format).bits
    return (config.block_m * itemsize + sides * tile.block_n * bits // 8) * tile.block_k


def _is_4_bit(problem: Problem) -> bool:
    return format_of(problem.weight_format).bits == 4


def _is_blocks(problem: Problem) -> bool:
    return format_of(problem.weight_format).block == (128, 128)


def _is_w8a8(problem: Problem) -> bool:
    return format_of(problem.weight_format).activation_group is not None
