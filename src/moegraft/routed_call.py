"""One call of the routed op as data: the delta of gate and up comes from outside.

Letters are those of :mod:`moegraft.types`; pair ``p = t*K + k``, and everything of a pair lies at
its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.types import ExpertWeights


@dataclass(frozen=True, eq=False)
class RoutedCall:
    """The checked arguments of one routed call.

    Attributes:
        x_TH: ``[T, H]`` activations in the weights' dtype.
        topk_ids: int32/int64 ``[T, K]`` global expert ids; -1 or not local = contributes 0.
        topk_weights: ``[T, K]`` float.
        weights: base weights of the local experts.
        expert_offset: global id of local expert 0.
        scale: multiplies the summed output; not applied to ``rows``.
        gate_up_delta: contiguous ``[P, 2I]`` as gate | up (``[P, I]`` without a gate), any float
            dtype, added before the activation; None = no delta. Pairs that are not local are not
            read.
        h: ``[P, I]`` in x's dtype to leave h in, exactly 0 where a pair is not local; None = no.
        lora_ready: handle of a CUDA event that the delta waits for; 0 = it is there.
        gemm2_done: handle of a CUDA event to record behind the down product; 0 = none.
        pdl: False turns dependent launch off.
        out: ``[T, H]`` to write to; None = finalize is left to the caller.
        rows: contiguous ``[P, H]`` in x's dtype for the rows of the down product, without the
            routing weight; only those of local pairs are written. None = not wanted.
        pair_to_row: int32 ``[P]`` to write each pair's row of ``rows`` to, -1 = not local.

    Example: a call that sums has ``out``, one with ``do_finalize=False`` has ``rows`` and
    ``pair_to_row``.
    """

    x_TH: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    weights: ExpertWeights
    expert_offset: int = 0
    scale: float = 1.0
    gate_up_delta: torch.Tensor | None = None
    h: torch.Tensor | None = None
    lora_ready: int = 0
    gemm2_done: int = 0
    pdl: bool = True
    out: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    pair_to_row: torch.Tensor | None = None

    def piece(self, start: int, end: int) -> RoutedCall:
        """Return the call of tokens ``[start, end)``, without its events."""
        top_k = self.topk_ids.shape[1]

        def tokens(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[start:end]

        def pairs(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[start * top_k : end * top_k]

        return RoutedCall(
            self.x_TH[start:end],
            self.topk_ids[start:end],
            self.topk_weights[start:end],
            self.weights,
            self.expert_offset,
            self.scale,
            pairs(self.gate_up_delta),
            pairs(self.h),
            0,
            0,
            self.pdl,
            tokens(self.out),
            pairs(self.rows),
            pairs(self.pair_to_row),
        )
