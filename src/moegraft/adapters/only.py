"""Parts of an adapter that the caller wants alone: some kinds of sites, or some projections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moegraft.adapters.spec import ModelSpec
from moegraft.errors import AdapterError, shown
from moegraft.types import SiteFactors

#: What may be kept: kinds of sites, and projections of experts.
PARTS = ("experts", "linear", "router", "gate", "up", "down")


def checked_parts(only: Any) -> tuple[str, ...]:
    """Return the parts as a tuple; AdapterError for what is none."""
    parts = (only,) if isinstance(only, str) else only
    good = isinstance(parts, Collection) and all(isinstance(p, str) for p in parts)
    wrong = [part for part in parts if part not in PARTS] if good else [only]
    if wrong:
        raise AdapterError(f"only={shown(wrong[0])} is no part of a model: {', '.join(PARTS)}.")
    return tuple(parts)


def keep_only(
    factors: Mapping[str, SiteFactors], spec: ModelSpec, only: Collection[str]
) -> tuple[dict[str, SiteFactors], dict[str, tuple[str, ...]]]:
    """Return the factors of these parts, and what was left out.

    Args:
        factors: site name -> factors.
        spec: the model.
        only: of :data:`PARTS`; none = everything is kept.

    Returns:
        The kept factors, and site name -> projections that were left out.
    """
    kinds = {site.name: site.kind for site in spec.sites}
    kept: dict[str, SiteFactors] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    for name, found in factors.items():
        kind = kinds[name.partition(":")[0]]  # a linear's vectors go with it
        if not only or kind in only:
            kept[name] = found
            continue
        projections = {p: f for p, f in found.projections.items() if p in only}
        if projections:
            kept[name] = SiteFactors(projections, found.expert_map)
        if len(projections) < len(found.projections):
            left_out[name] = tuple(p for p in found.projections if p not in projections)
    return kept, left_out
