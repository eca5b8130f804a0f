"""CPU stages ``lora_shrink``, ``lora_expand`` and ``linear_lora``.

Two ways to group the rows, chosen by the plan:

``gathered``
    each row's factors are gathered by its offset from the arena and multiplied in one ``bmm``:
    a handful of torch calls whatever is live. Best for few rows, such as decode.
``segments``
    one matrix product per (slot, expert) that has rows: reads each factor once. Best for prefill.

A row never touches another adapter's factors in either, so not even NaN can cross.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from moegraft.factors import (
    A_EXPERT_STRIDE,
    A_OFFSET,
    A_ROW_STRIDE,
    B_OFFSET,
    UNIT_BYTES,
    SiteTable,
)
from moegraft.stages import Permutation, RankVectors
from moegraft.types import LINEAR_PROJECTION, TokenSlots

LoraMethod = Literal["gathered", "segments"]


@dataclass(frozen=True)
class _Group:
    """Rows that one batched product serves: all of one rank, or all of one (slot, entry).

    Attributes:
        rows: int64 ``[n]`` row numbers; None = every row, in order.
        slots: int64 ``[n]`` slot of each row.
        entries: int64 ``[n]`` factor entry of each row.
        rank: the live rank of all of them.
        single: True when all rows share one slot and one entry.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    entries: torch.Tensor
    rank: int
    single: bool

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return this group's rows of ``values``."""
        return values if self.rows is None else values[self.rows]


def _rank_groups(
    row_slot: torch.Tensor, entries: torch.Tensor, ranks: list[int], live: tuple[int, ...]
) -> Iterator[_Group]:
    """Yield one group per distinct live rank; rows without a delta are in none."""
    live_ranks = {ranks[s] for s in live}
    has_entry = entries >= 0
    for rank in sorted(live_ranks - {0}):
        if len(live_ranks) == 1:
            wanted = (row_slot >= 0) & has_entry
        else:
            row_rank = torch.tensor(ranks)[row_slot.clamp(min=0)]
            wanted = (row_slot >= 0) & has_entry & (row_rank == rank)
        rows = wanted.nonzero().flatten()
        if rows.shape[0] == row_slot.shape[0]:
            yield _Group(None, row_slot, entries, rank, single=False)
        elif rows.shape[0]:
            yield _Group(rows, row_slot[rows], entries[rows], rank, single=False)


def _segments(group: _Group) -> Iterator[_Group]:
    """Split a group into runs of one slot and one entry each."""
    key = group.slots * (int(group.entries.max()) + 1) + group.entries
    key, order = torch.sort(key, stable=True)
    counts = torch.unique_consecutive(key, return_counts=True)[1].tolist()
    start = 0
    for count in counts:
        part = order[start : start + count]
        rows = part if group.rows is None else group.rows[part]
        yield _Group(rows, group.slots[part], group.entries[part], group.rank, single=True)
        start += count


