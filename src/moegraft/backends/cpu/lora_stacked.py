"""CPU run ``lora_shrink_expand`` for small adapters: all live ranks side by side in one product.

The live adapters' factors of a site are stacked along the rank, ``A [E, sum R, in]`` and
``B [E, sum R, out]`` with the scales in B, once per batch. A step then is two grouped products
with a selection between: each row keeps the ranks of its own adapter, the others become exact 0.
That is the fewest torch calls possible, which is what small models are bound by.

A stack must be finite, or 0 times another adapter's B would not be 0: factors with NaN or Inf
keep their ranks in the stack (so nobody else's bits depend on them), as zeros, and the rows that
meet them are made NaN. Where the stack would be large, or an adapter covers only some experts, the
caller gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moegraft.backends.cpu.grouped import grouped_mm
from moegraft.backends.cpu.host_table import host_table
from moegraft.factors import SiteTable
from moegraft.stages import Permutation
from moegraft.types import LINEAR_PROJECTION, SiteFactors, TokenSlots

#: Most elements a site's stack may have (2 MB): above, copying the factors is not worth the calls.
MAX_STACK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Stack:
    """The live factors of one side of a site.

    Attributes:
        lora_a: fp32 ``[E, sum R, in]``.
        lora_b: fp32 ``[E, out, sum R]``, scaled; for gate_up in the host's packed columns.
        slot_of: int64 ``[sum R]``, whose rank each column is; -2 for padding.
        broken: slot -> bool ``[E]``, the experts whose factors are not finite.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    slot_of: torch.Tensor
    broken: Mapping[int, torch.Tensor]


def cached_stack(table: SiteTable, projections: tuple[str, ...], slots: TokenSlots) -> Stack | None:
    """Return the stack of the batch's live adapters, None when it can't or should not be built."""
    host = host_table(table)
    key = (table, projections, "stack", host.version)
    if key not in slots.cache:
        partial = any(not host.full[slot] for slot in slots.live)
        slots.cache[key] = None if partial else _build(table, projections, slots.live)
    stack: Stack | None = slots.cache[key]
    return stack


def _build(table: SiteTable, projections: tuple[str, ...], live: tuple[int, ...]) -> Stack | None:
    site, num_experts = table.site, table.site.num_experts
    out = site.projection(projections[-1]).out_features
    columns = out * len(projections)
    width = site.projection(projections[-1]).in_features
    found = [(slot, table.factors(slot)) for slot in live]
    # (slot, projections that share this A, their factors)
    blocks = [block for slot, factors in found for block in _blocks(slot, factors, projections)]
    total = -(-sum(factors.projections[names[0]].rank for _, names, factors in blocks) // 4) * 4
    if num_experts * total * (width + columns) > MAX_STACK_ELEMENTS:
        return None
    lora_a = torch.zeros(num_experts, total, width)
    lora_b = torch.zeros(num_experts, columns, total)
    slot_of = torch.full((total,), -2)
    start = 0
    for slot, names, factors in blocks:
        rank = factors.projections[names[0]].rank
        ranks = slice(start, start + rank)
        lora_a[:, ranks] = factors.projections[names[0]].lora_A
        for name in names:
            factor = factors.projections[name]
            where = site.layout.columns(name, out) if len(projections) > 1 else slice(None)
            lora_b[:, where, ranks] = factor.lora_B.float() * factor.scale
        slot_of[ranks] = slot
        start += rank
    return _finite(Stack(lora_a, lora_b, slot_of, {}))


def _finite(stack: Stack) -> Stack:
    """Return the stack with factors that hold NaN or Inf set to 0 and noted in ``broken``."""
    finite = torch.isfinite(stack.lora_a).all(dim=2) & torch.isfinite(stack.lora_b).all(dim=1)
    if bool(finite.all()):
        return stack
    broken: dict[int, torch.Tensor] = {}
    for slot in stack.slot_of[~finite.all(dim=0)].unique().tolist():
        ranks = stack.slot_of == slot
        bad = ~finite[:, ranks].all(dim=1)
        where = bad[:, None] & ranks
        stack.lora_a[where] = 0.0
        stack.lora_b.transpose(1, 2)[where] = 0.0
        broken[slot] = bad
    return Stack(stack.lora_a, stack.lora_b, stack.slot_of, broken)


def _blocks(
    slot: int, factors: SiteFactors | None, projections: tuple[str, ...]
) -> list[tuple[int, tuple[str, ...], SiteFactors]]:
    """Split one adapter's projections into runs that share their A."""
    found: list[tuple[int, tuple[str, ...], SiteFactors]] = []
    for name in projections if factors is not None else ():
        assert factors is not None
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
) -> None:
    """Add every row's delta to fp32 ``out`` ``[N, columns]``; rows is ``[N, in]``."""
    row_to_slot = perm.row_to_slot
    assert row_to_slot is not None
    ranks = grouped_mm(rows.float(), stack.lora_a, None, perm)
    ranks = torch.where(row_to_slot[:, None] == stack.slot_of, ranks, 0.0)
    delta = grouped_mm(ranks, stack.lora_b, None, perm)
    for slot, bad in stack.broken.items():
        delta[(row_to_slot == slot) & bad[perm.row_to_expert]] = torch.nan
    if slots.has_base_rows:
        # Not even the sign of a zero changes in a row without an adapter.
        out.copy_(torch.where((row_to_slot >= 0)[:, None], out + delta, out))
    else:
        out.add_(delta)


def linear_stacked(x: torch.Tensor, stack: Stack, slots: TokenSlots, out: torch.Tensor) -> None:
    """Add every row's delta to ``out`` ``[T, out]`` in its own dtype; base rows keep their bits."""
    rows = slots.adapter_rows if slots.has_base_rows else None
    mask_key = (id(stack), "linear mask")
    if mask_key not in slots.cache:
        own = slots.slots_i64 if rows is None else slots.slots_i64[rows]
        slots.cache[mask_key] = own[:, None] == stack.slot_of
    inputs = (x if rows is None else x[rows]).float()
    ranks = torch.where(slots.cache[mask_key], inputs @ stack.lora_a[0].t(), 0.0)
    delta = ranks @ stack.lora_b[0].t()
    for slot in stack.broken:
        own = slots.slots_i64 if rows is None else slots.slots_i64[rows]
        delta[own == slot] = torch.nan
    if out.dtype == torch.float32:
        if rows is None:
            out.add_(delta)
        else:
            out.index_add_(0, rows, delta)
    else:
        where = slice(None) if rows is None else rows
        out[where] = (out[where] + delta).to(out.dtype)


LINEAR = (LINEAR_PROJECTION,)
