"""The stages of the cpp backend: those of the CPU backend, with linears in the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.backends.cpp.layer import table_struct, unit_columns
from moegraft.backends.cpp.library import DTYPES, Library, LinearStruct
from moegraft.backends.cpu import CpuStages, check_not_captured
from moegraft.factor_table import SiteTable
from moegraft.types import TokenSlots


@dataclass(frozen=True, kw_only=True)
class CompiledStages(CpuStages):
    """The stage functions of :class:`moegraft.stages.Stages`, ``linear_lora`` compiled.

    Attributes:
        library: whose functions.
    """

    library: Library

    def linear_lora(
        self, x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor
    ) -> None:
        """See :meth:`moegraft.stages.Stages.linear_lora`."""
        check_not_captured(slots)
        if out.dtype not in DTYPES or x.dtype not in DTYPES:
            super().linear_lora(x, table, slots, out)
            return
        x = unit_columns(x)
        target = unit_columns(out)  # a copy for views that memory does not hold as they are
        sizes = table.site.projections[0]
        arena = table.arena.data
        self.library.linear_lora(
            LinearStruct(
                x=x.data_ptr(),
                x_dtype=DTYPES[x.dtype],
                x_stride=x.stride(0),
                out=target.data_ptr(),
                out_dtype=DTYPES[target.dtype],
                out_stride=target.stride(0),
                slots=slots.slots.data_ptr(),
                num_tokens=x.shape[0],
                in_features=sizes.in_features,
                out_features=sizes.out_features,
                table=table_struct(table, arena),
                threads=torch.get_num_threads(),
            )
        )
        del arena  # until here: a bank that grows meanwhile lets go of it
        if target is not out:
            out.copy_(target)
