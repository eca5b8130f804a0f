"""How much of a model an adapter covers: layers and experts per projection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moegraft.adapters import BindReport
from moegraft.adapters.report import ProjectionReport, SiteReport
from moegraft.adapters.spec import ModelSpec


@dataclass(frozen=True)
class Coverage:
    """One projection of one kind of place, over all layers.

    Attributes:
        place: dotted path with ``*`` for the layer number, and the projection of experts or
            ``(router)``.
        layers, total_layers: sites with a delta, and sites of the model.
        experts: fewest and most experts with a delta over those sites; (1, 1) for linears.
        total_experts: experts per site; 1 for linears.
        ranks, scales: distinct values, ascending.
        shared: which factors serve all experts: "", "A", "B" or "A and B".
        vectors: what linears have besides factors: "", "dora" or "lora_bias", or both.
    """

    place: str
    layers: int
    total_layers: int
    experts: tuple[int, int]
    total_experts: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    shared: str
    vectors: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)

    @property
    def layers_text(self) -> str:
        """Such as ``48/48``."""
        return f"{self.layers}/{self.total_layers}"

    @property
    def experts_text(self) -> str:
        """Such as ``64/128`` or ``3-4/128``; "" for linears."""
        if self.total_experts == 1:
            return ""
        low, high = self.experts
        return f"{low if low == high else f'{low}-{high}'}/{self.total_experts}"


def coverage(report: BindReport, spec: ModelSpec) -> list[Coverage]:
    """Return the coverage of every projection that has a delta somewhere, in model order."""
    totals: dict[str, int] = {}
    found: dict[tuple[str, str], list[tuple[ProjectionReport, SiteReport]]] = {}
    for site in spec.sites:
        place = _general(site.name)
        totals[place] = totals.get(place, 0) + 1
        for projection in site.projections:
            found.setdefault((place, projection.name), [])
    routers = {_general(site.name) for site in spec.sites if site.kind == "router"}
    for bound in report.sites:
        for name, reported in bound.projections.items():
            found[_general(bound.site), name].append((reported, bound))
    return [
        _cover(place, "router" if place in routers else name, entries, totals)
        for (place, name), entries in found.items()
        if entries
    ]


def _cover(
    place: str,
    name: str,
    entries: list[tuple[ProjectionReport, SiteReport]],
    totals: Mapping[str, int],
) -> Coverage:
    projections = [projection for projection, _ in entries]
    counts = [p.experts for p in projections]
    shared = [
        letter
        for letter, attribute in (("A", "shared_a"), ("B", "shared_b"))
        if all(getattr(p, attribute) for p in projections)
    ]
    behind = {"linear": "", "router": " (router)"}
    return Coverage(
        place=place + behind.get(name, f" {name}"),
        layers=len(entries),
        total_layers=totals[place],
        experts=(min(counts), max(counts)),
        total_experts=max(site.num_experts for _, site in entries),
        ranks=tuple(sorted({p.rank for p in projections})),
        scales=tuple(sorted({round(p.scale, 6) for p in projections})),
        shared=" and ".join(shared),
        vectors=" and ".join(sorted({kind for _, site in entries for kind in site.vectors})),
    )


def _general(path: str) -> str:
    return re.sub(r"\blayers\.\d+\.", "layers.*.", path)
