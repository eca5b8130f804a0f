"""Factors of one site put together: those of two layouts, and equal copies into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from moegraft.errors import count
from moegraft.types import LoraFactor, SiteFactors

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def clash(known: Mapping[str, SiteFactors], found: Mapping[str, SiteFactors]) -> str:
    """Return the first place that both have factors for, as ``gate of SITE``; "" for none."""
    for name in sorted(set(known) & set(found)):
        for projection in found[name].projections:
            if projection in known[name].projections:
                return f"{projection} of {name}"
    return ""


def merged(first: SiteFactors, second: SiteFactors) -> SiteFactors:
    """Put the projections of two layouts of one site together.

    Experts that an expert map leaves out get zeros, which add exactly nothing: one site has one
    map, and the other layout may cover all experts.
    """
    return SiteFactors({**_for_all_experts(first), **_for_all_experts(second)})


def _for_all_experts(factors: SiteFactors) -> Mapping[str, LoraFactor]:
    expert_map = factors.expert_map
    if expert_map is None:
        return factors.projections
    live = expert_map >= 0

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_zeros(len(expert_map), *tensor.shape[1:])
        out[live] = tensor[expert_map[live].long()]
        return out

    return {
        name: LoraFactor(spread(factor.lora_A), spread(factor.lora_B), factor.scale)
        for name, factor in factors.projections.items()
    }


def store_equal_copies_once(
    factors: Mapping[str, SiteFactors],
) -> tuple[dict[str, SiteFactors], list[str]]:
    """Give factors whose experts are all equal, bit for bit, an expert dimension of 1.

    Zeros are left as they are: they are factors before training, and an update would no longer fit
    the arena that was planned with them.

    Returns:
        site name -> factors, and a note per kind of factor of which copies were found. What an
        expert reads keeps its bits, and a gate and an up with the very same A keep that.
    """
    found: Counter[tuple[str, str]] = Counter()
    alike = _with_equal_beginning(factors)
    out = {name: _once(site_factors, alike, found) for name, site_factors in factors.items()}
    notes = [
        f"{leaf} of {projection} is the same for all experts on {count(n, 'experts module')}: "
        "stored once"
        for (projection, leaf), n in sorted(found.items())
    ]
    return out, notes


def _with_equal_beginning(factors: Mapping[str, SiteFactors]) -> set[int]:
    """Return the ids of the tensors ``[n, ..]``, n > 1, whose first two entries have equal bits.

    Experts of a trained adapter differ, so this nearly always decides. The host waits for a GPU
    once, not for each tensor.
    """
    projections = [f for site in factors.values() for f in site.projections.values()]
    tensors = {id(t): t for f in projections for t in (f.lora_A, f.lora_B) if t.shape[0] > 1}
    pairs = {key: tensor.view(_BITS[tensor.element_size()])[:2] for key, tensor in tensors.items()}
    # Tensors on meta have no values, so none that are equal.
    on_host = {key for key, (a, b) in pairs.items() if a.is_cpu and torch.equal(a, b)}
    on_gpu = {key: (a == b).all() for key, (a, b) in pairs.items() if a.is_cuda}
    if not on_gpu:
        return on_host
    equal = torch.stack(list(on_gpu.values())).tolist()
    return on_host | {key for key, same in zip(on_gpu, equal, strict=True) if same}


def _once(factors: SiteFactors, alike: set[int], found: Counter[tuple[str, str]]) -> SiteFactors:
    made: dict[int, torch.Tensor] = {}
    projections = {}
    for name, factor in factors.projections.items():
        tensors = {"lora_A": factor.lora_A, "lora_B": factor.lora_B}
        for leaf, tensor in tensors.items():
            if id(tensor) not in made:
                once = id(tensor) in alike and _all_equal(tensor)
                made[id(tensor)] = tensor[:1].clone() if once else tensor
            if made[id(tensor)] is not tensor:
                found[name, leaf] += 1
        a, b = (made[id(tensor)] for tensor in tensors.values())
        projections[name] = LoraFactor(a, b, factor.scale)
    return SiteFactors(projections, factors.expert_map)


def _all_equal(tensor: torch.Tensor) -> bool:
    """True when all entries of ``[n, ..]``, n > 1, have the same bits, not all of them 0."""
    bits = tensor.view(_BITS[tensor.element_size()])
    return bool((bits[1:] == bits[0]).all()) and bool(bits[0].any())
