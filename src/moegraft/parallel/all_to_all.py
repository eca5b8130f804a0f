"""Experts over ranks that each have their own tokens: tokens travel, with their adapter slots.

    who needs which token -> sizes -> tokens, ids, weights, slots -> local layer -> back -> sum

A token goes once to each rank that holds one of its experts, and one partial sum comes back. How
many rows travel is read on the host, so this can't be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
import torch.distributed as dist

from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.parallel.groups import ExpertParallel, owner_table
from moegraft.parallel.partial import LayerOptions, PartialMoe
from moegraft.types import ExpertWeights, TokenSlots


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Which rows go where in one call.

    Attributes:
        tokens: int64 ``[sum(send)]`` token of each row that is sent, by rank, ascending in each.
        send, receive: rows per rank.
        live: slots among the rows that come in.
    """

    tokens: torch.Tensor
    send: list[int]
    receive: list[int]
    live: tuple[int, ...]


class AllToAllMoe:
    """A MoE layer whose ranks have different tokens; some may have none.

    Every rank of ``parallel.groups.expert`` must make each call, also with T = 0. Ranks of
    ``parallel.groups.tensor`` share their tokens: they make the same call, and their sums are
    added.

    Args:
        parallel: the ranks, agreed upon.
        weights: this rank's slice.
        table: this rank's factors, with as many slots on each rank. An adapter must be in the same
            slot everywhere, because slots travel, not names; load it on every rank before any uses
            it.
        **options: as of :class:`moegraft.layer.MoeLoraLayer`.

    Example, two ranks, rank 1 without a token::

        layer = AllToAllMoe(parallel, shard_experts(weights, parallel.shard), table)
        out = layer(x, ids, topk_weights, slots)      # rank 0: [5, H]; rank 1: [0, H]
    """

    def __init__(
        self,
        parallel: ExpertParallel,
        weights: ExpertWeights,
        table: SiteTable | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.parallel = parallel
        self.partial = PartialMoe(parallel.shard, weights, table, **options)
        self._group = parallel.groups.expert
        self._size = parallel.groups.ep_size
        self._owner = owner_table(parallel, weights.device)
        self._num_slots = 0 if table is None else table.num_slots

    def __call__(
        self,
        x_TH: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        slots: TokenSlots | None = None,
    ) -> torch.Tensor:
        """Run the layer over this rank's tokens.

        Args:
            x_TH: ``[T, H]``, T of this rank; the dtype is the same on all ranks.
            topk_ids: ``[T, K]`` *global* expert ids, -1 = contributes 0; the same K on all ranks.
            topk_weights: ``[T, K]`` float.
            slots: adapter slot per token; None = base only, whatever other ranks' tokens have.

        Returns:
            ``[T, H]`` in x's dtype. Partial sums come back in that dtype and are added in fp32, in
            the order of the ranks.

        Raises:
            MoegraftError: arguments disagree, or ``slots`` are for a graph. The other ranks then
                wait for this one until their group's timeout.
        """
        if slots is not None and slots.in_graph:
            raise MoegraftError(
                "An all-to-all layer reads its sizes on the host, so no CUDA graph can hold it: "
                "use AllReduceMoe, or run this layer outside of the graph."
            )
        layer = self.partial.layer
        self.partial.check(x_TH, topk_ids, topk_weights, slots)
        exchange = self._exchange(topk_ids, slots)
        x = self._sent(x_TH[exchange.tokens], exchange.send, exchange.receive)
        ids, weights, theirs = self._sent_routing(topk_ids, topk_weights, slots, exchange)
        out = self.partial(x, ids, weights, TokenSlots(theirs, exchange.live))
        back = self._sent(out, exchange.receive, exchange.send).float()
        total = torch.zeros(x_TH.shape[0], layer.weights.hidden, device=x_TH.device)
        # One rank after the other: in each, a token is there once, so the sum's order is fixed.
        for tokens, rows in zip(
            exchange.tokens.split(exchange.send), back.split(exchange.send), strict=True
        ):
            total[tokens] += rows
        if self.parallel.groups.tp_size > 1 and total.numel():
            dist.all_reduce(total, group=self.parallel.groups.tensor)
        return total.to(x_TH.dtype)

    def _exchange(self, topk_ids: torch.Tensor, slots: TokenSlots | None) -> _Exchange:
        """Tell every rank how many rows come, and which slots are among them: one host sync."""
        num_tokens, device = topk_ids.shape[0], topk_ids.device
        owner = self._owner[topk_ids.clamp(-1, self._owner.shape[0] - 1)]
        needed = torch.zeros(self._size + 1, num_tokens, dtype=torch.bool, device=device)
        needed[owner.T, torch.arange(num_tokens, device=device)] = True  # -1 is the last row
        rank, tokens = needed[:-1].nonzero(as_tuple=True)
        # [rank, rows | rows of slot 0 | ..]
        counts = torch.zeros(self._size, 1 + self._num_slots, dtype=torch.int64, device=device)
        counts[:, 0] = needed[:-1].sum(1)
        if slots is not None and self._num_slots:
            with_base = torch.zeros_like(counts)
            # As in the kernels, a slot that the table does not have means the base model.
            mine = slots.slots[tokens].long()
            mine = torch.where((mine >= 0) & (mine < self._num_slots), mine, -1)
            with_base[rank, mine + 1] = 1
            counts[:, 1:] = with_base[:, 1:]
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._group)
        send, receive = torch.stack([counts[:, 0], theirs[:, 0]]).tolist()
        live = tuple(theirs[:, 1:].any(0).nonzero()[:, 0].tolist())
        return _Exchange(tokens, send, receive, live)

    def _sent_routing(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        slots: TokenSlots | None,
        exchange: _Exchange,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange ids int32 ``[N, K]``, weights fp32 ``[N, K]``, slots int32 ``[N]`` as one."""
        num_experts = self._owner.shape[0] - 1
        ids = topk_ids.clamp(-1, num_experts).to(torch.int32)
        mine = torch.full_like(ids[:, :1], -1) if slots is None else slots.slots[:, None]
        rows = torch.cat([ids, topk_weights.float().view(torch.int32), mine], 1)
        rows = self._sent(rows[exchange.tokens], exchange.send, exchange.receive)
        top_k = ids.shape[1]
        weights = rows[:, top_k:-1].contiguous().view(torch.float32)
        return rows[:, :top_k].contiguous(), weights, rows[:, -1].contiguous()

    def _sent(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Exchange rows ``[sum(send), ..]`` for ``[sum(receive), ..]``."""
        found = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), receive, send, group=self._group)
        return found
