"""Seeded random inputs. The same seed gives the same values on every device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from moegraft.sites import Projection, Site
from moegraft.types import Activation, ExpertWeights, LoraFactor, SiteFactors, WeightLayout

FactorKind = Literal["fused", "separate", "shared_outer"]
#: ``fused``: gate and up hold the very same lora_A. ``separate``: one A each. ``shared_outer``:
#: fused, and gate/up's A and down's B have an expert dimension of 1.
FACTOR_KINDS: tuple[FactorKind, ...] = get_args(FactorKind)
Device = torch.device | str


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_activations(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: Device = "cpu",
) -> torch.Tensor:
    """Return ``[T, H]`` standard normal values."""
    return _normal(_generator(seed), num_tokens, hidden).to(device, dtype)


def random_weights(
    num_experts: int,
    hidden: int,
    intermediate: int,
    layout: WeightLayout | None = None,
    activation: Activation | None = None,
    biases: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: Device = "cpu",
) -> ExpertWeights:
    """Return weights in the layout's own storage, scaled so that gate, up and y are of size 1.

    ``gate_up`` is ``[E, 2I, H]`` (``[E, I, H]`` ungated), ``down`` ``[E, H, I]``; transposed in
    storage when the layout is not out-major. Biases are ``[E, 2I]`` and ``[E, H]``.
    """
    layout = layout or WeightLayout()
    generator = _generator(seed)
    wide = intermediate * (2 if layout.gated else 1)
    gate_up = _normal(generator, num_experts, wide, hidden) / math.sqrt(hidden)
    down = _normal(generator, num_experts, hidden, intermediate) / math.sqrt(intermediate)
    if not layout.out_major:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up_bias = _normal(generator, num_experts, wide) / 2 if biases else None
    down_bias = _normal(generator, num_experts, hidden) / 2 if biases else None
    return ExpertWeights(
        gate_up.contiguous().to(device, dtype),
        down.contiguous().to(device, dtype),
        None if gate_up_bias is None else gate_up_bias.to(device, dtype),
        None if down_bias is None else down_bias.to(device, dtype),
        activation or Activation(),
        layout,
    )


def random_factors(
    site: Site,
    rank: int | Mapping[str, int],
    kind: FactorKind = "separate",
    projections: Sequence[str] | None = None,
    experts: Sequence[int] | None = None,
    scale: float = 2.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> SiteFactors:
    """Return one adapter for a site, sized so that each delta is about as large as the base.

    Args:
        site: where it attaches; linears and routers have the one projection ``linear``.
        rank: of all projections, or per projection.
        kind: see :data:`FACTOR_KINDS`.
        projections: those that it has; None = all of the site.
        experts: local experts that it has, entry i for ``experts[i]``; None = all, without a map.
        scale: stored with the factors; lora_B is divided by it, so the delta stays the same size.
        seed: of the values.
        dtype: of the factors, so that a reference sees what a table of this dtype holds.

    Returns:
        Factors ``lora_A [Ea, R, in]``, ``lora_B [Eb, out, R]``. ``kind`` only shapes experts sites.
    """
    generator = _generator(seed)
    is_experts = site.kind == "experts"
    entries = 1 if not is_experts else site.num_experts if experts is None else len(experts)
    names = [p.name for p in site.projections] if projections is None else list(projections)
    found: dict[str, LoraFactor] = {}
    shared_a: torch.Tensor | None = None
    for name in names:
        sizes = site.projection(name)
        r = rank if isinstance(rank, int) else rank[name]
        side_outer = kind == "shared_outer" and is_experts
        a_entries = 1 if side_outer and name != "down" else entries
        b_entries = 1 if side_outer and name == "down" else entries
        lora_a = _random_a(generator, a_entries, r, sizes).to(device, dtype)
        if kind != "separate" and name in ("gate", "up"):
            shared_a = lora_a if shared_a is None else shared_a
            lora_a = shared_a
        lora_b = _normal(generator, b_entries, sizes.out_features, r)
        lora_b = lora_b * (0.6 / (math.sqrt(max(r, 1)) * scale))
        found[name] = LoraFactor(lora_a, lora_b.to(device, dtype), scale)
    return SiteFactors(found, _expert_map(site, experts, device))


def _random_a(
    generator: torch.Generator, entries: int, rank: int, sizes: Projection
) -> torch.Tensor:
    values = _normal(generator, entries, rank, sizes.in_features)
    return values / math.sqrt(sizes.in_features)


def _expert_map(site: Site, experts: Sequence[int] | None, device: Device) -> torch.Tensor | None:
    if experts is None or site.kind != "experts":
        return None
    expert_map = torch.full((site.num_experts,), -1, dtype=torch.int32)
    for entry, expert in enumerate(experts):
        expert_map[expert] = entry
    return expert_map.to(device)


@dataclass(frozen=True)
class Routing:
    """What a router hands to the layer.

    Attributes:
        topk_ids: int32 ``[T, K]`` expert ids, -1 = dropped.
        topk_weights: fp32 ``[T, K]``; NaN where the id is -1, since that weight is never read.
        empty_expert: an expert that no token uses, or -1.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    empty_expert: int


def random_routing(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    seed: int = 0,
    empty_expert: bool = True,
    minus_ones: float = 0.0,
    device: Device = "cpu",
) -> Routing:
    """Route tokens at random.

    Args:
        num_tokens, top_k, num_experts: T, K and E.
        seed: of the choices.
        empty_expert: keep one expert without tokens (needs E > 1).
        minus_ones: fraction of the pairs that are dropped; at least one when it is above 0.

    A token's experts differ while there are enough of them, else they repeat.
    """
    generator = _generator(seed)
    experts = torch.randperm(num_experts, generator=generator)
    empty = -1
    if empty_expert and num_experts > 1:
        empty, experts = int(experts[0]), experts[1:]
    scores = torch.rand(num_tokens, len(experts), generator=generator)
    order = scores.argsort(dim=1)
    repeats = -(-top_k // len(experts))
    ids = experts[order].repeat(1, repeats)[:, :top_k].to(torch.int32)
    weights = torch.softmax(_normal(generator, num_tokens, top_k), dim=1)
    pairs = ids.numel()
    if minus_ones > 0 and pairs:
        count = max(1, round(minus_ones * pairs))
        dropped = torch.randperm(pairs, generator=generator)[:count]
        ids.view(-1)[dropped] = -1
        weights.view(-1)[dropped] = float("nan")
    return Routing(ids.to(device), weights.to(device), empty)
