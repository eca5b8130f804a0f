"""The CPU backend: vectorised torch, fp32 sums, work only for touched experts and live factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from moegraft.backends.cpu import base, lora_gathered, lora_segments
from moegraft.backends.cpu.linear_lora import linear_lora
from moegraft.backends.cpu.permute import permute
from moegraft.factors import SiteTable
from moegraft.problem import Problem
from moegraft.stages import Permutation
from moegraft.types import TokenSlots

LoraMethod = Literal["gathered", "segments"]

#: Above this many rows, reading each factor once beats gathering a copy per row.
MAX_GATHERED_ROWS = 64


@dataclass(frozen=True)
class CpuStages:
    """The stage functions of :class:`moegraft.stages.Stages`, with the LoRA method fixed.

    ``gathered`` fuses lora_shrink and lora_expand, ``segments`` runs one after the other.
    """

    lora_method: LoraMethod

    permute = staticmethod(permute)
    gate_up = staticmethod(base.gate_up)
    activation = staticmethod(base.activation)
    down = staticmethod(base.down)
    finalize = staticmethod(base.finalize)
    lora_shrink = staticmethod(lora_segments.lora_shrink)
    lora_expand = staticmethod(lora_segments.lora_expand)

    def lora_shrink_expand(
        self,
        rows: torch.Tensor,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: Permutation,
        slots: TokenSlots,
        outs: tuple[torch.Tensor, ...],
    ) -> None:
        """See :meth:`moegraft.stages.Stages.lora_shrink_expand`."""
        if self.lora_method == "gathered":
            lora_gathered.lora_shrink_expand(rows, table, projections, perm, slots, outs)
        else:
            ranks = self.lora_shrink(rows, table, projections, perm, slots)
            self.lora_expand(ranks, table, projections, perm, outs)

    def linear_lora(
        self, x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor
    ) -> None:
        """See :meth:`moegraft.stages.Stages.linear_lora`."""
        linear_lora(x, table, slots, out, gathered=self.lora_method == "gathered")


def supports(problem: Problem) -> str | None:
    """Return None when this backend can run the problem, else the reason why not."""
    if problem.device_type != "cpu":
        return f"the tensors are on {problem.device_type}, this backend runs on cpu"
    if problem.weight_format != "unquantized":
        return f"weight format {problem.weight_format!r} is not implemented"
    if problem.dtype not in ("float32", "bfloat16", "float16"):
        return f"weights are {problem.dtype}; implemented: float32, bfloat16, float16"
    return None


def choose(problem: Problem) -> tuple[CpuStages, str]:
    """Return the stages for a problem and one line that says why."""
    method: LoraMethod = "gathered" if problem.num_pairs <= MAX_GATHERED_ROWS else "segments"
    relation = "<=" if method == "gathered" else ">"
    why = f"LoRA {method}: {problem.num_pairs} rows {relation} {MAX_GATHERED_ROWS}"
    return CpuStages(method), why
