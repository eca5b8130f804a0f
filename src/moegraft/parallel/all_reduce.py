"""Experts over ranks that share one batch: one all-reduce adds up their partial sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
import torch.distributed as dist

from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.parallel.groups import ExpertParallel
from moegraft.parallel.partial import LayerOptions, PartialMoe
from moegraft.types import ExpertWeights, TokenSlots

#: Adds a ``[T, H]`` tensor up over the ranks, in place, on the current stream.
Reduce = Callable[[torch.Tensor], None]


class AllReduceMoe:
    """A MoE layer whose ranks all have the same tokens, ids, weights and adapters.

    No sizes are exchanged and nothing is read on the host, so it can be captured in a CUDA graph.
    Capture a call on every rank, and replay on every rank, in the same order.

    *Addresses.* With ``buffer`` the result is always its first T rows, so that its address is fixed
    whether a graph was captured or not, and other ranks may have it mapped (a tensor of
    ``torch.distributed._symmetric_memory``, say, with a ``reduce`` that reads the peers). It holds
    until the next call. Without, the result is a new tensor; in a graph, one of the graph's pool.

    Args:
        parallel: the ranks, agreed upon.
        weights: this rank's slice.
        table: this rank's factors. Slots are this rank's own: an adapter may be in another one on
            another rank, as long as each rank's tokens carry its own slots.
        buffer: ``[max_tokens, H]`` for results, in the activations' dtype; None = new tensors.
        reduce: adds the partial sums; None = ``torch.distributed.all_reduce`` over
            ``parallel.groups.whole``.
        **options: as of :class:`moegraft.layer.MoeLoraLayer`.

    Example: see :class:`moegraft.parallel.ExpertParallel`.
    """

    def __init__(
        self,
        parallel: ExpertParallel,
        weights: ExpertWeights,
        table: SiteTable | None = None,
        *,
        buffer: torch.Tensor | None = None,
        reduce: Reduce | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.parallel = parallel
        self.partial = PartialMoe(parallel.shard, weights, table, **options)
        if buffer is not None and (buffer.dim() != 2 or buffer.shape[1] != weights.hidden):
            raise MoegraftError(
                f"buffer has shape {tuple(buffer.shape)}; expected [max_tokens, {weights.hidden}]."
            )
        self._buffer = buffer
        self._reduce = reduce or self._all_reduce

    def __call__(
        self,
        x_TH: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        slots: TokenSlots | None = None,
    ) -> torch.Tensor:
        """Run the layer: ``[T, H]``, the same on all ranks.

        Arguments as of :meth:`PartialMoe.__call__`, the same on all ranks: T too. With T = 0
        nothing is sent.

        Raises:
            MoegraftError: arguments disagree with each other, or T is over the buffer. Before
                anything is sent; equal arguments raise on all ranks, so none waits for another.
        """
        out = None if self._buffer is None else self._rows(x_TH.shape[0])
        out = self.partial(x_TH, topk_ids, topk_weights, slots, out)
        if out.shape[0]:
            self._reduce(out)
        return out

    def _rows(self, num_tokens: int) -> torch.Tensor:
        assert self._buffer is not None
        if num_tokens > self._buffer.shape[0]:
            raise MoegraftError(
                f"A batch of {num_tokens} tokens is over the output buffer of "
                f"{self._buffer.shape[0]}."
            )
        return self._buffer[:num_tokens]

    def _all_reduce(self, out: torch.Tensor) -> None:
        dist.all_reduce(out, group=self.parallel.groups.whole)
