"""Tile configurations of the fused kernels, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one GEMM launch: columns, K step, warps and pipeline stages.

    ``swap``: the weights are the left operand of the products, so that wide tiles fit the matrix
    unit also when a block has 16 rows.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False


@dataclass(frozen=True)
class FusedConfig:
    """Everything that shapes one layer call; never depends on which adapters are live.

    Attributes:
        block_m: rows per block.
        gate_up, down: tiles of the two GEMM launches.
        delta: tile of the two lora_shrink_expand launches: block_k of the shrink, block_n of the
            expand.
        delta_programs: programs of those launches at most.
        prefetch: ask the L2 for down's weights before h is there (few tokens; out-major weights).
        pdl: programmatic dependent launch (Hopper and newer).
    """

    block_m: int
    gate_up: GemmConfig
    down: GemmConfig
    delta: GemmConfig = GemmConfig(128, 128, 4, 4)
    delta_programs: int = 264
    prefetch: bool = False
    pdl: bool = False
