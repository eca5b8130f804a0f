"""CPU run ``lora_shrink_expand`` for small adapters: all live factors side by side in one product.

Once per batch the live adapters' factors of a site, over all experts, are stacked along the rank:
``A [sum R, in]`` and ``B [out, sum R]`` with the scales in B. A step then is two matrix products
with a selection between: each row keeps the ranks of its own adapter and expert, the others become
exact 0. More arithmetic than needed, but the fewest torch calls, which is what small models are
bound by.

A stack must be finite, or 0 times another adapter's B would not be 0: factors with NaN or Inf keep
their ranks in the stack (so nobody else's bits depend on them), as zeros, and the rows that meet
them are made NaN. Where the stack would be large, the caller takes another method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.backends.cpu.host_table import host_table
from moegraft.factor_table import SiteTable
from moegraft.sites import LINEAR_PROJECTION
from moegraft.stages import Permutation
from moegraft.types import SiteFactors, TokenSlots

#: Most elements a site's stack may have (1 MB in fp32).
MAX_STACK_ELEMENTS = 1 << 18
#: Most multiply-adds one call may do: about a millisecond.
MAX_STACK_WORK = 1 << 26

#: Stacks kept per site, for different sets of live adapters; the oldest goes first.
MAX_STACKS = 8

LINEAR = (LINEAR_PROJECTION,)


@dataclass(frozen=True, eq=False)
class Stack:
    """The live factors of one side of a site.

    Attributes:
        lora_a: fp32 ``[in, sum R]``.
        lora_b: fp32 ``[sum R, out]``, scaled; for gate_up in the host's packed columns.
        owner: int64 ``[sum R]``, ``slot * E + expert`` of each rank.
        broken: int64 owners whose factors are not finite.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    owner: torch.Tensor
    broken: torch.Tensor

    def allows(self, num_rows: int) -> bool:
        """True when the products for so many rows are small enough."""
        return num_rows * (self.lora_a.numel() + self.lora_b.numel()) <= MAX_STACK_WORK


def cached_stack(table: SiteTable, projections: tuple[str, ...], slots: TokenSlots) -> Stack | None:
    """Return the stack of the batch's live adapters, None when it would be too large.

    Kept with the decoded table, so later batches with the same adapters find it again.
    """
    stacks = host_table(table).stacks
    key = (projections, slots.live)
    if key not in stacks:
        if len(stacks) >= MAX_STACKS:
            stacks.pop(next(iter(stacks)))
        stacks[key] = _build(table, projections, slots.live)
    stack = stacks[key]
    assert stack is None or isinstance(stack, Stack)
    return stack


