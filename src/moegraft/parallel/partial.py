"""One rank's part of a MoE layer: the partial sum of its experts and columns."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch

from moegraft.call import LayerCall, Mode
from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.layer import MoeLoraLayer, check_call, run_plan
from moegraft.parallel.expert import ExpertShard, check_norm
from moegraft.parallel.placement import to_local
from moegraft.types import ExpertWeights, TokenSlots


class LayerOptions(TypedDict, total=False):
    """What :class:`moegraft.layer.MoeLoraLayer` takes besides weights and table."""

    routed_scaling_factor: float
    backend: str | None
    mode: Mode | None


class PartialMoe:
    """A :class:`moegraft.layer.MoeLoraLayer` over a slice: global ids in, a partial sum out.

    For engines that add the partial sums themselves. Base and delta are both partial, the routed
    scaling factor is in both: nothing else may scale or add them again.

    Args:
        shard: what is here.
        weights: the local weights, from :func:`moegraft.parallel.shard_experts` or an engine.
        table: the local factors: a bank over :attr:`moegraft.parallel.RankShards.local_sites`.
        **options: of the layer.

    Raises:
        MoegraftError: weights or table have other sizes than the shard.
        UnsupportedError: a slice of I of experts with a norm behind them.
        PlanError: no backend can run these weights here.
    """

    def __init__(
        self,
        shard: ExpertShard,
        weights: ExpertWeights,
        table: SiteTable | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        found = (weights.num_experts, weights.intermediate)
        if found != (shard.placement.num_local, shard.part.width):
            raise MoegraftError(
                f"The weights hold {found[0]} experts with I={found[1]}, this rank's shard is "
                f"{shard.placement.num_local} with I={shard.part.width}: pass shard_experts("
                "weights, shard), or the engine's own slice."
            )
        check_norm(weights, shard)
        self.shard = shard
        offset = shard.placement.offset
        #: Takes global ids when the experts are a range, else local ones.
        self.layer = MoeLoraLayer(weights, table, expert_offset=offset or 0, **options)
        self._lookup = shard.placement.lookup(weights.device) if offset is None else None

    def __call__(
        self,
        x_TH: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        slots: TokenSlots | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the partial sum of T tokens, T = 0 included.

        Args:
            x_TH: ``[T, H]``.
            topk_ids: ``[T, K]`` *global* expert ids; -1 or another rank's = contributes 0.
            topk_weights: ``[T, K]``.
            slots: adapter slot per token; None = base only.
            out: ``[T, H]`` in x's dtype to write to; None = a new tensor.

        Raises:
            MoegraftError: shapes, dtypes or devices disagree.
        """
        layer = self.layer
        self.check(x_TH, topk_ids, topk_weights, slots)
        if out is not None and (out.shape, out.dtype, out.device) != (
            x_TH.shape,
            x_TH.dtype,
            x_TH.device,
        ):
            raise MoegraftError(
                f"out is {out.dtype} {tuple(out.shape)} on {out.device}, x {x_TH.dtype} "
                f"{tuple(x_TH.shape)} on {x_TH.device}; they must agree."
            )
        if self._lookup is not None:
            topk_ids = to_local(topk_ids, self._lookup)
        call = LayerCall(
            x_TH,
            topk_ids,
            topk_weights,
            layer.weights,
            layer.table,
            slots,
            layer.expert_offset,
            layer.routed_scaling_factor,
            out,
        )
        return run_plan(layer.plan(*topk_ids.shape), call)

    def check(
        self,
        x_TH: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        slots: TokenSlots | None,
    ) -> None:
        """Raise :class:`MoegraftError` unless a call could run; reads no values."""
        layer = self.layer
        check_call(layer.weights, layer.table, x_TH, topk_ids, topk_weights, slots)
