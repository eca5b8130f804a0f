"""CPU stage ``linear_lora``: gathered per row for few rows, one product per slot for many."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.backends.cpu.host_table import HostTable, Shape, host_table
from moegraft.factor_table import SiteTable
from moegraft.types import TokenSlots


@dataclass(frozen=True)
class _Rows:
    """The rows of a group of slots at one site, with their factors' places.

    Attributes:
        rows: int64 ``[n]``; None = every row, in order.
        a_offsets, b_offsets: int64 ``[n]`` in 16-byte units, or ``[1]`` when all rows share them.
        scale: fp32, same length, shaped to multiply rank vectors.
        shape: rank and strides.
    """

    rows: torch.Tensor | None
    a_offsets: torch.Tensor
    b_offsets: torch.Tensor
    scale: torch.Tensor
    shape: Shape


def _rows_of(host: HostTable, slots: TokenSlots, per_slot: bool) -> list[_Rows]:
    projection = host.projections[0]
    found = []
    for shape, group in projection.groups(slots.live):
        for members in [(slot,) for slot in group] if per_slot else [group]:
            wanted = torch.isin(slots.slots_i64, torch.tensor(members))
            rows = wanted.nonzero().flatten()
            own = slots.slots_i64[rows][:1] if per_slot else slots.slots_i64[rows]
            found.append(
                _Rows(
                    rows=None if rows.shape[0] == slots.num_tokens else rows,
                    a_offsets=projection.a_base[own],
                    b_offsets=projection.b_base[own],
                    scale=projection.scale[own][:, None, None],
                    shape=shape,
                )
            )
    return found


def linear_lora(
    x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor, gathered: bool
) -> None:
    """See :meth:`moegraft.stages.Stages.linear_lora`; ``gathered`` picks the method."""
    host = host_table(table)
    groups = slots.derived(
        (table, "linear", gathered),
        host.version,
        lambda: _rows_of(host, slots, per_slot=not gathered),
    )
    sizes = table.site.projections[0]
    for group in groups:
        shape = group.shape
        a_windows = host.windows(shape.rank, sizes.in_features, shape.a_row_stride)
        b_windows = host.windows(shape.rank, sizes.out_features, shape.b_row_stride)
        inputs = (x if group.rows is None else x[group.rows]).float()
        lora_a, lora_b = a_windows[group.a_offsets].float(), b_windows[group.b_offsets].float()
        if gathered:
            shrunk = torch.bmm(lora_a, inputs[:, :, None]) * group.scale
            delta = torch.bmm(shrunk.transpose(1, 2), lora_b)[:, 0]
        else:
            delta = (inputs @ lora_a[0].t() * group.scale[0]) @ lora_b[0]
        if out.dtype != torch.float32:
            rows = slice(None) if group.rows is None else group.rows
            out[rows] = (out[rows] + delta).to(out.dtype)
        elif group.rows is None:
            out.add_(delta)
        else:
            out.index_add_(0, group.rows, delta)
