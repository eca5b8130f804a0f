"""Made-up adapters of experts, written as 3-D factors per projection and as one pair per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tiny
from moegraft.adapters import BoundAdapter, ModelSpec, ReadOptions, bind, check_bound, make_source
from moegraft.sites import Site
from moegraft.testing import assert_bit_equal

Tensors = dict[str, torch.Tensor]
#: projection -> (A [E or 1, r, in], B [E or 1, out, r]).
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]

EXPERTS = "model.layers.0.mlp.experts"
W_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
PROJ_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
CONFIG: dict[str, Any] = {"r": 3, "lora_alpha": 6}
#: Shared outer: one A of gate and up, and one B of down, for all experts.
OUTER = ("gate.A", "up.A", "down.B")


def experts_of(model: str, layer: int = 0) -> Site:
    """The experts site of one layer of a tiny model."""
    sites = [site for site in tiny.spec_of(model).sites if site.kind == "experts"]
    return sites[layer]


def random_pairs(
    site: Site,
    names: Sequence[str] = ("gate", "up", "down"),
    shared: Sequence[str] = (),
    rank: int = 3,
    seed: int = 0,
) -> Pairs:
    """Random factors; ``shared`` names those with an expert dimension of 1, as ``gate.A``."""
    generator = torch.Generator().manual_seed(seed)
    found: Pairs = {}
    for name in names:
        sizes = site.projection(name)
        entries = [1 if f"{name}.{leaf}" in shared else site.num_experts for leaf in "AB"]
        lora_a = torch.randn(entries[0], rank, sizes.in_features, generator=generator)
        lora_b = torch.randn(entries[1], sizes.out_features, rank, generator=generator)
        found[name] = (0.2 * lora_a, 0.2 * lora_b)
    return found


def put(module: str, lora_a: torch.Tensor, lora_b: torch.Tensor) -> Tensors:
    """A pair under the key names of a module."""
    pair = {"lora_A": lora_a, "lora_B": lora_b}
    return {f"base_model.model.{module}.{k}.weight": t.contiguous() for k, t in pair.items()}


def stacked_form(site: Site, pairs: Pairs, names: Mapping[str, str] = W_NAMES) -> Tensors:
    """The 3-D file."""
    found: Tensors = {}
    for projection, pair in pairs.items():
        found |= put(f"{site.name}.{names[projection]}", *pair)
    return found


def per_expert_form(site: Site, pairs: Pairs, names: Mapping[str, str] = PROJ_NAMES) -> Tensors:
    """The same adapter with one 2-D pair per expert; what is shared is copied."""
    found: Tensors = {}
    for projection, (lora_a, lora_b) in pairs.items():
        for expert in range(site.num_experts):
            a = lora_a[min(expert, lora_a.shape[0] - 1)]
            b = lora_b[min(expert, lora_b.shape[0] - 1)]
            found |= put(f"{site.name}.{expert}.{names[projection]}", a.clone(), b.clone())
    return found


def bound_to(
    spec: ModelSpec,
    tensors: Tensors,
    config: Mapping[str, Any] | None = None,
    options: ReadOptions | None = None,
) -> BoundAdapter:
    """Bind in full, or raise."""
    bound = bind(make_source(tensors, CONFIG if config is None else config), spec, options)
    check_bound(bound.report, spec)
    assert bound.report.bound == bound.report.total == len(tensors)
    return bound


def assert_same_experts(first: BoundAdapter, second: BoundAdapter) -> None:
    """Every expert has the same factors, bit for bit, whatever is stored once."""
    assert set(first.factors) == set(second.factors)
    for name, factors in first.factors.items():
        others = second.factors[name]
        assert set(factors.projections) == set(others.projections)
        for projection, factor in factors.projections.items():
            other = others.projections[projection]
            assert factor.scale == other.scale
            for expert in range(4):
                entries = factors.entry(expert), others.entry(expert)
                if max(entries) < 0:
                    continue
                assert min(entries) >= 0, f"{name} {projection}: only one has expert {expert}"
                for leaf in ("lora_A", "lora_B"):
                    tensors = (getattr(f, leaf) for f in (factor, other))
                    a, b = (t[min(e, len(t) - 1)] for t, e in zip(tensors, entries, strict=True))
                    assert_bit_equal(a.contiguous(), b.contiguous(), f"{name} {projection} {leaf}")


def merged_by_hand(model: str, site: Site, pairs: Pairs, scale: float = 2.0) -> Tensors:
    """Parameter name -> base weight plus ``scale * B[e] @ A[e]``, expert by expert, in fp64."""
    names = {"down": f"{site.name}.down_proj", "gate_up": f"{site.name}.gate_up_proj"}
    merged = {n: tiny.parameter_of(model, n).double().clone() for n in names.values()}
    oriented = {n: t if site.layout.out_major else t.transpose(1, 2) for n, t in merged.items()}
    for projection, (lora_a, lora_b) in pairs.items():
        rows = oriented[names["down" if projection == "down" else "gate_up"]]
        half = rows.shape[1] // 2
        for expert in range(site.num_experts):
            a = lora_a[min(expert, lora_a.shape[0] - 1)].double()
            b = lora_b[min(expert, lora_b.shape[0] - 1)].double()
            place = rows[expert]
            if projection != "down" and site.layout.gate_up_order == "interleaved":
                place = place[0::2] if projection == "gate" else place[1::2]
            elif projection != "down":
                place = place[:half] if projection == "gate" else place[half:]
            place += scale * b @ a
    return merged
