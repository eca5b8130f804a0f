"""When a layer takes the prefill run, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton

from moegraft.backends.cuda.compiler import why_no_compiler
from moegraft.backends.cuda.products import ROW_STEP
from moegraft.backends.triton.config import GemmConfig
from moegraft.backends.triton.device import DeviceFacts
from moegraft.backends.triton.workspace import y_dtype
from moegraft.factor_table import SiteTable
from moegraft.problem import Problem
from moegraft.quant.formats import UNQUANTIZED, format_of
from moegraft.types import ExpertWeights

#: Mean rows per expert from which this run is faster than the decode kernels (measured on an H200).
MIN_ROWS, MIN_ROWS_HOPPER = 128, 64
#: The same of FP8 weights and rows; at this many it takes two thirds of the decode kernels' time.
MIN_ROWS_FP8 = 32
#: Bytes of h and y of one round of launches; more tokens run piece by piece.
MAX_BYTES = 2**32
#: Pairs of one round of launches at least, whatever their bytes.
MIN_PIECE = 2**15
#: Rows that a block has room for: of the portable and of the Hopper GEMMs.
BLOCK_M, HOPPER_BLOCK_M = 128, 192
#: The same of the FP8 GEMMs, which have a product beside their sums; and their K steps in flight.
FP8_BLOCK_M, FP8_STAGES = 128, 4
#: Rank rows of a group, and bytes of its description, of which A and B of a projection have one.
GROUP_RANKS, GROUP_BYTES = 16, 32
#: Groups of a block are padded to a multiple of this many, with groups of no row.
STEP_GROUPS = 4
#: Bytes of shared memory that a GPU must have for the tiles.
SHARED_MEMORY = 200 * 1024


@dataclass(frozen=True)
class PrefillConfig:
    """Tiles of a layer; never depends on which adapters are live.

    Attributes:
        block_m: rows that a block has room for, at most 255.
        row_step: an expert's blocks share its rows, to a multiple of this; None = full ones.
        tail_m: blocks with no more rows than this run with tiles of that height.
        gate_up, down: tiles of the GEMMs; gate and up have ``block_n`` columns each.
        shrink: ``block_n`` rows of one program, and its K step.
        wide_shrink: the same for large ranks, with twice the groups at a time.
        shrink_groups: groups of rank rows that the shrink multiplies at a time.
        shrink_shares: programs that share the groups of the same rows.
        stages: K steps in flight of the Hopper GEMMs.
        hopper: the Hopper GEMMs run, not the portable ones; but for an arena of another dtype.
    """

    block_m: int = BLOCK_M
    row_step: int | None = None
    tail_m: int = 64
    gate_up: GemmConfig = field(default_factory=lambda: GemmConfig(128, 64, 8, 3))
    down: GemmConfig = field(default_factory=lambda: GemmConfig(256, 64, 8, 3))
    shrink: GemmConfig = field(default_factory=lambda: GemmConfig(64, 128, 4, 3))
    wide_shrink: GemmConfig = field(default_factory=lambda: GemmConfig(64, 64, 4, 3))
    shrink_groups: int = 4
    shrink_shares: int = 2
    stages: int = 3
    hopper: bool = False

    def launch_options(self) -> dict[str, Any]:
        """Return a launch's options for dependent launch: each begins while the one before ends.

        The portable GEMMs know nothing of it, and interpreters and older cards no such option.
        """
        return {"PDL": True, "launch_pdl": True} if self.hopper else {"PDL": False}


def prefill_config(problem: Problem, device: DeviceFacts) -> PrefillConfig | None:
    """Return the tiles; None without enough rows per expert, tensor maps, or such a format.

    Plain 16-bit weights run everywhere, FP8 ones with FP8 rows on Hopper.

    Rows per expert are those of all pairs over the experts of this rank: too many where other
    ranks have experts of their own.
    """
    if problem.weight_format != UNQUANTIZED:
        # The decode kernels run any number of tokens.
        if not is_for_fp8(problem) or not can_run_hopper(problem, device):
            return None
        return PrefillConfig(FP8_BLOCK_M, ROW_STEP, stages=FP8_STAGES, hopper=True)
    hopper = can_run_hopper(problem, device)
    least = MIN_ROWS_HOPPER if hopper else MIN_ROWS
    if problem.num_pairs < least * problem.num_experts or problem.dtype == "float32":
        return None
    if device.capability < 90 or device.shared_memory < SHARED_MEMORY:
        return None
    if hopper:
        return PrefillConfig(HOPPER_BLOCK_M, ROW_STEP, hopper=True)
    return PrefillConfig()


def can_run_hopper(problem: Problem, device: DeviceFacts) -> bool:
    """True when the Hopper GEMMs run a layer."""
    return device.capability == 90 and not device.interpreted and why_portable(problem) is None


def is_for_fp8(problem: Problem) -> bool:
    """True for FP8 weights and rows with enough rows per expert for GEMMs of their own."""
    if problem.weight_format == UNQUANTIZED:
        return False
    found = format_of(problem.weight_format)
    blocks = found.block == (128, 128) and found.activation_group == 128
    return blocks and problem.num_pairs >= MIN_ROWS_FP8 * problem.num_experts


def why_portable(problem: Problem) -> str | None:
    """Return why the Hopper GEMMs can't run a layer on a Hopper; None when they can."""
    hidden, inter = problem.hidden, problem.intermediate
    if problem.dtype != "bfloat16":
        return f"the Hopper GEMMs take bfloat16, not {problem.dtype}"
    if hidden % 128 or inter % 128:
        return f"the Hopper GEMMs take multiples of 128, not H={hidden} and I={inter}"
    return why_no_compiler()


def most_groups(table: SiteTable, block_m: int) -> int:
    """Return how many groups a block of rows can have."""
    groups = min(table.num_slots, block_m) * triton.cdiv(table.max_rank, GROUP_RANKS)
    return triton.cdiv(groups, STEP_GROUPS) * STEP_GROUPS


def max_pairs(weights: ExpertWeights, table: SiteTable | None = None) -> int:
    """Return how many pairs one round of launches takes, so that its work buffers stay bounded.

    Counts h, in both types where it has two, and y of a pair, and with a table its S and its share
    of the groups of a full block; not the rows that fill the last block of each expert.
    """
    size = weights.dtype.itemsize
    copy = 0 if weights.scales is None else weights.down.element_size()
    row = weights.intermediate * (size + copy) + weights.hidden * y_dtype(weights.dtype).itemsize
    if table is not None:
        sides = table.records.shape[1]
        groups = most_groups(table, HOPPER_BLOCK_M)
        row += sides * table.max_rank * size + 2 * sides * groups * GROUP_BYTES // HOPPER_BLOCK_M
    return max(MAX_BYTES // row, MIN_PIECE)


def has_tensor_map(weights: ExpertWeights) -> bool:
    """True when the weights can be read by tensor map: whole rows of K, gate and up apart."""
    layout, scales = weights.layout, weights.scales
    if scales is not None and not (scales.gate_up.is_contiguous() and scales.down.is_contiguous()):
        return False
    if not layout.out_major or layout.gate_up_order == "interleaved":
        return False
    return all(
        w.is_contiguous() and w.data_ptr() % 16 == 0 and w.shape[2] * w.element_size() % 16 == 0
        for w in (weights.gate_up, weights.down)
    )
