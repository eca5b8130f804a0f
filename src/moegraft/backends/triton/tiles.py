"""Which tiles a problem runs with: a tuned table where there is one, else rules from measurements.

Never depends on which adapters are live, so that base rows keep their bits whatever is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moegraft.backends.triton.config import FusedConfig, GemmConfig, block_r
from moegraft.backends.triton.device import DeviceFacts
from moegraft.backends.triton.tuned_tiles import tuned_config
from moegraft.backends.triton.weights import fp4_hopper
from moegraft.backends.triton.weights.tiles import (
    quantised_candidates,
    quantised_config,
    smaller,
    stage_bytes,
    tiles_ok,
)
from moegraft.problem import Problem
from moegraft.quant.formats import UNQUANTIZED

#: Mean rows per expert up to which a block has 16, or 32 rows; 64 above.
_ROWS_16, _ROWS_32 = 12, 28
#: Up to this many pairs the delta's programs lead the GEMMs' launches: one token, and a few.
_ONE_TOKEN, _FEW_PAIRS = 12, 32


def choose_config(problem: Problem, device: DeviceFacts) -> tuple[FusedConfig, str]:
    """Return the tiles for a problem and where they come from, in a few words."""
    found = tuned_config(problem, device.name)
    if found is not None and config_ok(found[0], problem, device):
        return found
    plain = problem.weight_format == UNQUANTIZED
    config = _by_rules(problem) if plain else quantised_config(problem)
    while not config_ok(config, problem, device):
        config = _smaller(config) if plain else smaller(config)
    if plain or not fp4_hopper.is_4_bit_on_hopper(problem, device):
        return config, "tiles by rule"
    reason = fp4_hopper.why_triton(problem, device)
    if reason is not None:
        return config, f"tiles by rule, not the CUDA kernels over 4-bit weights: {reason}"
    return fp4_hopper.decode_config(config, problem, device), "CUDA kernels over 4-bit weights"


def config_ok(config: FusedConfig, problem: Problem, device: DeviceFacts) -> bool:
    """True when the tiles fit the device: the matrix unit's least sizes and the shared memory."""
    itemsize = 4 if problem.dtype == "float32" else 2
    sides = 2 if problem.gated else 1
    plain = problem.weight_format == UNQUANTIZED
    if not plain and not tiles_ok(config, problem):
        return False
    for tile, accumulators in ((config.gate_up, sides), (config.down, 1)):
        step = (config.block_m + accumulators * tile.block_n) * tile.block_k * itemsize
        if not plain:
            step = stage_bytes(config, tile, accumulators, problem)
        buffers = max(tile.num_stages - (0 if tile.swap else 1), 1)
        if step * buffers > device.shared_memory:
            return False
        if tile.swap and tile.block_n < 64:
            return False
    tile = config.delta
    rank_rows = block_r(problem.max_rank)
    bytes_per_stage = max((16 + rank_rows) * tile.block_k, rank_rows * tile.block_n) * itemsize
    return bytes_per_stage * tile.num_stages <= device.shared_memory


def candidates(problem: Problem, device: DeviceFacts) -> Iterator[FusedConfig]:
    """Yield tiles that are worth a try for a problem, the chosen ones first."""
    start, _ = choose_config(problem, device)
    yield start
    if problem.weight_format != UNQUANTIZED:
        for config in quantised_candidates(problem):
            if config != start and config_ok(config, problem, device):
                yield config
        return
    gemms = [
        GemmConfig(block_n, block_k, warps, stages, swap)
        for block_n, block_k, warps, stages, swap in (
            (32, 128, 2, 4, False),
            (32, 128, 4, 3, False),
            (64, 64, 4, 6, True),
            (64, 128, 4, 3, False),
            (64, 128, 4, 4, True),
            (128, 64, 4, 4, False),
            (128, 128, 4, 3, False),
        )
    ]
    seen = {start}
    for block_m in (16, 32, 64):
        for gate_up in gemms:
            for down in gemms:
                config = replace(start, block_m=block_m, gate_up=gate_up, down=down)
                if config not in seen and config_ok(config, problem, device):
                    seen.add(config)
                    yield config


def _by_rules(problem: Problem) -> FusedConfig:
    rows = problem.num_pairs / problem.num_experts
    delta = GemmConfig(128, 128, 2 if problem.max_rank <= 16 else 4, 6)
    if problem.dtype == "float32":
        gemm = GemmConfig(32, 32, 4, 3)
        return FusedConfig(16, gemm, gemm, GemmConfig(64, 64, 4, 2))
    if problem.num_pairs <= _FEW_PAIRS:
        gate_up, down, splits = GemmConfig(64, 128, 4, 3, True), GemmConfig(128, 128, 4, 3, True), 2
        if problem.num_pairs <= _ONE_TOKEN:
            gate_up = down = GemmConfig(64, 128, 4, 4, True)
            splits = 1
        few = FusedConfig(16, gate_up, down, GemmConfig(128, 128, 4, 6), merged=True)
        return replace(few, gate_up_splits=splits, down_splits=4)
    if rows <= _ROWS_16:
        return FusedConfig(16, GemmConfig(32, 128, 4, 3), GemmConfig(64, 128, 4, 3), delta)
    if rows <= _ROWS_32:
        return FusedConfig(32, GemmConfig(64, 128, 4, 3), GemmConfig(128, 128, 4, 3), delta)
    return FusedConfig(64, GemmConfig(64, 64, 4, 4), GemmConfig(128, 64, 4, 4), delta)


def _smaller(config: FusedConfig) -> FusedConfig:
    """Return the next smaller tiles: fewer stages first, then a shorter K step, then narrower."""

    def shrink(tile: GemmConfig) -> GemmConfig:
        if tile.num_stages > 2:
            return replace(tile, num_stages=tile.num_stages - 1)
        if tile.block_k > 32:
            return replace(tile, block_k=tile.block_k // 2)
        return replace(tile, block_n=max(tile.block_n // 2, 16), swap=False)

    return replace(
        config,
        gate_up=shrink(config.gate_up),
        down=shrink(config.down),
        delta=shrink(config.delta),
    )
