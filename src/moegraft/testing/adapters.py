"""Adapters as the store takes them, without any file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moegraft.adapters import BindReport, BoundAdapter
from moegraft.adapters.report import ProjectionReport, SiteReport
from moegraft.sites import Site
from moegraft.testing.compare import assert_bit_equal
from moegraft.testing.generate import FactorKind, random_factors
from moegraft.types import LoraFactor, SiteFactors


def bound_adapter(factors: Mapping[str, SiteFactors], origin: str = "test") -> BoundAdapter:
    """Wrap factors by site name as if they had been read from a file and bound in full."""
    reports = [
        SiteReport(
            site=name,
            kind="experts",
            num_experts=1,
            projections={
                p: ProjectionReport(f.rank, f.scale, f.num_entries)
                for p, f in site_factors.projections.items()
            },
            num_bytes=0,
        )
        for name, site_factors in factors.items()
    ]
    total = sum(2 * len(report.projections) for report in reports)
    return BoundAdapter(factors, BindReport(origin, "test", {}, total, total, tuple(reports)))


def random_adapter(
    sites: Sequence[Site],
    rank: int = 4,
    kind: FactorKind = "separate",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> BoundAdapter:
    """Return an adapter with :func:`random_factors` at every site."""
    return bound_adapter(
        {
            site.name: random_factors(site, rank, kind, seed=seed * 1000 + i, dtype=dtype)
            for i, site in enumerate(sites)
        }
    )


def constant_adapter(sites: Sequence[Site], value: float, rank: int = 4) -> BoundAdapter:
    """Return an adapter whose every factor value is ``value``: a mixture with another shows."""
    factors: dict[str, SiteFactors] = {}
    for site in sites:
        projections = {
            p.name: LoraFactor(
                torch.full((site.num_experts, rank, p.in_features), value),
                torch.full((site.num_experts, p.out_features, rank), value),
                1.0,
            )
            for p in site.projections
        }
        factors[site.name] = SiteFactors(projections)
    return bound_adapter(factors)


def assert_same_factors(found: SiteFactors | None, wanted: SiteFactors, site: Site) -> None:
    """Assert that ``found`` holds, bit for bit, what ``wanted`` says for every local expert.

    Rank-0 projections count as missing. Checks that a shared A is stored once.
    """
    live = {name: f for name, f in wanted.projections.items() if f.rank > 0}
    if not live:
        assert found is None, f"{site.name}: expected no factors, found {list(found.projections)}"
        return
    assert found is not None, f"{site.name}: expected factors for {list(live)}, found none"
    assert set(found.projections) == set(live), f"{site.name}: {set(found.projections)}"
    for name, want in live.items():
        have = found.projections[name]
        where = f"{site.name}.{name}"
        assert have.rank == want.rank, f"{where}: rank {have.rank}, expected {want.rank}"
        assert have.scale == torch.tensor(want.scale, dtype=torch.float32).item(), where
        for expert in range(site.num_experts):
            entry = wanted.entry(expert)
            found_entry = found.entry(expert)
            assert (found_entry < 0) == (entry < 0), f"{where}: expert {expert} -> {found_entry}"
            if entry >= 0:
                for a, b, what in (
                    (have.lora_A, want.lora_A, "lora_A"),
                    (have.lora_B, want.lora_B, "lora_B"),
                ):
                    one = a[found_entry if a.shape[0] > 1 else 0]
                    two = b[entry if b.shape[0] > 1 else 0].to(one.dtype)
                    assert_bit_equal(one, two, f"{where}.{what} of expert {expert}")
        assert (have.lora_A.shape[0] == 1) == (want.lora_A.shape[0] == 1), where
        assert (have.lora_B.shape[0] == 1) == (want.lora_B.shape[0] == 1), where
    if {"gate", "up"} <= set(live):
        shared = live["gate"].lora_A is live["up"].lora_A
        same = (
            found.projections["gate"].lora_A.data_ptr() == found.projections["up"].lora_A.data_ptr()
        )
        assert same == shared, f"{site.name}: gate and up share memory: {same}, expected {shared}"
