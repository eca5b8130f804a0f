"""The GPU backend's table of stage functions: one launch each, nothing fused.

They check the fused kernels and run what those can't. Rows are pairs: what a stage returns has a
row per pair, and rows of pairs that are not local are neither read nor written, but by
``activation``, which is not told which those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moegraft.activations import apply_activation
from moegraft.backends.triton import linear_lora as linear
from moegraft.backends.triton.combine import run_combine
from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.launch import run_grouped_gemm, run_route
from moegraft.backends.triton.lora_expand import run_lora_expand
from moegraft.backends.triton.lora_shrink import run_lora_shrink
from moegraft.backends.triton.pair_activation import run_pair_activation
from moegraft.backends.triton.workspace import MAX_PAIRS, RouteBuffers, make_route_buffers
from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.stages import RankVectors, split_columns
from moegraft.types import ExpertWeights, TokenSlots

#: Small enough for every dtype and device.
SMALL_TILES = FusedConfig(16, GemmConfig(32, 32, 4, 3), GemmConfig(32, 32, 4, 3))


@dataclass(frozen=True, eq=False)
class PairOrder:
    """What permute returns on a GPU: buffers of the device; the host knows only their sizes.

    Attributes:
        route: blocks of rows, segments and states; see :class:`RouteBuffers`.
        has_slots: route was given slots, so segments and states are there.
        num_tokens: T.
        top_k: K.

    Example: topk_ids [[2, 0], [-1, 2]] with E=3: ``route.pair_row`` has -1 for pair 2, and the
    rows of pairs 0, 1 and 3 in the blocks of experts 2, 0 and 2.
    """

    route: RouteBuffers
    has_slots: bool
    num_tokens: int
    top_k: int

    @property
    def num_rows(self) -> int:
        """P: rows are pairs."""
        return self.route.num_pairs


@dataclass(frozen=True)
class TritonStages:
    """The stage functions of :class:`moegraft.stages.Stages` on a GPU.

    Attributes:
        config: tiles of the grouped products; without dependent launch.
    """

    config: FusedConfig = SMALL_TILES

    def permute(
        self,
        topk_ids: torch.Tensor,
        slots: TokenSlots | None,
        num_experts: int,
        expert_offset: int,
    ) -> PairOrder:
        """See :meth:`moegraft.stages.Stages.permute`; no host waits.

        Raises:
            MoegraftError: there are more pairs than :data:`MAX_PAIRS`.
        """
        num_tokens, top_k = topk_ids.shape
        pairs = topk_ids.numel()
        if pairs > MAX_PAIRS:
            raise MoegraftError(
                f"The stages on a GPU take at most {MAX_PAIRS} pairs at once, got {num_tokens} x "
                f"{top_k} = {pairs}; call the layer, which cuts them into pieces."
            )
        route = make_route_buffers(num_experts, pairs, self.config.block_m, topk_ids.device)
        has_slots = slots is not None and bool(slots.live)
        if pairs:
            token_slots = slots.slots if slots is not None and has_slots else None
            ids = topk_ids.contiguous()
            run_route(ids, token_slots, num_experts, route, self.config, expert_offset)
        return PairOrder(route, has_slots, num_tokens, top_k)

    def gate_up(self, x_TH: torch.Tensor, weights: ExpertWeights, perm: PairOrder) -> torch.Tensor:
        """See :meth:`moegraft.stages.Stages.gate_up`; fp32 ``[P, 2I]``."""
        out = empty_gate_up(weights, perm.num_rows)
        self._gemm(x_TH, weights, perm, out, down=False)
        return out

    def activation(
        self, gate_up: torch.Tensor, weights: ExpertWeights, dtype: torch.dtype
    ) -> torch.Tensor:
        """See :meth:`moegraft.stages.Stages.activation`; all rows are computed."""
        act, inter = weights.activation, weights.intermediate
        if act.custom is not None:
            return apply_activation(gate_up, act, weights.layout, inter).to(dtype)
        h = torch.empty(gate_up.shape[0], inter, dtype=dtype, device=gate_up.device)
        run_pair_activation(gate_up, weights, h)
        return h

    def down(self, h_NI: torch.Tensor, weights: ExpertWeights, perm: PairOrder) -> torch.Tensor:
        """See :meth:`moegraft.stages.Stages.down`; fp32 ``[P, H]``."""
        out = torch.empty(perm.num_rows, weights.hidden, dtype=torch.float32, device=weights.device)
        self._gemm(h_NI, weights, perm, out, down=True)
        return out

    def finalize(
        self, y_NH: torch.Tensor, topk_weights: torch.Tensor, perm: PairOrder, scale: float
    ) -> torch.Tensor:
        """See :meth:`moegraft.stages.Stages.finalize`."""
        hidden = y_NH.shape[1]
        out = torch.empty(perm.num_tokens, hidden, dtype=torch.float32, device=y_NH.device)
        if perm.num_tokens:
            pair_row, weights = perm.route.pair_row, topk_weights.contiguous()
            run_combine(y_NH, weights, pair_row, None, out, scale, by_pair=True)
        return out

    def lora_shrink(
        self,
        rows: torch.Tensor,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: PairOrder,
        slots: TokenSlots,
    ) -> RankVectors:
        """See :meth:`moegraft.stages.Stages.lora_shrink`."""
        assert perm.has_slots, "permute was not given the slots"
        shape = (len(projections), perm.num_rows, table.max_rank)
        values = torch.zeros(shape, dtype=torch.float32, device=rows.device)
        run_lora_shrink(unit_rows(rows), table, projections, perm.route, perm.top_k, values)
        return RankVectors(tuple(values.unbind(0)))

    def lora_expand(
        self,
        ranks: RankVectors,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: PairOrder,
        outs: tuple[torch.Tensor, ...],
    ) -> None:
        """See :meth:`moegraft.stages.Stages.lora_expand`."""
        for values, projection, out in zip(ranks.values, projections, outs, strict=True):
            run_lora_expand(values, table, projection, perm.route, out)

    def lora_shrink_expand(
        self,
        rows: torch.Tensor,
        table: SiteTable,
        projections: tuple[str, ...],
        perm: PairOrder,
        slots: TokenSlots,
        out: torch.Tensor,
    ) -> None:
        """See :meth:`moegraft.stages.Stages.lora_shrink_expand`; one after the other."""
        ranks = self.lora_shrink(rows, table, projections, perm, slots)
        outs = split_columns(out, table.site, projections)
        self.lora_expand(ranks, table, projections, perm, outs)

    def linear_lora(
        self, x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor
    ) -> None:
        """See :meth:`moegraft.stages.Stages.linear_lora`."""
        self.linear_lora_group(x, (table,), slots, (out,))

    def linear_lora_group(
        self,
        x: torch.Tensor,
        tables: Sequence[SiteTable],
        slots: TokenSlots,
        outs: Sequence[torch.Tensor],
    ) -> None:
        """See :meth:`moegraft.stages.Stages.linear_lora_group`."""
        pdl = device_facts().has_dependent_launch
        linear.linear_lora_group(x, tables, slots, outs, pdl=pdl)

    def _gemm(
        self,
        rows: torch.Tensor,
        weights: ExpertWeights,
        perm: PairOrder,
        out: torch.Tensor,
        down: bool,
    ) -> None:
        if perm.num_rows:
            rows = unit_rows(rows.to(weights.dtype))
            run_grouped_gemm(rows, weights, perm.route, perm.top_k, self.config, out, down)


def empty_gate_up(weights: ExpertWeights, num_pairs: int) -> torch.Tensor:
    """Allocate fp32 ``[P, 2I]`` for gate_up; 0 where a host's own function will read all rows."""
    make = torch.zeros if weights.activation.kind == "custom" else torch.empty
    width = weights.gate_up_oi.shape[1]
    return make(num_pairs, width, dtype=torch.float32, device=weights.device)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with adjacent columns; a copy only where they are not so yet."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


STAGES = TritonStages()
