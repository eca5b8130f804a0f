"""One 2-D pair per expert and projection; see :mod:`moegraft.adapters.layouts.per_expert`."""

from __future__ import annotations

from moegraft.adapters.writers.base import ExpertNames, Pair, Written, apart, pair_keys
from moegraft.sites import Site
from moegraft.types import SiteFactors


class PerExpertWriter:
    """Writer of one pair per expert; experts without any factor are left out."""

    name = "per-expert"
    peft_version = ""

    def pairs(self, site: Site, factors: SiteFactors, notes: list[str]) -> list[Pair]:
        """See :class:`moegraft.adapters.writers.base.Writer`."""
        return apart(site, factors)

    def write(self, site: Site, pairs: list[Pair], names: ExpertNames) -> list[Written]:
        """See :class:`moegraft.adapters.writers.base.Writer`."""
        path = names.experts_path(site)
        found = []
        for pair in pairs:
            for expert in range(site.num_experts):
                lora_a, lora_b = pair.lora_A[expert], pair.lora_B[expert]
                if not lora_a.any() and not lora_b.any():
                    continue
                name = f"{path}.{expert}.{names.of(pair.role)}"
                tensors = pair_keys(name, lora_a, lora_b)
                found.append(Written(name, "module", pair.rank, pair.scale, tensors))
        return found