def _matrices(
    table: SiteTable, projection: int, offset_word: int, width: int, group: _Group
) -> torch.Tensor:
    """Return each row's factor, ``[n, R, width]``; ``[1, R, width]`` when the group is single."""
    records = table.records[:, projection]
    slots, entries = group.slots, group.entries
    if group.single:
        slots, entries = slots[:1], entries[:1]
    arena = table.arena.data
    unit = UNIT_BYTES // arena.element_size()
    expert_stride_word = offset_word + A_EXPERT_STRIDE - A_OFFSET
    row_stride_word = offset_word + A_ROW_STRIDE - A_OFFSET
    offsets = records[slots, offset_word] + entries * (records[slots, expert_stride_word] // unit)
    row_stride = int(records[slots[0], row_stride_word])
    if group.single:
        start = arena.storage_offset() + int(offsets) * unit
        view = arena.as_strided((1, group.rank, width), (row_stride, row_stride, 1), start)
        return view.float()
    # A window that slides over the arena in 16-byte steps: indexing it gathers any factor.
    last = arena.numel() - (group.rank - 1) * row_stride - width
    windows = arena.as_strided(
        (last // unit + 1, group.rank, width), (unit, row_stride, 1), arena.storage_offset()
    )
    return windows[offsets].float()


def _multiply(rows: torch.Tensor, matrices: torch.Tensor, transpose: bool) -> torch.Tensor:
    """``rows[n] @ M[n]`` (or ``M[n].T``), where M has one matrix per row or one for all."""
    if transpose:
        matrices = matrices.transpose(1, 2)
    if matrices.shape[0] == 1:
        return rows @ matrices[0]
    return torch.bmm(rows[:, None], matrices)[:, 0]


def _groups(
    table: SiteTable,
    projection: int,
    row_slot: torch.Tensor,
    row_expert: torch.Tensor | None,
    slots: TokenSlots,
    method: LoraMethod,
) -> list[_Group]:
    """Group the rows that projection number ``projection`` changes."""
    if row_expert is None or table.expert_map is None:
        entries = torch.zeros_like(row_slot)
    else:
        entries = table.expert_map[row_slot.clamp(min=0), row_expert].long()
    ranks = table.ranks[:, projection].tolist()
    groups = _rank_groups(row_slot, entries, ranks, slots.live)
    if method == "gathered":
        return list(groups)
    return [segment for group in groups for segment in _segments(group)]


def lora_shrink(
    rows: torch.Tensor,
    table: SiteTable,
    projections: tuple[str, ...],
    perm: Permutation,
    slots: TokenSlots,
    method: LoraMethod,
) -> RankVectors:
    """See :meth:`moegraft.stages.Stages.lora_shrink`."""
    assert perm.row_to_slot is not None, "lora_shrink called for a base-only batch"
    names = [p.name for p in table.site.projections]
    per_token = projections != ("down",)
    values: list[torch.Tensor] = []
    all_groups: list[list[_Group]] = []
    rows_f32 = rows.float()
    for name in projections:
        i = names.index(name)
        groups = _groups(table, i, perm.row_to_slot, perm.row_to_expert, slots, method)
        all_groups.append(groups)
        if values and all(_shares_a(table, i, s) for s in slots.live):
            values.append(values[-1])
            continue
        width = table.site.projections[i].in_features
        max_rank = max((g.rank for g in groups), default=0)
        value = torch.zeros(perm.num_rows, max_rank)
        for group in groups:
            wanted = group.take(perm.row_to_token) if per_token else group.rows
            inputs = rows_f32 if wanted is None else rows_f32[wanted]
            lora_a = _matrices(table, i, A_OFFSET, width, group)
            product = _multiply(inputs, lora_a, transpose=True)
            if group.rows is None and group.rank == max_rank:
                value = product
            else:
                value[slice(None) if group.rows is None else group.rows, : group.rank] = product
        values.append(value)
    return RankVectors(tuple(values), all_groups)


def _shares_a(table: SiteTable, projection: int, slot: int) -> bool:
    """True when this slot's A is the previous projection's, or the slot has no delta here."""
    before, here = table.records[slot, projection - 1], table.records[slot, projection]
    ranks = table.ranks[slot, projection - 1 : projection + 1].tolist()
    return ranks[0] == ranks[1] and (ranks[1] == 0 or bool(before[A_OFFSET] == here[A_OFFSET]))


def lora_expand(
    ranks: RankVectors,
    table: SiteTable,
    projections: tuple[str, ...],
    perm: Permutation,
    outs: tuple[torch.Tensor, ...],
) -> None:
    """See :meth:`moegraft.stages.Stages.lora_expand`."""
    names = [p.name for p in table.site.projections]
    all_groups = ranks.method
    assert isinstance(all_groups, list)
    for name, value, groups, out in zip(projections, ranks.values, all_groups, outs, strict=True):
        i = names.index(name)
        for group in groups:
            _add(out, _expand(group.take(value)[:, : group.rank], table, i, group), group)


def _expand(rank_rows: torch.Tensor, table: SiteTable, i: int, group: _Group) -> torch.Tensor:
    """``scale * B (A x)`` for a group's rows: fp32 ``[n, out]``."""
    width = table.site.projections[i].out_features
    lora_b = _matrices(table, i, B_OFFSET, width, group)
    delta = _multiply(rank_rows, lora_b, transpose=False)
    return delta * table.scales[:, i][group.slots][:, None]


def _add(out: torch.Tensor, delta: torch.Tensor, group: _Group) -> None:
    """Add fp32 ``delta`` to the group's rows of ``out``, summing in fp32."""
    if group.rows is None:
        out.copy_(out + delta)
    elif out.dtype == torch.float32:
        out.index_add_(0, group.rows, delta)
    else:
        out[group.rows] = (out[group.rows] + delta).to(out.dtype)


def linear_lora(
    x: torch.Tensor, table: SiteTable, slots: TokenSlots, out: torch.Tensor, method: LoraMethod
) -> None:
    """See :meth:`moegraft.stages.Stages.linear_lora`."""
    assert table.site.projections[0].name == LINEAR_PROJECTION
    width = table.site.projections[0].in_features
    for group in _groups(table, 0, slots.slots_i64, None, slots, method):
        lora_a = _matrices(table, 0, A_OFFSET, width, group)
        rank_rows = _multiply(group.take(x).float(), lora_a, transpose=True)
        _add(out, _expand(rank_rows, table, 0, group), group)
