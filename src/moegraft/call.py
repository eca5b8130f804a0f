"""One call of a MoE layer as data: what a fused run of stages gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from moegraft.factor_table import SiteTable
from moegraft.types import ExpertWeights, TokenSlots

#: How adapters and base overlap.
#:
#: ``in_kernel``: fused kernels; the adapters' launches overlap the base's on one stream.
#: ``fused_serial``: the same kernels one after the other; equal bits.
#: ``two_stream``: unfused stages; the delta of gate and up on a side stream.
#: ``serial``: the same unfused stages on one stream; equal bits.
#: ``base``: never any adapter.
Mode: TypeAlias = Literal["in_kernel", "fused_serial", "two_stream", "serial", "base"]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """The checked arguments of one layer call; letters as in :mod:`moegraft.types`.

    Attributes:
        x_TH: ``[T, H]`` activations.
        topk_ids: int32/int64 ``[T, K]`` global expert ids; -1 or not local = contributes 0.
        topk_weights: ``[T, K]`` float.
        weights: base weights.
        table: the adapters' factors; None = no adapters.
        slots: adapter slot per token; None = base only.
        expert_offset: global id of local expert 0.
        scale: multiplies the summed output.
        out: ``[T, H]`` to write to; None = a new tensor. May not overlap x.

    Example: a base-only call has ``slots=None``; ``lora`` is False then.
    """

    x_TH: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    weights: ExpertWeights
    table: SiteTable | None = None
    slots: TokenSlots | None = None
    expert_offset: int = 0
    scale: float = 1.0
    out: torch.Tensor | None = None

    @property
    def lora(self) -> bool:
        """True when some token may have an adapter: known on the host."""
        return self.table is not None and self.slots is not None and bool(self.slots.live)

    @property
    def sides(self) -> tuple[str, ...]:
        """The projections before the activation."""
        return ("gate", "up") if self.weights.layout.gated else ("up",)


#: A fused run of all stages: the whole layer.
LayerRun: TypeAlias = Callable[[LayerCall], torch.Tensor]
