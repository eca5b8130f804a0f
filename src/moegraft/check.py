"""Checks of factors against the place they attach to, before any offset is computed from them."""

from __future__ import annotations

from collections.abc import Sequence

from moegraft.errors import AdapterError
from moegraft.sites import Site
from moegraft.types import SiteFactors


def checked_site(sites: Sequence[Site], name: str, factors: SiteFactors) -> Site:
    """Return the site called ``name`` once ``factors`` are known to fit it.

    Raises:
        AdapterError: no such site, a projection that it lacks, a factor of another width or number
            of experts, or an expert map that points past the factors.
    """
    site = next((s for s in sites if s.name == name), None)
    if site is None:
        raise AdapterError(f"The adapter has factors for {name!r}, which is no site of this model.")
    sizes = {p.name: (p.in_features, p.out_features) for p in site.projections}
    for projection, factor in factors.projections.items():
        if projection not in sizes:
            raise AdapterError(
                f"{name}: the adapter has factors for {projection!r}, the site only {list(sizes)}."
            )
        found = (factor.lora_A.shape[2], factor.lora_B.shape[1])
        if found != sizes[projection]:
            raise AdapterError(
                f"{name}, {projection}: the factors are for {found[0]} inputs and {found[1]} "
                f"outputs, the site has {sizes[projection][0]} and {sizes[projection][1]}."
            )
        _check_entries(site, f"{name}, {projection}", factor.num_entries, factors)
    return site


def _check_entries(site: Site, where: str, entries: int, factors: SiteFactors) -> None:
    if factors.expert_map is None or site.kind != "experts":
        if entries not in (1, site.num_experts):
            raise AdapterError(
                f"{where}: the factors cover {entries} experts, the site has {site.num_experts}; "
                "an adapter for some experts only needs an expert_map."
            )
        return
    if tuple(factors.expert_map.shape) != (site.num_experts,):
        raise AdapterError(
            f"{where}: the expert map has shape {tuple(factors.expert_map.shape)}, expected "
            f"({site.num_experts},)."
        )
    low, high = int(factors.expert_map.min()), int(factors.expert_map.max())
    if low < -1 or (entries > 1 and high >= entries):
        raise AdapterError(
            f"{where}: the expert map holds {low} to {high}, but the factors have {entries} "
            "entries; -1 means none."
        )
