"""Adapters under parallelism: files are global, slots are local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from moegraft.errors import MoegraftError
from moegraft.parallel.expert import ExpertShard
from moegraft.parallel.tensor import LinearShard
from moegraft.sites import Site
from moegraft.types import SiteFactors

SiteShard: TypeAlias = ExpertShard | LinearShard


@dataclass(frozen=True)
class LocalFactors:
    """One adapter's factors on this rank.

    Attributes:
        factors: site name -> local factors; what a bank over :attr:`RankShards.local_sites` takes.
        elsewhere: sites of the adapter that other ranks hold, in whole.

    Example: an adapter for layers 0 to 3 on the pipeline stage of layers 2 and 3 has the sites of
    layers 0 and 1 in ``elsewhere``.
    """

    factors: Mapping[str, SiteFactors]
    elsewhere: tuple[str, ...]


@dataclass(frozen=True)
class RankShards:
    """What of a model is on this rank; adapters are bound to the whole model, then sliced by it.

    Each module has a shard of its own: experts may be spread over all ranks while a dense layer
    beside them is replicated.

    Attributes:
        sites: all sites of the whole model, in its order, with whole sizes.
        shards: site name -> what is here; a site that is not named is on other ranks.

    Example::

        shards = RankShards(sites, {experts.name: shard, q_proj.name: LinearShard("column", part)})
        bank = AdapterBank(shards.local_sites, ...)
        local = shards.slice(bound.factors)        # bound = moegraft.adapters.bind(source, spec)
        store.add(name, dataclasses.replace(bound, factors=local.factors))
    """

    sites: Sequence[Site]
    shards: Mapping[str, SiteShard]

    def __post_init__(self) -> None:
        kinds = {site.name: site.kind for site in self.sites}
        for name, shard in self.shards.items():
            if name not in kinds:
                raise MoegraftError(f"There is a shard of {name!r}, which is no site of the model.")
            if (kinds[name] == "experts") != isinstance(shard, ExpertShard):
                raise MoegraftError(f"{name} is of kind {kinds[name]!r}, its shard is {shard}.")
        _ = self.local_sites

    @cached_property
    def local_sites(self) -> tuple[Site, ...]:
        """The sites that are here, with local sizes, under their own names."""
        return tuple(
            self.shards[site.name].site(site) for site in self.sites if site.name in self.shards
        )

    def slice(self, factors: Mapping[str, SiteFactors]) -> LocalFactors:
        """Slice an adapter that was bound to the whole model.

        A site of this rank may end up without factors: none of its experts has any.
        """
        local: dict[str, SiteFactors] = {}
        for name, found in factors.items():
            shard = self.shards.get(name)
            sliced = None if shard is None else shard.factors(found)
            if sliced is not None:
                local[name] = sliced
        return LocalFactors(local, tuple(name for name in factors if name not in self.shards))
