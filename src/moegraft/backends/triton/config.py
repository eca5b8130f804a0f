"""Tile configurations of the fused kernels: one legality check, plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one GEMM launch: columns, K step, warps and pipeline stages."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class FusedConfig:
    """Everything that shapes one layer call; never depends on which adapters are live.

    Attributes:
        block_m: rows per block.
        gate_up, down: tiles of the two GEMM launches.
        shrink: tile of the shrink launches; block_n is the rank rows of one program.
        pdl: programmatic dependent launch (Hopper and newer).
    """

    block_m: int
    gate_up: GemmConfig
    down: GemmConfig
    shrink: GemmConfig = GemmConfig(16, 128, 4, 4)
    pdl: bool = False
