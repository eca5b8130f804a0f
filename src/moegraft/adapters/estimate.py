"""What an adapter will take in a bank, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.spec import ModelSpec
from moegraft.factors import TableLayout
from moegraft.packing import packed_bytes
from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one adapter in a bank.

    Attributes:
        num_bytes: what it takes in the arena; :attr:`AdapterInfo.num_bytes` once it is loaded.
        kinds: the same per kind of site that it changes: ``experts``, ``linear``, ``router``.
        sites: the same per site and projection; an A that gate and up share counts for gate.
        table_row: bytes of one slot's table row, which a slot takes whatever is in it.
        dtype: dtype of the factors in the bank; the model's.
    """

    num_bytes: int
    kinds: Mapping[str, int]
    sites: Mapping[str, Mapping[str, int]]
    table_row: int
    dtype: torch.dtype

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready data."""
        return {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}


def estimate_bytes(bound: BoundAdapter, spec: ModelSpec, dtype: torch.dtype) -> MemoryEstimate:
    """Return exactly what an adapter takes in a bank, without packing it.

    Args:
        bound: the adapter's factors.
        spec: the model it is bound to.
        dtype: dtype of the bank's factors; the model's.

    Raises:
        AdapterError: a factor does not fit its site.
    """
    kinds: dict[str, int] = {}
    sites: dict[str, dict[str, int]] = {}
    for site in spec.table_sites:
        if site.name in bound.factors:
            sites[site.name] = _projections(bound.factors[site.name], site, dtype)
            kinds[site.kind] = kinds.get(site.kind, 0) + sum(sites[site.name].values())
    row_bytes = TableLayout.of(spec.table_sites).row_words * 8
    return MemoryEstimate(sum(kinds.values()), kinds, sites, row_bytes, dtype)


def _projections(factors: SiteFactors, site: Site, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes that each projection adds to those before it."""
    layout = TableLayout.of([site])
    found: dict[str, int] = {}
    some: dict[str, LoraFactor] = {}
    for name in (p.name for p in site.projections if p.name in factors.projections):
        some[name] = factors.projections[name]
        so_far = packed_bytes({site.name: SiteFactors(some, factors.expert_map)}, layout, dtype)
        found[name] = so_far - sum(found.values())
    return found
