"""The CPU backend: vectorised torch, fp32 sums, work only for the experts that a batch touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moegraft.backends import Choice
from moegraft.backends.cpu import base, lora_gathered, lora_segments
from moegraft.backends.cpu.grouped import ALL_ROWS, own_dtype_rows
from moegraft.backends.cpu.linear_lora import linear_lora
from moegraft.backends.cpu.lora_stacked import (
    LINEAR,
    Stack,
    cached_stack,
    expand_stacked,
    linear_stacked,
)
from moegraft.backends.cpu.permute import permute
from moegraft.call import Mode
from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.problem import Problem
from moegraft.quant.formats import why_no_format
from moegraft.stages import Permutation, split_columns
from moegraft.types import ExpertWeights, TokenSlots

LoraMethod = Literal["stacked", "gathered", "segments"]

#: Above this many rows, reading each factor once beats gathering a copy per row.
MAX_GATHERED_ROWS = 64


@dataclass(frozen=True)
class CpuStages:
    """The stage functions of :class:`moegraft.stages.Stages`, with the LoRA method fixed.

    Attributes:
        lora_method: ``stacked`` and ``gathered`` fuse lora_shrink and lora_expand, ``segments``
            runs one after the other.
        fallback: what ``stacked`` does where the live adapters are too large to stack.
        own_dtype_rows: experts with at most so many rows are multiplied in the weights' own 16
            bits; the others are widened.
    """

    lora_method: LoraMethod
    fallback: Literal["gathered", "segments"] = "gathered"
    own_dtype_rows: int = 0

    permute = staticmethod(permute)
    activation = staticmethod(base.activation)
    finalize = staticmethod(base.finalize)
    lora_shrink = staticmethod(lora_segments.lora_shrink)
    lora_expand = staticmethod(lora_segments.lora_expand)

    def gate_up(
        self, x_TH: torch.Tensor, weights: ExpertWeights, perm: Permutation
    ) -> torch.Tensor:
        """See :meth:`moegraft.stages.Stages.gate_up`."""
        return base.gate_up(x_TH, weights, perm, self.own_dtype_rows)

    def down(self, h_NI: torch.Tensor, weights: ExpertWeights, perm: Permutation) -> torch.Tensor:
        """See :meth:`moegraft.stages.Stages.down`."""
        return base.down(h_NI, weights, perm, self.own_dtype_rows)

    def lora_shrink_expand(
        self,
        rows: torch.Tensor,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: Permutation,
        slots: TokenSlots,
        out: torch.Tensor,
    ) -> None:
        """See :meth:`moegraft.stages.Stages.lora_shrink_expand`."""
        check_not_captured(slots)
        stack = self._stack(table, projections, slots, out.shape[0])
        if stack is not None:
            expand_stacked(rows, stack, perm, slots, out, per_token=projections != ("down",))
        elif self._otherwise == "segments":
            ranks = self.lora_shrink(rows, table, projections, perm, slots)
            outs = split_columns(out, table.site, projections)
            self.lora_expand(ranks, table, projections, perm, outs)
        else:
            outs = split_columns(out, table.site, projections)
            lora_gathered.lora_shrink_expand(rows, table, projections, perm, slots, outs)

    def linear_lora(
        self, x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor
    ) -> None:
        """See :meth:`moegraft.stages.Stages.linear_lora`."""
        check_not_captured(slots)
        stack = self._stack(table, LINEAR, slots, out.shape[0])
        if stack is not None:
            linear_stacked(x, stack, slots, out, table.arena.version)
        else:
            linear_lora(x, table, slots, out, gathered=self._otherwise == "gathered")

    def linear_lora_group(
        self,
        x: torch.Tensor,
        tables: Sequence[SiteTable],
        slots: TokenSlots,
        outs: Sequence[torch.Tensor],
    ) -> None:
        """See :meth:`moegraft.stages.Stages.linear_lora_group`; one after the other."""
        for table, out in zip(tables, outs, strict=True):
            self.linear_lora(x, table, slots, out)

    @property
    def _otherwise(self) -> str:
        return self.fallback if self.lora_method == "stacked" else self.lora_method

    def _stack(
        self, table: SiteTable, projections: tuple[str, ...], slots: TokenSlots, num_rows: int
    ) -> Stack | None:
        if self.lora_method != "stacked":
            return None
        stack = slots.derived(
            ("stack", table, projections),
            table.arena.version,
            lambda: cached_stack(table, projections, slots),
        )
        return stack if stack is not None and stack.allows(num_rows) else None


def check_not_captured(slots: TokenSlots) -> None:
    """Raise :class:`MoegraftError` for slots of a CUDA graph."""
    if slots.in_graph:
        raise MoegraftError(
            "TokenSlots.captured are for CUDA graphs: which slots are live is not known, and the "
            "CPU backend works by it. Use TokenSlots.of on the CPU."
        )


def supports(problem: Problem, mode: Mode | None = None) -> str | None:
    """Return None when this backend can run the problem, else the reason why not."""
    if mode not in (None, "serial", "base"):
        return f"mode {mode!r} is for GPUs; implemented: serial, base"
    if problem.device_type != "cpu":
        return f"the tensors are on {problem.device_type}, this backend runs on cpu"
    reason = why_no_format(problem.weight_format)
    if reason is not None:
        return reason
    if problem.dtype not in ("float32", "bfloat16", "float16"):
        return f"weights are {problem.dtype}; implemented: float32, bfloat16, float16"
    return None


def choose(problem: Problem, mode: Mode | None = None) -> Choice:
    """Return the stages for a problem and one line that says why."""
    few = problem.num_pairs <= MAX_GATHERED_ROWS
    fallback: Literal["gathered", "segments"] = "gathered" if few else "segments"
    relation = "<=" if few else ">"
    why = (
        f"LoRA stacked where the live adapters are small, else {fallback} "
        f"({problem.num_pairs} rows {relation} {MAX_GATHERED_ROWS})"
    )
    rows = own_dtype_rows(problem.dtype) if problem.weight_format == "unquantized" else 0
    return Choice(CpuStages("stacked", fallback, rows), mode or "serial", f"{_base(rows)}; {why}")


def _base(rows: int) -> str:
    """Say how the base is multiplied."""
    if rows == ALL_ROWS:
        return "base by torch's bfloat16 products, which this processor has instructions for"
    if rows:
        return (
            f"base by torch's bfloat16 products for up to {rows} rows of an expert, more rows in "
            "fp32, one expert widened at a time: no instructions for bfloat16"
        )
    return "base by torch's fp32 products"
