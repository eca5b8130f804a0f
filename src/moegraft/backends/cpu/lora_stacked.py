"""CPU run ``lora_shrink_expand`` for small adapters: live factors copied side by side, once.

Once per set of live adapters their factors of a site are stacked, ``A [L, E, R, in]`` and
``B [L, E, R, out]`` with the scales in B, gate and up together. A step then takes the fewest torch
calls there can be, which is what small models are bound by:

- few rows: each row's factors are picked by its adapter and expert and multiplied in one ``bmm``;
- many rows: all rows meet all ranks in one product, and keep those of their own adapter and
  expert; the others become exact 0. More arithmetic than needed, but two products in all.

A stack must be finite, or 0 times another adapter's B would not be 0: factors with NaN or Inf keep
their place in the stack (so nobody else's bits depend on them), as zeros, and the rows that meet
them are made NaN. Where the stack would be large, the caller takes another method.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
#: Up to so many rows, factors are picked per row.
MAX_PICKED_ROWS = 64
#: Stacks kept per site, for different sets of live adapters; the oldest goes first.
MAX_STACKS = 8

_MISSING = object()

LINEAR = (LINEAR_PROJECTION,)


@dataclass(frozen=True, eq=False)
class Stack:
    """The live factors of one side of a site. An *owner* is ``position * E + expert``.

    Attributes:
        lora_a: fp32 ``[L*E, R, in]``, L live adapters; ranks past an adapter's own are 0.
        lora_b: fp32 ``[L*E, R, out]``, scaled; for gate_up in the host's packed columns.
        position: int64 ``[S + 1]``, slot -> position among the live ones; the last entry, which
            slot -1 finds, is -1.
        broken: int64 owners whose factors are not finite.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    position: torch.Tensor
    broken: torch.Tensor

    def allows(self, num_rows: int) -> bool:
        """True when the products for so many rows are small enough."""
        return num_rows * (self.lora_a.numel() + self.lora_b.numel()) <= MAX_STACK_WORK

    @cached_property
    def owner_of_rank(self) -> torch.Tensor:
        """int64 ``[L*E*R]``."""
        with torch.inference_mode(False):
            return torch.arange(self.lora_a.shape[0]).repeat_interleave(self.lora_a.shape[1])

    @cached_property
    def flat_a(self) -> torch.Tensor:
        """``[in, L*E*R]``."""
        with torch.inference_mode(False):
            return self.lora_a.flatten(0, 1).t().contiguous()

    @cached_property
    def flat_b(self) -> torch.Tensor:
        """``[L*E*R, out]``."""
        return self.lora_b.flatten(0, 1)


def cached_stack(table: SiteTable, projections: tuple[str, ...], slots: TokenSlots) -> Stack | None:
    """Return the stack of the batch's live adapters, None when it would be too large.

    Kept with the decoded table, so later batches with the same adapters find it again.
    """
    stacks = host_table(table).stacks
    key = (projections, slots.live)
    # Other threads may add and evict meanwhile: nothing is looked up twice.
    stack = stacks.get(key, _MISSING)
    if stack is _MISSING:
        with torch.inference_mode(False):
            stack = _build(table, projections, slots.live)
        while len(stacks) >= MAX_STACKS:
            stacks.pop(next(iter(list(stacks)), None), None)
        stacks[key] = stack
    assert stack is None or isinstance(stack, Stack)
    return stack


def _build(table: SiteTable, projections: tuple[str, ...], live: tuple[int, ...]) -> Stack | None:
    site, num_experts = table.site, table.site.num_experts
    out = site.projection(projections[-1]).out_features
    columns, width = out * len(projections), site.projection(projections[-1]).in_features
    found = [table.factors(slot) for slot in live]
    blocks = [[] if factors is None else _blocks(factors, projections) for factors in found]
    ranks = [sum(block[0][1] for block in own) for own in blocks]
    max_rank = max([1, *ranks])
    if len(live) * num_experts * max_rank * (width + columns) > MAX_STACK_ELEMENTS:
        return None
    shape = (len(live), num_experts, max_rank)
    lora_a = torch.zeros(*shape, width, dtype=torch.float32)
    lora_b = torch.zeros(*shape, columns, dtype=torch.float32)
    for i, (factors, own) in enumerate(zip(found, blocks, strict=True)):
        if factors is None:
            continue
        experts, entries = torch.arange(num_experts), factors.expert_map
        if entries is not None:
            experts = (entries >= 0).nonzero().flatten()
        start = 0
        for block in own:
            where = slice(start, start + block[0][1])
            for name, _ in block:
                factor = factors.projections[name]
                own_columns = slice(None)
                if len(projections) > 1:
                    own_columns = site.layout.columns(name, out)
                own_b = _of_experts(factor.lora_B, experts, entries).float() * factor.scale
                lora_a[i, experts, where] = _of_experts(factor.lora_A, experts, entries).float()
                lora_b[i, :, where, own_columns][experts] = own_b.transpose(1, 2)
            start = where.stop
    lora_a, lora_b = lora_a.flatten(0, 1), lora_b.flatten(0, 1)
    finite = torch.isfinite(lora_a).flatten(1).all(1) & torch.isfinite(lora_b).flatten(1).all(1)
    lora_a[~finite] = 0.0
    lora_b[~finite] = 0.0
    position = torch.full((table.num_slots + 1,), -1)
    position[list(live)] = torch.arange(len(live))
    return Stack(lora_a, lora_b, position, (~finite).nonzero().flatten())


