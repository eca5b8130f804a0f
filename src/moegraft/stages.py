"""The stages of a MoE-LoRA layer: one name each, used by reference, backends, tests, benchmarks.

    permute -> gate_up -> activation -> down -> finalize                  base
               lora_shrink, lora_expand beside gate_up and beside down    adapters
    linear_lora                                                           dense linears, routers

A backend is a table of these functions (:class:`Stages`). A fused kernel replaces a run of stages
and is chosen by the plan; it never turns a plain stage into something else by a flag.
Letters are those of :mod:`moegraft.types`; ``N`` is the number of local pairs.

How rows are numbered is the backend's own affair: its permute says it and its other stages read it.
With :class:`Permutation` (CPU) the rows are the N local pairs in expert order. On a GPU the row of
a pair is the pair's number, so N stands for P and rows of pairs that are not local hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from moegraft.factor_table import SiteTable
from moegraft.sites import Site
from moegraft.types import ExpertWeights, TokenSlots


@dataclass(frozen=True)
class Permutation:
    """The local pairs in expert order. Pair p = t*K + k; a pair is local when its expert is here.

    Attributes:
        row_to_pair: int64 ``[N]``, sorted by expert, stable in the pair number.
        row_to_token: int64 ``[N]``, ``row_to_pair // K``.
        row_to_expert: int64 ``[N]``, local expert ids, ascending.
        pair_to_row: int64 ``[P]``, the inverse of row_to_pair; -1 for pairs that are not local.
        pair_to_expert: int64 ``[P]`` local expert ids; outside ``[0, E)`` where not local.
        expert_ends: int32 ``[E]``; rows ``[ends[e-1], ends[e])`` belong to local expert e.
        row_to_slot: int64 ``[N]`` adapter slot, -1 none; None for a base-only batch.
        num_tokens: T.
        top_k: K.

    The order never depends on adapters, so base results keep their bits whatever is live.

    Example: topk_ids [[2, 0], [-1, 2]] with E=3: row_to_pair [1, 0, 3], row_to_expert [0, 2, 2],
    pair_to_row [1, 0, -1, 2], expert_ends [1, 1, 3], expert_offsets (0, 1, 1, 3).
    """

    row_to_pair: torch.Tensor
    row_to_token: torch.Tensor
    row_to_expert: torch.Tensor
    pair_to_row: torch.Tensor
    pair_to_expert: torch.Tensor
    expert_ends: torch.Tensor
    row_to_slot: torch.Tensor | None
    num_tokens: int
    top_k: int

    @property
    def num_rows(self) -> int:
        """N."""
        return self.row_to_pair.shape[0]

    @cached_property
    def expert_offsets(self) -> tuple[int, ...]:
        """E+1 ints on the host: 0 and ``expert_ends``."""
        return (0, *self.expert_ends.tolist())


@dataclass(frozen=True)
class RankVectors:
    """What lora_shrink leaves for lora_expand: ``A x`` per row, for each projection of one side.

    Attributes:
        values: one fp32 ``[N, Rmax]`` per projection, in the order asked for. Entries past a
            row's live rank, and rows without a delta, are exactly 0.
        method: how the backend grouped the rows; opaque, handed back to lora_expand.

    Example: gate and up share one A: both entries of ``values`` are the same tensor.
    """

    values: tuple[torch.Tensor, ...]
    method: object = None


def split_columns(
    out: torch.Tensor, site: Site, projections: tuple[str, ...]
) -> tuple[torch.Tensor, ...]:
    """Return each projection's columns of a packed ``[N, columns]`` tensor, as views."""
    if projections == ("down",):
        return (out,)
    width = site.projection("up").out_features
    return tuple(out[:, site.layout.columns(name, width)] for name in projections)


#: What a backend's permute returns and its other stages take.
RowOrder = TypeVar("RowOrder")


class Stages(Protocol[RowOrder]):
    """A backend's stage functions."""

    def permute(
        self,
        topk_ids: torch.Tensor,
        slots: TokenSlots | None,
        num_experts: int,
        expert_offset: int,
    ) -> RowOrder:
        """Sort the pairs by expert.

        ``topk_ids`` int32/int64 ``[T, K]`` global ids; ids outside ``[expert_offset,
        expert_offset + num_experts)``, such as -1, are dropped: never read, never written.
        """
        ...

    def gate_up(self, x_TH: torch.Tensor, weights: ExpertWeights, perm: RowOrder) -> torch.Tensor:
        """``out[n] = W_gate_up[e_n] x[t_n] + b[e_n]``: fp32 ``[N, 2I]`` in the host's columns."""
        ...

    def activation(
        self, gate_up: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype
    ) -> torch.Tensor:
        """``h = act(gate, up)`` in fp32, rounded to ``dtype``, that of x: ``[N, I]``."""
        ...

    def down(self, h_NI: torch.Tensor, weights: ExpertWeights, perm: RowOrder) -> torch.Tensor:
        """``y[n] = W_down[e_n] h[n] + b[e_n]``: fp32 ``[N, H]``."""
        ...

    def finalize(
        self, y_NH: torch.Tensor, topk_weights: torch.Tensor, perm: RowOrder, scale: float
    ) -> torch.Tensor:
        """``out[t] = scale * sum_k w[t, k] * y``, summed in fp32: fp32 ``[T, H]``."""
        ...

    def lora_shrink(
        self,
        rows: torch.Tensor,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: RowOrder,
        slots: TokenSlots,
    ) -> RankVectors:
        """``S[n] = A[slot_n, e_n] rows_n``. ``rows`` is ``[T, in]`` for gate and up (row n reads
        its token's row) and ``[N, in]`` for down."""
        ...

    def lora_expand(
        self,
        ranks: RankVectors,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: RowOrder,
        outs: tuple[torch.Tensor, ...],
    ) -> None:
        """``outs[i][n] += scale * B[slot_n, e_n] S[n]`` in place, fp32 views ``[N, out]``."""
        ...

    def lora_shrink_expand(
        self,
        rows: torch.Tensor,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: RowOrder,
        slots: TokenSlots,
        out: torch.Tensor,
    ) -> None:
        """The run lora_shrink, lora_expand; a backend may fuse the two.

        ``out`` is fp32 and packed: ``[N, 2I]`` in the host's columns for gate and up, ``[N, H]``
        for down. Split it with :func:`split_columns`.
        """
        ...

    def linear_lora(
        self, x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor
    ) -> None:
        """``out[t] += scale * B[slot_t] (A[slot_t] x[t])`` in place; rows without a delta are not
        touched. ``x`` ``[T, in]``, ``out`` ``[T, out]`` in the host's dtype, summed in fp32."""
        ...

    def linear_lora_group(
        self,
        x: torch.Tensor,
        tables: Sequence[SiteTable],
        slots: TokenSlots,
        outs: Sequence[torch.Tensor],
    ) -> None:
        """``linear_lora`` of several linears that read the same x; a backend may fuse them."""
        ...
