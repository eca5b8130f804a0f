"""CPU stages ``lora_shrink`` and ``lora_expand``: one product per (slot, expert) that has rows.

Reads each factor once, whatever the number of rows: right for prefill. A row only ever meets its
own adapter's factors, so not even NaN can cross to another row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moegraft.backends.cpu.host_table import HostTable, Shape, host_table
from moegraft.factor_table import SiteTable
from moegraft.stages import Permutation, RankVectors
from moegraft.types import TokenSlots


@dataclass(frozen=True)
class Segment:
    """Rows of one slot and one factor entry.

    Attributes:
        rows: int64 ``[n]`` row numbers.
        slot, entry: whose factors.
        shape: rank and strides of the factors.
    """

    rows: torch.Tensor
    slot: int
    entry: int
    shape: Shape


def _segments(host: HostTable, projection: int, perm: Permutation) -> Iterator[Segment]:
    """Yield the segments of one projection; rows without a delta are in none."""
    row_to_slot = perm.row_to_slot
    assert row_to_slot is not None and host.expert_map is not None
    entries = host.expert_map[row_to_slot.clamp(min=0), perm.row_to_expert]
    has_delta = torch.tensor([s is not None for s in host.projections[projection].shapes])
    wanted = (row_to_slot >= 0) & (entries >= 0) & has_delta[row_to_slot.clamp(min=0)]
    rows = wanted.nonzero().flatten()
    num_entries = host.expert_map.shape[1]
    key = row_to_slot[rows] * num_entries + entries[rows]
    key, order = torch.sort(key, stable=True)
    rows = rows[order]
    keys, counts = torch.unique_consecutive(key, return_counts=True)
    start = 0
    for value, count in zip(keys.tolist(), counts.tolist(), strict=True):
        slot, entry = divmod(value, num_entries)
        shape = host.projections[projection].shapes[slot]
        assert shape is not None
        yield Segment(rows[start : start + count], slot, entry, shape)
        start += count


def factor_a(host: HostTable, table: SiteTable, i: int, segment: Segment) -> torch.Tensor:
    """Return A of a segment as fp32 ``[R, in]``."""
    projection, shape = host.projections[i], segment.shape
    offset = projection.a_base[segment.slot] + segment.entry * projection.a_step[segment.slot]
    width = table.site.projections[i].in_features
    return host.windows(shape.rank, width, shape.a_row_stride)[int(offset)].float()


def factor_b(host: HostTable, table: SiteTable, i: int, segment: Segment) -> torch.Tensor:
    """Return B of a segment as fp32 ``[R, out]`` with its scale applied."""
    projection, shape = host.projections[i], segment.shape
    offset = projection.b_base[segment.slot] + segment.entry * projection.b_step[segment.slot]
    width = table.site.projections[i].out_features
    matrix = host.windows(shape.rank, width, shape.b_row_stride)[int(offset)].float()
    return matrix * projection.scale[segment.slot]


def lora_shrink(
    rows: torch.Tensor,
    table: SiteTable,
    projections: tuple[str, ...],
    perm: Permutation,
    slots: TokenSlots,
) -> RankVectors:
    """See :meth:`moegraft.stages.Stages.lora_shrink`."""
    host = host_table(table)
    names = [p.name for p in table.site.projections]
    per_token = projections != ("down",)
    rows_f32 = rows.float()
    values: list[torch.Tensor] = []
    all_segments: list[list[Segment]] = []
    for name in projections:
        i = names.index(name)
        segments = list(_segments(host, i, perm))
        all_segments.append(segments)
        shares = host.projections[i].shares_a
        if values and all(shares[segment.slot] for segment in segments):
            values.append(values[-1])
            continue
        max_rank = max((segment.shape.rank for segment in segments), default=0)
        value = torch.zeros(perm.num_rows, max_rank, dtype=torch.float32)
        for segment in segments:
            inputs = perm.row_to_token[segment.rows] if per_token else segment.rows
            product = rows_f32[inputs] @ factor_a(host, table, i, segment).t()
            value[segment.rows, : segment.shape.rank] = product
        values.append(value)
    return RankVectors(tuple(values), all_segments)


def lora_expand(
    ranks: RankVectors,
    table: SiteTable,
    projections: tuple[str, ...],
    perm: Permutation,
    outs: tuple[torch.Tensor, ...],
) -> None:
    """See :meth:`moegraft.stages.Stages.lora_expand`."""
    host = host_table(table)
    names = [p.name for p in table.site.projections]
    segments_of = ranks.method
    assert isinstance(segments_of, list)
    for name, value, segments, out in zip(
        projections, ranks.values, segments_of, outs, strict=True
    ):
        i = names.index(name)
        for segment in segments:
            rank_rows = value[segment.rows, : segment.shape.rank]
            delta = rank_rows @ factor_b(host, table, i, segment)
            out.index_add_(0, segment.rows, delta)
