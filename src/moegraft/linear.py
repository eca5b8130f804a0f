"""The adapters' part of dense linears and routers; the base product stays the host's."""

from __future__ import annotations

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
        """True when any live adapter has a factor here (reads the table on the host)."""
        ranks = self.table.ranks[:, 0].tolist()
        return any(ranks[slot] > 0 for slot in slots.live)

    def add_to(self, out: torch.Tensor, x: torch.Tensor, slots: TokenSlots) -> None:
        """Add the delta to ``out`` in place; rows of slot -1 keep their bits.

        Args:
            out: ``[T, out_features]`` result of the base linear, any float dtype.
            x: ``[T, in_features]`` its input.
            slots: adapter slot per row.

        Raises:
            MoegraftError: rows, widths or slots disagree.
        """
        if not (out.shape[0] == x.shape[0] == slots.num_tokens):
            raise MoegraftError(
                f"{self.table.site.name}: {x.shape[0]} input rows, {out.shape[0]} output rows and "
                f"{slots.num_tokens} adapter slots must be equal."
            )
        sizes = self.table.site.projections[0]
        if (x.shape[1:], out.shape[1:]) != ((sizes.in_features,), (sizes.out_features,)):
            raise MoegraftError(
                f"{self.table.site.name}: x has shape {tuple(x.shape)} and out "
                f"{tuple(out.shape)}; expected [T, {sizes.in_features}] and "
                f"[T, {sizes.out_features}]."
            )
        self.table.check_live(slots)
        if slots.live:
            self.plan(x.shape[0]).stages.linear_lora(x, self.table, slots, out)


def _plan_linear(site: Site, where: tuple[str, str], backend: str | None, num_tokens: int) -> Plan:
    sizes = site.projections[0]
    problem = Problem.of_linear(*where, num_tokens, sizes.in_features, sizes.out_features)
    return make_plan(problem, backend)