def _build(table: SiteTable, projections: tuple[str, ...], live: tuple[int, ...]) -> Stack | None:
    site, num_experts = table.site, table.site.num_experts
    out = site.projection(projections[-1]).out_features
    columns, width = out * len(projections), site.projection(projections[-1]).in_features
    found = [(slot, table.factors(slot)) for slot in live]
    blocks = [block for slot, factors in found for block in _blocks(slot, factors, projections)]
    total = sum(factors.projections[names[0]].rank for _, names, factors in blocks) * num_experts
    if total * (width + columns) > MAX_STACK_ELEMENTS:
        return None
    # [R, E, ..] while filling: one slice per adapter covers all experts.
    lora_a = torch.zeros(total // num_experts, num_experts, width)
    lora_b = torch.zeros(total // num_experts, num_experts, columns)
    owner = torch.zeros(total // num_experts, num_experts, dtype=torch.int64)
    start = 0
    for slot, names, factors in blocks:
        ranks = slice(start, start + factors.projections[names[0]].rank)
        entries = factors.expert_map
        experts = torch.arange(num_experts)
        if entries is not None:
            experts = (entries >= 0).nonzero().flatten()
        for name in names:
            factor = factors.projections[name]
            where = site.layout.columns(name, out) if len(projections) > 1 else slice(None)
            scaled = _of_experts(factor.lora_B, experts, entries).float() * factor.scale
            lora_a[ranks, experts] = (
                _of_experts(factor.lora_A, experts, entries).float().transpose(0, 1)
            )
            view = lora_b[ranks, :, where]
            view[:, experts] = scaled.permute(2, 0, 1)
        owner[ranks] = slot * num_experts + torch.arange(num_experts)
        start = ranks.stop
    lora_a, lora_b, owner = lora_a.flatten(0, 1), lora_b.flatten(0, 1), owner.flatten()
    finite = torch.isfinite(lora_a).all(dim=1) & torch.isfinite(lora_b).all(dim=1)
    broken = owner[~finite].unique()
    lora_a[torch.isin(owner, broken)] = 0.0
    lora_b[torch.isin(owner, broken)] = 0.0
    return Stack(lora_a.t().contiguous(), lora_b, owner, broken)


def _of_experts(
    matrix: torch.Tensor, experts: torch.Tensor, entries: torch.Tensor | None
) -> torch.Tensor:
    """Return a factor ``[Ea, ..]`` for the given experts, ``[len(experts), ..]``."""
    if matrix.shape[0] == 1:
        return matrix.expand(experts.shape[0], *matrix.shape[1:])
    return matrix[experts if entries is None else entries[experts].long()]


def _blocks(
    slot: int, factors: SiteFactors | None, projections: tuple[str, ...]
) -> list[tuple[int, tuple[str, ...], SiteFactors]]:
    """Split one adapter's projections into runs that share their A."""
    found: list[tuple[int, tuple[str, ...], SiteFactors]] = []
    if factors is None:
        return found
    for name in projections:
        if name not in factors.projections:
            continue
        if found:
            _, names, _ = found[-1]
            if factors.projections[names[0]].lora_A is factors.projections[name].lora_A:
                found[-1] = (slot, (*names, name), factors)
                continue
        found.append((slot, (name,), factors))
    return found


def expand_stacked(
    rows: torch.Tensor,
    stack: Stack,
    perm: Permutation,
    slots: TokenSlots,
    out: torch.Tensor,
    per_token: bool,
) -> None:
    """Add every row's delta to fp32 ``out`` ``[N, columns]``.

    ``rows`` is ``[T, in]`` when ``per_token`` (row n reads its token's), else ``[N, in]``.
    """
    row_to_slot = perm.row_to_slot
    assert row_to_slot is not None
    num_experts = perm.expert_ends.shape[0]
    row_owner = torch.add(perm.row_to_expert, row_to_slot, alpha=num_experts)
    ranks = rows.float() @ stack.lora_a
    if per_token:
        ranks = ranks[perm.row_to_token]
    ranks.masked_fill_(row_owner[:, None] != stack.owner, 0.0)
    if stack.broken.shape[0]:
        ranks[torch.isin(row_owner, stack.broken)] = torch.nan
    if slots.has_base_rows:
        # Not even the sign of a zero changes in a row without an adapter.
        delta = ranks @ stack.lora_b
        out.copy_(torch.where((row_to_slot >= 0)[:, None], out + delta, out))
    else:
        out.addmm_(ranks, stack.lora_b)


def linear_stacked(x: torch.Tensor, stack: Stack, slots: TokenSlots, out: torch.Tensor) -> None:
    """Add every row's delta to ``out`` ``[T, out]`` in its own dtype; base rows keep their bits."""
    rows = slots.adapter_rows if slots.has_base_rows else None
    key = (stack, "foreign ranks")
    if key not in slots.cache:
        own = slots.slots_i64 if rows is None else slots.slots_i64[rows]
        slots.cache[key] = (own[:, None] != stack.owner, torch.isin(own, stack.broken))
    foreign, is_broken = slots.cache[key]
    inputs = (x if rows is None else x[rows]).float()
    ranks = (inputs @ stack.lora_a).masked_fill_(foreign, 0.0)
    if stack.broken.shape[0]:
        ranks[is_broken] = torch.nan
    if out.dtype == torch.float32 and rows is None:
        out.addmm_(ranks, stack.lora_b)
    elif out.dtype == torch.float32 and rows is not None:
        out.index_add_(0, rows, ranks @ stack.lora_b)
    else:
        where = slice(None) if rows is None else rows
        out[where] = (out[where] + ranks @ stack.lora_b).to(out.dtype)
