"""Which tiles a problem runs with: a tuned table where there is one, else rules from measurements.

Never depends on which adapters are live, so that base rows keep their bits whatever is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from moegraft.backends.triton.config import FusedConfig, GemmConfig, block_r
from moegraft.backends.triton.device import DeviceFacts
from moegraft.problem import Problem

TUNED = Path(__file__).parent / "tuned"
#: Tuned entries serve token counts up to this factor away from theirs.
MAX_TOKEN_FACTOR = 2.0
#: Mean rows per expert up to which a block has 16, or 32 rows; 64 above.
_ROWS_16, _ROWS_32 = 12, 28
#: Up to this many pairs the delta's programs lead the GEMMs' launches: one token, and a few.
_ONE_TOKEN, _FEW_PAIRS = 12, 32


def choose_config(problem: Problem, device: DeviceFacts) -> tuple[FusedConfig, str]:
    """Return the tiles for a problem and where they come from, in a few words."""
    found = _tuned_config(problem, device)
    if found is not None:
        return found
    config = _by_rules(problem)
    while not config_ok(config, problem, device):
        config = _smaller(config)
    return config, "tiles by rule"


def config_ok(config: FusedConfig, problem: Problem, device: DeviceFacts) -> bool:
    """True when the tiles fit the device: the matrix unit's least sizes and the shared memory."""
    itemsize = 4 if problem.dtype == "float32" else 2
    sides = 2 if problem.gated else 1
    for tile, accumulators in ((config.gate_up, sides), (config.down, 1)):
        rows = config.block_m + accumulators * tile.block_n
        buffers = max(tile.num_stages - (0 if tile.swap else 1), 1)
        if rows * tile.block_k * itemsize * buffers > device.shared_memory:
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


@cache
def load_tuned(device_name: str) -> tuple[dict[str, Any], ...]:
    """Return the entries of a device's table, written by ``moegraft tune``; () without one."""
    path = TUNED / tuned_file(device_name)
    if not path.exists():
        return ()
    return tuple(json.loads(path.read_text())["entries"])


def tuned_file(device_name: str) -> str:
    """Return the file name of a device's table: ``NVIDIA H200`` is ``nvidia-h200.json``."""
    words = "".join(c if c.isalnum() else " " for c in device_name.lower()).split()
    return "-".join(words) + ".json"


def config_of(document: dict[str, Any]) -> FusedConfig:
    """Read tiles from their JSON form, as ``dataclasses.asdict`` writes them."""
    values = dict(document)
    for field in fields(FusedConfig):
        if isinstance(values.get(field.name), dict):
            values[field.name] = GemmConfig(**values[field.name])
    return FusedConfig(**values)


def _tuned_config(problem: Problem, device: DeviceFacts) -> tuple[FusedConfig, str] | None:
    """Return the entry of the same shape whose rank and number of tokens are nearest."""
    best: tuple[float, float, dict[str, Any]] | None = None
    same = ("top_k", "num_experts", "hidden", "intermediate", "gated", "dtype", "weight_format")
    for entry in load_tuned(device.name):
        other = entry["problem"]
        if any(other[name] != getattr(problem, name) for name in same):
            continue
        tokens = abs(math.log2(max(problem.num_tokens, 1) / other["num_tokens"]))
        rank = abs(math.log2(max(problem.max_rank, 16) / max(other["max_rank"], 16)))
        if tokens <= math.log2(MAX_TOKEN_FACTOR) and (best is None or (rank, tokens) < best[:2]):
            best = (rank, tokens, entry)
    if best is None:
        return None
    config = config_of(best[2]["config"])
    if not config_ok(config, problem, device):
        return None
    return config, f"tiles tuned for T={best[2]['problem']['num_tokens']}"
