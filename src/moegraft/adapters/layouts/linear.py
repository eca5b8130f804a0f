"""Plain LoRA on dense linears and routers: ``<module>.lora_A.weight [r, in]``, ``lora_B [out, r]``.

Unlike 3-D expert parameters, no PEFT exchanged in and out of these (checked: 0.17.1 to 0.21.2), so
exchanged sizes mean another model.
"""

from __future__ import annotations

from collections import Counter

from moegraft.adapters.layouts.base import (
    LayoutResult,
    ReadOptions,
    missing_partner,
    not_a_pair,
    pair_up,
)
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import count
from moegraft.sites import LINEAR_PROJECTION
from moegraft.types import LoraFactor, SiteFactors


class DenseLinear:
    """Reader for linears: attention, dense MLPs, shared experts, routers."""

    name = "linear"

    def read(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, options: ReadOptions
    ) -> LayoutResult:
        """See :class:`moegraft.adapters.layouts.base.Layout`."""
        result = LayoutResult()
        for module, parts in pair_up(source, pending).items():
            keys = [key for key, _ in parts.values()]
            site = spec.resolve(module)
            if site is None or site.kind == "experts":
                continue
            missing = missing_partner(parts)
            if missing:
                result.refuse(keys, f"its partner {module}.{missing} is missing")
                continue
            lora_a, lora_b = parts["lora_A"][1], parts["lora_B"][1]
            sizes = site.projections[0]
            if site.name in result.factors:
                result.refuse(keys, f"a second adapter for {site.name} in the same file")
                continue
            problem = not_a_pair(lora_a, lora_b)
            if problem:
                result.refuse(keys, problem)
                continue
            rank = lora_a.shape[0]
            shape = (lora_a.shape[1], lora_b.shape[0])
            if shape != (sizes.in_features, sizes.out_features):
                result.refuse(
                    keys,
                    f"it is for a {shape[0]} -> {shape[1]} matrix, the model's {site.name} is "
                    f"{sizes.in_features} -> {sizes.out_features}",
                )
                continue
            scale = source.config.scale_for(module, rank)
            if site.kind == "router":
                # A router adapted through target_parameters is matched by its parameter's name.
                scale = source.config.scale_for(_router_name(source, module), rank)
            factor = LoraFactor(lora_a[None], lora_b[None], scale)
            result.factors[site.name] = SiteFactors({LINEAR_PROJECTION: factor})
            result.used.update(keys)
        if result.used:
            result.evidence = _evidence(spec, result)
        return result


def _evidence(spec: ModelSpec, result: LayoutResult) -> str:
    """Say how many of what was found, as ``2-D factors on 4 linears, 1 router``."""
    kinds = Counter(site.kind for site in spec.sites if site.name in result.factors)
    return f"2-D factors on {', '.join(count(n, kind) for kind, n in sorted(kinds.items()))}"


def _router_name(source: AdapterSource, module: str) -> str:
    targets = source.config.target_parameters
    parameter = f"{module}.weight"
    return parameter if any(parameter.endswith(t) for t in targets) else module
