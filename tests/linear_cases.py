"""A group of linears that read the same x, on any device, with its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moegraft.adapters.bank import AdapterBank
from moegraft.factor_table import SiteTable
from moegraft.packing import pack_adapter
from moegraft.reference import linear_lora_reference
from moegraft.sites import Site, linear_site
from moegraft.testing import (
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    random_activations,
    random_factors,
)
from moegraft.types import SiteFactors, TokenSlots

#: q, k, v with odd sizes.
SITES = (
    linear_site("q_proj", 43, 67),
    linear_site("k_proj", 43, 16),
    linear_site("v_proj", 43, 33),
)

#: What each slot holds: ranks of q, k and v (a fourth site's are those of q); 0 = no factors.
HELD = ((16, 8, 3), (0, 1, 20), (0, 0, 0), (33, 0, 0), (64, 64, 64), (12, 12, 12))


def bank_tables(
    sites: tuple[Site, ...], dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[tuple[SiteTable, ...], list[list[SiteFactors | None]]]:
    """Return one bank's tables, and per site what its slots hold (on the CPU)."""
    bank = AdapterBank(
        sites, num_slots=len(HELD) + 1, max_rank=64, dtype=dtype, device=device, arena_bytes=1 << 23
    )
    held: list[list[SiteFactors | None]] = [[] for _ in sites]
    for slot, ranks in enumerate(HELD):
        factors: dict[str, SiteFactors] = {}
        for i, site in enumerate(sites):
            rank = ranks[i % len(ranks)]
            scale = 0.5 * slot + i + 1
            found = random_factors(site, rank, scale=scale, seed=seed + 10 * slot + i, dtype=dtype)
            held[i].append(found if rank else None)
            if rank:
                factors[site.name] = found
        bank.write(slot, f"adapter {slot}", pack_adapter(factors, bank.layout, dtype))
    for of_site in held:
        of_site.append(None)
    return tuple(bank.site_table(site.name) for site in sites), held


@dataclass(frozen=True)
class GroupCase:
    """One call of a group.

    Attributes:
        x: ``[T, in]``, NaN in the rows of slot -1.
        bases: ``[T, out_i]`` per linear, what the host has computed.
        deltas: fp64 on the CPU, what must be added.
        idle: bool ``[T]`` per linear, rows without a delta.
    """

    x: torch.Tensor
    tables: tuple[SiteTable, ...]
    slots: TokenSlots
    bases: tuple[torch.Tensor, ...]
    deltas: tuple[torch.Tensor, ...]
    idle: tuple[torch.Tensor, ...]

    def check(self, add: Callable[[list[torch.Tensor]], None]) -> None:
        """Assert that ``add``, called with copies of the bases, adds the deltas in place."""
        outs = [base.clone() for base in self.bases]
        add(outs)
        for out, base, delta, idle in zip(outs, self.bases, self.deltas, self.idle, strict=True):
            expected = base.cpu().double() + delta
            assert_close(out, expected, out.dtype)
            assert_delta_close(out, base, expected, base.cpu().double())
            assert_bit_equal(out.cpu()[idle], base.cpu()[idle], "rows without a delta")


def random_case(
    num_tokens: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    sites: tuple[Site, ...] = SITES,
    token_slots: list[int] | None = None,
) -> GroupCase:
    """Make a case over all slots, some of them empty; ``token_slots`` None = a fixed mix."""
    tables, held = bank_tables(sites, dtype, device, seed)
    slots = token_slots or [(5 * t + t // 3) % (len(HELD) + 2) - 1 for t in range(num_tokens)]
    x = random_activations(num_tokens, sites[0].projections[0].in_features, dtype, seed)
    widths = [site.projections[0].out_features for site in sites]
    deltas = tuple(
        linear_lora_reference(x, of_site, slots, width, torch.float64)
        for of_site, width in zip(held, widths, strict=True)
    )
    x[torch.tensor(slots, dtype=torch.int64) < 0] = torch.nan
    return GroupCase(
        x.to(device),
        tables,
        TokenSlots.of(slots, device),
        tuple(
            random_activations(num_tokens, width, dtype, seed + 1 + i).to(device)
            for i, width in enumerate(widths)
        ),
        deltas,
        tuple(
            torch.tensor([s < 0 or of_site[s] is None for s in slots], dtype=torch.bool)
            for of_site in held
        ),
    )
