"""What a file has for linears besides factors: a bias of lora_B, or DoRA's magnitude.

::

    ...q_proj.lora_B.bias              [out]    y += scale * bias
    ...q_proj.lora_magnitude_vector    [out]    y  = c * (W x + scale B A x) + base bias,
                                                c  = magnitude / ||W + scale B A||, row by row

Both become rank-1 factors of the linear's vector site, see :func:`moegraft.sites.vector_site`. The
magnitude still is what the file has there: :mod:`moegraft.adapters.dora` makes it c - 1.
"""

from __future__ import annotations

import torch

from moegraft.adapters.layouts.base import LayoutResult, ReadOptions
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import count
from moegraft.sites import LINEAR_PROJECTION, Site, VectorKind, vector_site
from moegraft.types import LoraFactor, SiteFactors

_KINDS: dict[str, VectorKind] = {"lora_B_bias": "lora_bias", "dora": "dora"}
_NAMES: dict[VectorKind, str] = {"lora_bias": "biases of lora_B", "dora": "DoRA magnitudes"}


class LinearVectors:
    """Reader for biases of lora_B and DoRA magnitudes of linears, where the host serves them."""

    name = "linear_vectors"

    def read(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, options: ReadOptions
    ) -> LayoutResult:
        """See :class:`moegraft.adapters.layouts.base.Layout`."""
        result = LayoutResult()
        if not spec.serves_vectors:
            return result
        factors = _ranks(source, pending)
        vectors = {
            name: _KINDS[source.keys[name].leaf]
            for name in source.tensors
            if name in pending and source.keys[name].leaf in _KINDS
        }
        found: dict[str, int] = {}
        for name, kind in vectors.items():
            module = source.keys[name].module
            site = spec.resolve(module)
            if site is None or site.kind != "linear":
                continue
            problem = _problem(site, source.tensors[name], factors.get(module))
            target = vector_site(site, kind).name
            others = [vector_site(site, other).name for other in _NAMES]
            if not problem and any(other in result.factors for other in others):
                problem = f"a second bias or magnitude for {site.name} in the same file"
            if problem:
                result.refuse([name], problem)
                continue
            scale = 1.0
            if kind == "lora_bias":
                scale = source.config.scale_for(module, factors[module])
            result.factors[target] = _factors(source.tensors[name], scale)
            result.used.add(name)
            found[_NAMES[kind]] = found.get(_NAMES[kind], 0) + 1
        result.evidence = ", ".join(f"{what} on {count(n, 'linear')}" for what, n in found.items())
        return result


def _ranks(source: AdapterSource, pending: set[str]) -> dict[str, int]:
    """Return module -> rank of those with both factors."""
    ranks: dict[str, int] = {}
    both: set[str] = set()
    for name in pending:
        module, leaf = source.keys[name]
        if leaf == "lora_A" and source.tensors[name].dim() == 2:
            ranks[module] = source.tensors[name].shape[0]
        elif leaf == "lora_B":
            both.add(module)
    return {module: rank for module, rank in ranks.items() if module in both and rank}


def _problem(site: Site, vector: torch.Tensor, rank: int | None) -> str:
    """Return why a vector can't be used, "" when it can."""
    if rank is None:
        return "the factors that it belongs to, lora_A and lora_B, are missing or left out"
    wanted = site.projection(LINEAR_PROJECTION).out_features
    if vector.numel() != wanted or vector.dim() > 2:
        return f"its shape {tuple(vector.shape)} is not [{wanted}], the outputs of {site.name}"
    return ""


def _factors(vector: torch.Tensor, scale: float) -> SiteFactors:
    one = vector.new_ones(1, 1, 1)
    return SiteFactors({LINEAR_PROJECTION: LoraFactor(one, vector.reshape(1, -1, 1), scale)})