def _of_experts(
    matrix: torch.Tensor, experts: torch.Tensor, entries: torch.Tensor | None
) -> torch.Tensor:
    """Return a factor ``[Ea, ..]`` for the given experts, ``[len(experts), ..]``."""
    if matrix.shape[0] == 1:
        return matrix.expand(experts.shape[0], *matrix.shape[1:])
    return matrix[experts if entries is None else entries[experts].long()]


def _blocks(factors: SiteFactors, projections: tuple[str, ...]) -> list[list[tuple[str, int]]]:
    """Split one adapter's projections into runs (name, rank) that share their A."""
    found: list[list[tuple[str, int]]] = []
    for name in projections:
        factor = factors.projections.get(name)
        if factor is None:
            continue
        if found and factors.projections[found[-1][0][0]].lora_A is factor.lora_A:
            found[-1].append((name, factor.rank))
        else:
            found.append([(name, factor.rank)])
    return found


def expand_stacked(
    rows: torch.Tensor,
    stack: Stack,
    perm: Permutation,
    slots: TokenSlots,
    out: torch.Tensor,
    per_token: bool,
) -> None:
    """Add every row's delta to fp32 ``out`` ``[N, columns]``; other rows keep their bits.

    ``rows`` is ``[T, in]`` when ``per_token`` (row n reads its token's), else ``[N, in]``.
    """
    assert perm.row_to_slot is not None
    num_experts = perm.expert_ends.shape[0]
    position = stack.position[perm.row_to_slot]
    owner = torch.add(perm.row_to_expert, position, alpha=num_experts)
    inputs = (rows[perm.row_to_token] if per_token else rows).float()
    if not slots.has_base_rows:
        out.add_(_delta(inputs, owner, stack))
        return
    # Rows without an adapter are computed with anyone's factors, and not selected.
    delta = _delta(inputs, owner.clamp_(min=0), stack)
    out.copy_(torch.where((position >= 0)[:, None], out + delta, out))


def _delta(inputs: torch.Tensor, owner: torch.Tensor, stack: Stack) -> torch.Tensor:
    """Return ``B[owner_n] (A[owner_n] inputs_n)``, fp32 ``[n, out]``."""
    if inputs.shape[0] <= MAX_PICKED_ROWS:
        ranks = torch.bmm(stack.lora_a.index_select(0, owner), inputs[:, :, None])
        picked_b = stack.lora_b.index_select(0, owner)
        delta = torch.bmm(ranks.transpose(1, 2), picked_b)[:, 0]
    else:
        all_ranks = inputs @ stack.flat_a
        all_ranks.masked_fill_(owner[:, None] != stack.owner_of_rank, 0.0)
        delta = all_ranks @ stack.flat_b
    if stack.broken.shape[0]:
        delta[torch.isin(owner, stack.broken)] = torch.nan
    return delta


def linear_stacked(
    x: torch.Tensor, stack: Stack, slots: TokenSlots, out: torch.Tensor, version: int
) -> None:
    """Add every row's delta to ``out`` ``[T, out]`` in its own dtype; base rows keep their bits.

    ``version`` is that of the factor table the stack was built from.
    """

    def foreign_ranks() -> tuple[torch.Tensor, torch.Tensor]:
        own = stack.position[slots.slots_i64]
        return own[:, None] != stack.owner_of_rank, own

    # Masks of stacks of the same shape over the same live slots are the same.
    key = ("foreign ranks", stack.owner_of_rank.shape)
    foreign, own = slots.derived(key, version, foreign_ranks)
    ranks = (x.float() @ stack.flat_a).masked_fill_(foreign, 0.0)
    if stack.broken.shape[0]:
        ranks[torch.isin(own, stack.broken)] = torch.nan
    if out.dtype != torch.float32:
        changed = (out + ranks @ stack.flat_b).to(out.dtype)
    elif not slots.has_base_rows:
        out.addmm_(ranks, stack.flat_b)
        return
    else:
        changed = torch.addmm(out, ranks, stack.flat_b)
    out.copy_(torch.where(slots.has_adapter[:, None], changed, out))
