"""CPU run ``lora_shrink_expand``: both LoRA stages in one go, for few rows.

Each pair's factors are gathered by their offsets and multiplied in one ``bmm``: a fixed handful of
torch calls per projection whatever is live. What depends only on the batch's slots is cached with
them, so a decode loop computes it once. A pair only ever meets its own adapter's factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.backends.cpu.host_table import HostProjection, HostTable, Shape, host_table
from moegraft.factor_table import SiteTable
from moegraft.stages import Permutation
from moegraft.types import TokenSlots


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a group of slots, and what their factors have in common.

    Attributes:
        members: the slots of the group.
        pairs: int64 ``[n]``; None = every pair, in order.
        tokens: int64 ``[n]``.
        slots: int64 ``[n]``.
        shape: rank and strides.
        full: True when every slot of the group has entry e for expert e.
        a_base, a_step, b_base, b_step, scale: ``[n]`` of one projection, see HostProjection.
    """

    members: tuple[int, ...]
    pairs: torch.Tensor | None
    tokens: torch.Tensor
    slots: torch.Tensor
    shape: Shape
    full: bool
    a_base: torch.Tensor
    a_step: torch.Tensor
    b_base: torch.Tensor
    b_step: torch.Tensor
    scale: torch.Tensor
    shares_a: bool


def _pairs_of(
    host: HostTable, projection: HostProjection, slots: TokenSlots, top_k: int
) -> list[_Pairs]:
    """Group the pairs of a batch by the shape of their factors."""
    found = []
    for shape, group in projection.groups(slots.live):
        if len(group) == len(slots.live):
            wanted = slots.slots_i64 >= 0
        else:
            wanted = torch.isin(slots.slots_i64, torch.tensor(group))
        tokens = wanted.nonzero().flatten()
        everything = tokens.shape[0] == slots.num_tokens
        pair_tokens = tokens.repeat_interleave(top_k)
        choice = torch.arange(top_k).repeat(tokens.shape[0])
        own = slots.slots_i64[pair_tokens]
        found.append(
            _Pairs(
                members=group,
                pairs=None if everything else pair_tokens * top_k + choice,
                tokens=pair_tokens,
                slots=own,
                shape=shape,
                full=all(host.full[s] for s in group),
                a_base=projection.a_base[own],
                a_step=projection.a_step[own],
                b_base=projection.b_base[own],
                b_step=projection.b_step[own],
                scale=projection.scale[own][:, None, None],
                shares_a=all(projection.shares_a[s] for s in group),
            )
        )
    return found


def _cached_pairs(
    table: SiteTable, host: HostTable, i: int, slots: TokenSlots, top_k: int
) -> list[_Pairs]:
    return slots.derived(
        (table, i, top_k),
        host.version,
        lambda: _pairs_of(host, host.projections[i], slots, top_k),
    )


def lora_shrink_expand(
    rows: torch.Tensor,
    table: SiteTable,
    projections: tuple[str, ...],
    perm: Permutation,
    slots: TokenSlots,
    outs: tuple[torch.Tensor, ...],
) -> None:
    """See :meth:`moegraft.stages.Stages.lora_shrink_expand`."""
    host = host_table(table)
    names = [p.name for p in table.site.projections]
    rows_f32 = rows.float()
    shrunk: list[torch.Tensor] = []
    shrunk_for: list[tuple[int, ...]] = []
    for name, out in zip(projections, outs, strict=True):
        i = names.index(name)
        groups = _cached_pairs(table, host, i, slots, perm.top_k)
        members = [group.members for group in groups]
        reuse = members == shrunk_for and all(group.shares_a for group in groups)
        if not reuse:
            shrunk, shrunk_for = [], members
        for g, group in enumerate(groups):
            selected = _select(group, host, perm)
            if selected is None:
                if not reuse:
                    shrunk.append(rows_f32.new_empty(0))
                continue
            out_rows, entries, keep = selected
            if not reuse:
                tokens = group.tokens if keep is None else group.tokens[keep]
                inputs = rows_f32[out_rows if projections == ("down",) else tokens]
                a_base, a_step = _kept(keep, group.a_base, group.a_step)
                offsets = torch.addcmul(a_base, entries, a_step)
                width = table.site.projections[i].in_features
                windows = host.windows(group.shape.rank, width, group.shape.a_row_stride)
                shrunk.append(torch.bmm(windows[offsets].float(), inputs[:, :, None]))
            b_base, b_step, scale = _kept(keep, group.b_base, group.b_step, group.scale)
            offsets = torch.addcmul(b_base, entries, b_step)
            width = table.site.projections[i].out_features
            windows = host.windows(group.shape.rank, width, group.shape.b_row_stride)
            scaled = (shrunk[g] * scale).transpose(1, 2)
            delta = torch.bmm(scaled, windows[offsets].float())[:, 0]
            out.index_add_(0, out_rows, delta)


def _select(
    group: _Pairs, host: HostTable, perm: Permutation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Return (rows, factor entries, which pairs to keep or None for all); None = nothing to do."""
    if group.pairs is None:
        out_rows, experts = perm.pair_to_row, perm.pair_to_expert
    else:
        out_rows, experts = perm.pair_to_row[group.pairs], perm.pair_to_expert[group.pairs]
    complete = perm.num_rows == perm.num_tokens * perm.top_k
    if complete and group.full:
        return out_rows, experts, None
    assert host.expert_map is not None
    local, num_experts = out_rows >= 0, host.expert_map.shape[1]
    entries = torch.where(
        local, host.expert_map[group.slots, experts.clamp(0, num_experts - 1)], -1
    )
    keep = (entries >= 0).nonzero().flatten()
    if not keep.shape[0]:
        return None
    return out_rows[keep], entries[keep], keep


def _kept(keep: torch.Tensor | None, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values if keep is None else tuple(value[keep] for value in values)
