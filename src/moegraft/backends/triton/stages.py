"""The GPU backend's table of stage functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moegraft.backends.triton import linear_lora as linear
from moegraft.backends.triton.device import device_facts
from moegraft.factor_table import SiteTable
from moegraft.types import TokenSlots


class TritonStages:
    """The stage functions of :class:`moegraft.stages.Stages` on a GPU."""

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


STAGES = TritonStages()
