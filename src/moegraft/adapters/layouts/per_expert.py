"""Per-expert 2-D factors, as transformers 4, vLLM, SGLang and many trainers write them.

``...mlp.experts.3.gate_proj.lora_A.weight [r, H]``, ``.lora_B.weight [I, r]``, likewise
``up_proj`` and ``down_proj``; Mixtral's names are ``w1`` (gate), ``w3`` (up), ``w2`` (down).
Gate and up have their own A. Any subset of experts, layers and projections is fine; ranks may
differ and are padded with zeros.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from moegraft.adapters.keys import EXPERT_NAMES
from moegraft.adapters.layouts.base import (
    LayoutResult,
    ReadOptions,
    missing_partner,
    not_a_pair,
    pair_up,
)
from moegraft.adapters.layouts.stacking import common_dtype, strided
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import count
from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors

_EXPERTS = re.compile(r".*\bexperts")
_PROJECTION = re.compile(r"\w+")
#: Of an expert's number.
_MAX_DIGITS = 9

#: (A, B, scale) of one expert's projection.
_Entry = tuple[torch.Tensor, torch.Tensor, float]


@dataclass(frozen=True)
class _Place:
    """A projection of one experts module, under one of its paths.

    Attributes:
        site, name: what it is of the model; "" for a projection that no model has.
        entries: expert -> its factors, the same for all paths of the site.
        fitting: shapes of A and B that were found right; there are tens of thousands.
    """

    site: Site
    name: str
    entries: dict[int, _Entry]
    fitting: set[tuple[torch.Size, torch.Size]] = field(default_factory=set)


class PerExpert:
    """Reader for one pair of 2-D factors per expert and projection."""

    name = "per_expert"

    def read(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, options: ReadOptions
    ) -> LayoutResult:
        """See :class:`moegraft.adapters.layouts.base.Layout`."""
        result = LayoutResult()
        found: dict[str, dict[str, dict[int, _Entry]]] = {}
        sites: dict[str, Site] = {}
        places: dict[tuple[str, str], _Place | None] = {}
        scales: dict[int, float] = {}
        used: list[str] = []
        for module, parts in pair_up(source, pending).items():
            head, _, word = module.rpartition(".")
            path, _, number = head.rpartition(".")
            where = path, word
            if where not in places:
                places[where] = _place(path, word, spec, found)
            place = places[where]
            if place is None or not number.isdecimal() or len(number) > _MAX_DIGITS:
                continue
            site, expert, entries = place.site, int(number), place.entries
            pair_a, pair_b = parts.get("lora_A"), parts.get("lora_B")
            known = False
            if pair_a is not None and pair_b is not None and expert < site.num_experts:
                known = (pair_a[1].shape, pair_b[1].shape) in place.fitting
            problem = "" if known else _problem(site, expert, place.name, word, parts)
            if not problem and expert in entries:
                problem = f"a second {place.name} factor for expert {expert} of {site.name}"
            if problem:
                result.refuse([key for key, _ in parts.values()], problem)
                continue
            assert pair_a is not None and pair_b is not None
            (key_a, lora_a), (key_b, lora_b) = pair_a, pair_b
            if not known:
                place.fitting.add((lora_a.shape, lora_b.shape))
            rank = lora_a.shape[0]
            scale = scales.get(rank)
            if scale is None:
                scale = source.config.scale_for(module, rank)
                if not source.config.varies:
                    scales[rank] = scale
            entries[expert] = (lora_a, lora_b, scale)
            sites[site.name] = site
            used += (key_a, key_b)
        result.used.update(used)
        for site_name, site in sites.items():
            projections = {name: e for name, e in found[site_name].items() if e}
            result.factors[site_name] = _stack(site, projections, result)
            result.experts[site_name] = {name: len(e) for name, e in projections.items()}
        if result.used:
            result.evidence = (
                f"2-D factors per expert on {count(len(result.factors), 'experts module')}"
            )
        return result


def _place(
    path: str, word: str, spec: ModelSpec, found: dict[str, dict[str, dict[int, _Entry]]]
) -> _Place | None:
    """Return what ``PATH.<number>.WORD`` is of a model; None when it has no experts there."""
    if not _EXPERTS.fullmatch(path) or not _PROJECTION.fullmatch(word):
        return None
    site = spec.resolve_experts(path)
    if site is None:
        return None
    name = EXPERT_NAMES.get(word, "")
    return _Place(site, name, found.setdefault(site.name, {}).setdefault(name, {}))


def _problem(
    site: Site,
    expert: int,
    name: str,
    projection: str,
    parts: dict[str, tuple[str, torch.Tensor]],
) -> str:
    """Return why one expert's factors can't be used; "" when they can."""
    if name not in {p.name for p in site.projections}:
        known = ", ".join(p.name for p in site.projections)
        return f"projection {projection!r} is not one of this model's ({known})"
    if expert >= site.num_experts:
        return f"expert {expert} does not exist: {site.name} has {site.num_experts}"
    missing = missing_partner(parts)
    if missing:
        return f"its partner {missing} is missing"
    lora_a, lora_b = parts["lora_A"][1], parts["lora_B"][1]
    sizes = site.projection(name)
    problem = not_a_pair(lora_a, lora_b)
    if problem:
        return problem
    if (lora_a.shape[1], lora_b.shape[0]) != (sizes.in_features, sizes.out_features):
        return (
            f"it is for a {lora_a.shape[1]} -> {lora_b.shape[0]} matrix, {name} of {site.name} is "
            f"{sizes.in_features} -> {sizes.out_features}"
        )
    return ""


def _stack(
    site: Site, projections: dict[str, dict[int, _Entry]], result: LayoutResult
) -> SiteFactors:
    """Stack experts into ``[entries, ..]``; experts without a projection get zeros there."""
    experts = sorted({expert for entries in projections.values() for expert in entries})
    viewed = _view(projections, experts)
    if viewed is not None:
        factors, places = viewed
    else:
        factors = {
            name: _stack_projection(site, name, entries, experts, result)
            for name, entries in projections.items()
        }
        places = tuple(range(len(experts)))
    if places == tuple(range(site.num_experts)):
        return SiteFactors(factors)
    expert_map = torch.full((site.num_experts,), -1, dtype=torch.int32)
    expert_map[experts] = torch.tensor(places, dtype=torch.int32)
    return SiteFactors(factors, expert_map)


def _view(
    projections: dict[str, dict[int, _Entry]], experts: list[int]
) -> tuple[dict[str, LoraFactor], tuple[int, ...]] | None:
    """View all factors of a site where they lie, without a copy, and say where each expert is.

    None when they differ in rank, scale or dtype between experts, when an expert lacks one, or
    when they don't lie at equal distances, for all in the same order of experts.
    """
    factors: dict[str, LoraFactor] = {}
    places: tuple[int, ...] | None = None
    if len(experts) < 2 or any(len(entries) != len(experts) for entries in projections.values()):
        return None
    for name, entries in projections.items():
        if not _alike(entries):
            return None
        in_order = [entries[expert] for expert in experts]
        found_a = strided([a for a, _, _ in in_order])
        found_b = strided([b for _, b, _ in in_order])
        if found_a is None or found_b is None or found_a.places != found_b.places:
            return None
        if places not in (None, found_a.places):
            return None
        places = found_a.places
        factors[name] = LoraFactor(found_a.view, found_b.view, in_order[0][2])
    assert places is not None
    return factors, places


def _alike(entries: dict[int, _Entry]) -> bool:
    """True when all experts have one rank, one scale, and one dtype of A and of B."""
    return len({(a.shape, a.dtype, b.dtype, scale) for a, b, scale in entries.values()}) == 1


def _stack_projection(
    site: Site, name: str, entries: dict[int, _Entry], experts: list[int], result: LayoutResult
) -> LoraFactor:
    rank = max(lora_a.shape[0] for lora_a, _, _ in entries.values())
    scales = {scale for _, _, scale in entries.values()}
    scale = max(scales, key=abs)
    if len(entries) == len(experts) and _alike(entries):
        in_order = [entries[expert] for expert in experts]
        lora_a = torch.stack([a for a, _, _ in in_order])
        return LoraFactor(lora_a, torch.stack([b for _, b, _ in in_order]), scale)
    # One scale per projection: experts that differ (rank_pattern on single experts) get theirs
    # through B, computed in fp32.
    dtype_a = common_dtype(a for a, _, _ in entries.values())
    dtype_b = common_dtype(b for _, b, _ in entries.values())
    if len(scales) > 1:
        dtype_b = torch.float32
        result.notes.append(f"{site.name} {name}: experts have different scales; B carries them")
    sizes = site.projection(name)
    some_a = next(iter(entries.values()))[0]
    a3 = some_a.new_zeros(len(experts), rank, sizes.in_features, dtype=dtype_a)
    b3 = some_a.new_zeros(len(experts), sizes.out_features, rank, dtype=dtype_b)
    for i, expert in enumerate(experts):
        if expert in entries:
            lora_a, lora_b, own_scale = entries[expert]
            a3[i, : lora_a.shape[0]] = lora_a
            b3[i, :, : lora_a.shape[0]] = lora_b
            if own_scale != scale:
                b3[i] *= own_scale / scale
    return LoraFactor(a3, b3, scale)
