"""3-D factors per projection; see :mod:`moegraft.adapters.layouts.per_projection`."""

from __future__ import annotations

from typing import ClassVar

import torch

from moegraft.adapters.writers.base import ExpertNames, Pair, Written, apart, pair_keys
from moegraft.errors import AdapterError
from moegraft.sites import Site
from moegraft.types import SiteFactors

#: projection -> (the factor on the outside of the experts, its leaf).
_OUTER = {"gate": "lora_A", "up": "lora_A", "down": "lora_B"}


class StackedWriter:
    """Writer of ``w1`` (gate, or up without a gate), ``w3`` and ``w2``, ``[E, ..]`` each."""

    name = "3d"
    peft_version = ""
    _names: ClassVar = {"gate": "w1", "up": "w3", "down": "w2"}

    def pairs(self, site: Site, factors: SiteFactors, notes: list[str]) -> list[Pair]:
        """See :class:`moegraft.adapters.writers.base.Writer`."""
        return apart(site, factors)

    def write(self, site: Site, pairs: list[Pair], names: ExpertNames) -> list[Written]:
        """See :class:`moegraft.adapters.writers.base.Writer`."""
        found = []
        for pair in pairs:
            last = "w1" if pair.role == "up" and not site.gated else self._names[pair.role]
            path = f"{site.name}.{last}"
            tensors = pair_keys(path, pair.lora_A, pair.lora_B)
            found.append(Written(path, "module", pair.rank, pair.scale, tensors))
        return found


class SharedOuterWriter(StackedWriter):
    """The same with one A of gate and of up, and one B of down, for all experts."""

    name = "shared-outer"

    def pairs(self, site: Site, factors: SiteFactors, notes: list[str]) -> list[Pair]:
        """See :class:`moegraft.adapters.writers.base.Writer`."""
        for projection, factor in factors.projections.items():
            leaf = _OUTER[projection]
            if not _is_one(getattr(factor, leaf)):
                raise AdapterError(
                    f"{projection} of {site.name} has a {leaf} of its own for each expert, so the "
                    "shared-outer layout can't hold it exactly: convert to 3d, per-expert or peft."
                )
        outer = frozenset(_OUTER.items())
        return apart(site, factors, outer)


def _is_one(tensor: torch.Tensor) -> bool:
    return tensor.shape[0] == 1 or bool((tensor == tensor[:1]).all())
