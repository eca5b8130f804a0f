"""The adapters' part of dense linears and routers; the base product stays the host's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable
from moegraft.layer import MAX_PLANS
from moegraft.plan import Plan, make_plan
from moegraft.problem import Problem
from moegraft.sites import Site
from moegraft.types import TokenSlots


class LinearLora:
    """The adapters' part of a dense linear or router; the base product stays the host's.

    Args:
        table: where the factors are.
        dtype: dtype of the linear's weight; device: where it lives. Both only steer the plan.
        backend: force a backend by name.

    Raises:
        PlanError: no backend can run it; raised now.
    """

    def __init__(
        self,
        table: SiteTable,
        dtype: torch.dtype,
        device: torch.device,
        backend: str | None = None,
    ) -> None:
        self.table = table
        where = (str(dtype).removeprefix("torch."), device.type)
        self._plan = lru_cache(MAX_PLANS)(partial(_plan_linear, table.site, where, backend))
        self.plan(num_tokens=1)

    def plan(self, num_tokens: int) -> Plan:
        """Return the plan for T tokens."""
        return self._plan(num_tokens)

    def has_delta(self, slots: TokenSlots) -> bool:
        """True when any live adapter has a factor here; reads the host's memory only."""
        return self.table.has_delta(slots)

    def add_to(self, out: torch.Tensor, x: torch.Tensor, slots: TokenSlots) -> None:
        """Add the delta to ``out`` in place; rows of slot -1 keep their bits.

        Args:
            out: ``[T, out_features]`` result of the base linear, any float dtype.
            x: ``[T, in_features]`` its input.
            slots: adapter slot per row.

        Raises:
            MoegraftError: rows, widths or slots disagree.
        """
        self.check(out, x, slots)
        if slots.live:
            self.plan(x.shape[0]).stages.linear_lora(x, self.table, slots, out)

    def check(self, out: torch.Tensor, x: torch.Tensor, slots: TokenSlots) -> None:
        """Raise :class:`MoegraftError` unless :meth:`add_to` can take these."""
        self.check_sizes(out, x, slots)
        self.table.check_live(slots)

    def check_sizes(self, out: torch.Tensor, x: torch.Tensor, slots: TokenSlots) -> None:
        """Raise :class:`MoegraftError` unless rows and widths agree."""
        num_tokens, sizes = slots.num_tokens, self.table.site.projections[0]
        if x.shape == (num_tokens, sizes.in_features) and out.shape == (
            num_tokens,
            sizes.out_features,
        ):
            return
        if not (out.shape[0] == x.shape[0] == slots.num_tokens):
            raise MoegraftError(
                f"{self.table.site.name}: {x.shape[0]} input rows, {out.shape[0]} output rows and "
                f"{slots.num_tokens} adapter slots must be equal."
            )
        raise MoegraftError(
            f"{self.table.site.name}: x has shape {tuple(x.shape)} and out {tuple(out.shape)}; "
            f"expected [T, {sizes.in_features}] and [T, {sizes.out_features}]."
        )


class LinearLoraGroup:
    """Linears that read the same x, such as q, k and v: on a GPU one launch serves up to four.

    Args:
        linears: one or more; the first one's plan serves all.

    Raises:
        MoegraftError: they differ in their input size or their backend.

    Example: an engine whose ``qkv = W x`` is one product passes its columns, as views:
    ``group.add_to(qkv.split([q_size, k_size, v_size], dim=1), x, slots)``.
    """

    def __init__(self, linears: Sequence[LinearLora]) -> None:
        self.linears = tuple(linears)
        kinds = {
            (linear.table.site.projections[0].in_features, linear.plan(1).backend)
            for linear in self.linears
        }
        if len(kinds) != 1:
            names = ", ".join(linear.table.site.name for linear in self.linears)
            raise MoegraftError(
                f"A group of linears ({names}) needs one input size and one backend; "
                f"got {sorted(kinds)}."
            )
        self._tables = tuple(linear.table for linear in self.linears)
        # Slots that one table can take, all of its size on its device can.
        alike = {(table.num_slots, table.records.device): table for table in self._tables}
        self._unlike = tuple(alike.values())

    def add_to(self, outs: Sequence[torch.Tensor], x: torch.Tensor, slots: TokenSlots) -> None:
        """Add each linear's delta to its out in place; rows of slot -1 keep their bits.

        Args:
            outs: per linear ``[T, out_features]``, all base products done. They may be columns of
                one tensor, and may not overlap.
            x: ``[T, in_features]`` their input.
            slots: adapter slot per row.

        Raises:
            MoegraftError: rows, widths, slots or the number of outs disagree; nothing has changed.
        """
        if len(outs) != len(self.linears):
            raise MoegraftError(f"{len(self.linears)} linears got {len(outs)} outputs.")
        for linear, out in zip(self.linears, outs, strict=True):
            linear.check_sizes(out, x, slots)
        for table in self._unlike:
            table.check_live(slots)
        if slots.live:
            stages = self.linears[0].plan(x.shape[0]).stages
            stages.linear_lora_group(x, self._tables, slots, outs)


def _plan_linear(site: Site, where: tuple[str, str], backend: str | None, num_tokens: int) -> Plan:
    sizes = site.projections[0]
    problem = Problem.of_linear(*where, num_tokens, sizes.in_features, sizes.out_features)
    return make_plan(problem, backend)
