"""Tile configurations of the fused kernels, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

#: Rank rows that one product of the delta takes at most.
MAX_BLOCK_R = 64


def block_r(max_rank: int) -> int:
    """Return the rank rows of one product for a table's maximum rank: 16, 32 or 64."""
    return min(max(16, 1 << max(max_rank - 1, 0).bit_length()), MAX_BLOCK_R)


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
        delta: tile of lora_shrink_expand: block_k of the shrink, block_n of the expand.
        delta_programs: programs that compute the delta, at most.
        gate_up_splits, down_splits: ranges of output columns that a segment's delta is cut into,
            each by its own program: more of them for few tokens. Products of ``A`` are repeated.
        merged: the delta's programs are the first of the GEMM's launch, not a launch before it.
        pdl: programmatic dependent launch (Hopper and newer).
        cuda_fp4: the GEMMs over 4-bit weights are those of :mod:`.weights.fp4_hopper`.
        gate_up_parts, down_parts: groups of warps that share the K loop of one of their programs.
    """

    block_m: int
    gate_up: GemmConfig
    down: GemmConfig
    delta: GemmConfig = GemmConfig(128, 128, 4, 4)
    delta_programs: int = 264
    gate_up_splits: int = 1
    down_splits: int = 1
    merged: bool = False
    pdl: bool = False
    cuda_fp4: bool = False
    gate_up_parts: int = 1
    down_parts: int = 1

    def splits(self, down: bool) -> int:
        """Return the ranges of columns of the delta of gate and up, or of down."""
        return self.down_splits if down else self.gate_up_splits

    def overlapping(self, pdl: bool) -> FusedConfig:
        """Return the same tiles with dependent launch or without it; equal bits.

        Without it no program waits for another one, so none may need what a program of its own
        launch computes: the delta is a launch before the GEMM's.
        """
        return replace(self, merged=self.merged and pdl, pdl=pdl)

    def launch_options(self) -> dict[str, Any]:
        """Return a launch's options for dependent launch.

        Interpreters and older cards know no such option, so it is only passed when it is on.
        """
        return {"PDL": True, "launch_pdl": True} if self.pdl else {"PDL": False}
