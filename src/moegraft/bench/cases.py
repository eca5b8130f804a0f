"""Weights, adapters and inputs of a decode measurement, made where they are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moegraft.bench.harness import L2_TIMES
from moegraft.bench.options import UNQUANTIZED, DecodeRequest
from moegraft.bench.shapes import ModelShape
from moegraft.bench.traffic import Traffic, expert_bytes, layer_traffic, reuse_bytes
from moegraft.factor_table import Arena, SiteTable
from moegraft.factors import RANK_I32, UNIT_BYTES, TableLayout
from moegraft.packing import pack_adapter
from moegraft.sites import Site, expert_site
from moegraft.types import Activation, ExpertWeights, LoraFactor, SiteFactors, WeightLayout

_STYLES = {
    "swiglu": (Activation(), WeightLayout()),
    "gpt_oss": (
        Activation("silu", limit=7.0, alpha=1.702, up_shift=1.0),
        WeightLayout("interleaved", out_major=False),
    ),
    "relu2": (Activation("relu2"), WeightLayout("no_gate")),
}
_MIN_SETS, _MAX_SETS = 3, 32


def style_of(shape: ModelShape) -> tuple[Activation, WeightLayout]:
    """Return a model's activation, and the layout of its unquantised weights."""
    return _STYLES[shape.kind]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call's inputs: ``x [T, H]``, ``topk_ids [T, K]`` int32, ``topk_weights [T, K]`` fp32."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, eq=False)
class DecodeCase:
    """What one row of a measurement runs.

    Attributes:
        request: what was asked for.
        weights, table: of the layer.
        sets: input sets that run one after the other, so that weights come from memory.
        slots: int32 ``[T]``, the adapter slot of each token; a graph reads it at this address.
        live: the distinct slots.
        plain: of quantised weights: bf16 weights of the same model, to compare speeds with.
    """

    request: DecodeRequest
    weights: ExpertWeights
    table: SiteTable
    sets: tuple[Inputs, ...]
    slots: torch.Tensor
    live: tuple[int, ...]
    plain: ExpertWeights | None = None

    def unquantised(self) -> DecodeCase | None:
        """Return the same calls of the ``plain`` weights without adapters; None without them."""
        if self.plain is None:
            return None
        request = replace(self.request, weight_format=UNQUANTIZED)
        return replace(self, request=request, weights=self.plain, live=(), plain=None)

    def traffic(self) -> Traffic:
        """Return the mean traffic of the input sets."""
        parts = [layer_traffic(self.weights, self.table, s.topk_ids, self.slots) for s in self.sets]
        return Traffic.mean(parts)

    def reuse_bytes(self) -> int:
        """Return the fewest bytes between two uses of an expert."""
        return reuse_bytes([s.topk_ids.cpu() for s in self.sets], expert_bytes(self.weights))


def random_layer(shape: ModelShape, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Return bf16 weights drawn on the device, sized so that gate, up and y are of size 1."""
    return draw_layer(shape, torch.Generator(device).manual_seed(seed))


def draw_layer(shape: ModelShape, generator: torch.Generator) -> ExpertWeights:
    """Draw the next bf16 weights of a generator, on its device."""
    activation, layout = style_of(shape)
    device = generator.device
    experts, hidden, inter = shape.num_experts, shape.hidden, shape.intermediate
    wide = shape.sides * inter

    def draw(*sizes: int, std: float) -> torch.Tensor:
        values = torch.empty(*sizes, device=device, dtype=torch.bfloat16)
        return values.normal_(0.0, std, generator=generator)

    gate_up = (wide, hidden) if layout.out_major else (hidden, wide)
    down = (hidden, inter) if layout.out_major else (inter, hidden)
    biases = shape.kind == "gpt_oss"
    return ExpertWeights(
        draw(experts, *gate_up, std=hidden**-0.5),
        draw(experts, *down, std=inter**-0.5),
        draw(experts, wide, std=0.5) if biases else None,
        draw(experts, hidden, std=0.5) if biases else None,
        activation,
        layout,
    )


def random_table(
    shape: ModelShape, rank: int, slots: int, kind: str, device: torch.device, seed: int = 0
) -> SiteTable:
    """Return a table whose slots all hold an adapter, drawn on the device.

    The records are packed once on the host, from factors without memory; the values are drawn
    where they lie, so that many large adapters take seconds.
    """
    layout = style_of(shape)[1]
    site = expert_site("experts", shape.num_experts, shape.hidden, shape.intermediate, layout)
    tables = TableLayout.of([site])
    packed = pack_adapter({site.name: blank_factors(site, rank, kind)}, tables, torch.bfloat16)
    units = packed.num_bytes // UNIT_BYTES
    rows = torch.stack([packed.relocated(slot * units, tables) for slot in range(slots)])
    ranks = tables.records(rows, site).view(torch.int32)[..., RANK_I32].clone()
    rows = rows.to(device)
    elements = (slots * units + 1) * UNIT_BYTES // 2
    arena = Arena(torch.zeros(elements, dtype=torch.bfloat16, device=device))
    expert_map = tables.expert_map(rows, site)
    table = SiteTable(site, arena, tables.records(rows, site), expert_map, rank, host_ranks=ranks)
    generator = torch.Generator(device).manual_seed(seed)
    for slot in range(slots):
        draw_factors(table, slot, generator)
    return table


def blank_factors(site: Site, rank: int, kind: str, scale: float = 2.0) -> SiteFactors:
    """Return factors of zeros that take no memory, in the shapes of ``kind``."""
    zero = torch.zeros(1, dtype=torch.bfloat16)
    experts = site.num_experts
    outer = 1 if kind == "shared_outer" else experts
    found: dict[str, LoraFactor] = {}
    first_a: torch.Tensor | None = None
    for projection in site.projections:
        down = projection.name == "down"
        entries_a, entries_b = (experts, outer) if down else (outer, experts)
        lora_a = zero.expand(entries_a, rank, projection.in_features)
        if kind != "separate" and not down:
            first_a = lora_a if first_a is None else first_a
            lora_a = first_a
        lora_b = zero.expand(entries_b, projection.out_features, rank)
        found[projection.name] = LoraFactor(lora_a, lora_b, scale)
    return SiteFactors(found)


def draw_factors(
    table: SiteTable, slot: int, generator: torch.Generator | None, size: float = 0.6
) -> None:
    """Draw a slot's values in place; each projection's delta gets about ``size`` squared.

    With unit inputs of a projection, ``A x`` is of size 1 and ``scale B A x`` of size ``size``.
    """
    factors = table.factors(slot)
    assert factors is not None, f"slot {slot} is empty"
    for factor in factors.projections.values():
        rank, width = factor.lora_A.shape[1:]
        factor.lora_A.normal_(0.0, 1 / math.sqrt(width), generator=generator)
        factor.lora_B.normal_(0.0, size / (math.sqrt(rank) * factor.scale), generator=generator)


def make_case(
    request: DecodeRequest,
    weights: ExpertWeights,
    table: SiteTable,
    l2_size: int,
    seed: int = 0,
) -> DecodeCase:
    """Draw inputs; as many sets as it takes for :data:`L2_TIMES` times the L2 between two uses."""
    device, tokens, top_k = weights.device, request.tokens, request.shape.top_k
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    id_sets = rotated_ids(
        tokens, top_k, weights.num_experts, expert_bytes(weights), L2_TIMES * l2_size, generator
    )
    sets = []
    for ids in id_sets:
        x = torch.randn(tokens, weights.hidden, generator=generator)
        routing = torch.softmax(torch.randn(tokens, top_k, generator=generator), 1)
        sets.append(Inputs(x.to(device, weights.dtype), ids.to(device), routing.to(device)))
    used = spread_slots(request.slots, request.live)
    slots = torch.tensor([used[t % len(used)] for t in range(tokens)], dtype=torch.int32)
    live = tuple(sorted(set(slots.tolist())))
    return DecodeCase(request, weights, table, tuple(sets), slots.to(device), live)


def spread_slots(slots: int, live: int) -> tuple[int, ...]:
    """Return ``live`` slots spread over all of them: 2 of 8 are 0 and 4."""
    return tuple(i * slots // live for i in range(live))


def rotated_ids(
    tokens: int,
    top_k: int,
    experts: int,
    bytes_per_expert: int,
    distance: int,
    generator: torch.Generator,
    at_least: int = _MIN_SETS,
) -> tuple[torch.Tensor, ...]:
    """Draw random routings that, run over and over, come back to an expert late.

    Each set is drawn at random; then its experts are renamed to those that were used the longest
    time ago. So the number of touched experts, and of tokens per expert, stays what it would be.

    Returns:
        int32 ``[T, K]`` sets, ``at_least`` so many; more of them while fewer than ``distance``
        bytes lie between two uses, up to 32, and while sets leave experts out.
    """
    order = torch.randperm(experts, generator=generator).tolist()
    found: list[torch.Tensor] = []
    while len(found) < _MAX_SETS:
        ids = torch.rand(tokens, experts, generator=generator).topk(top_k, 1)[1]
        drawn = ids.unique()
        oldest = order[: drawn.numel()]
        shuffled = torch.tensor(oldest)[torch.randperm(len(oldest), generator=generator)]
        rename = torch.zeros(experts, dtype=torch.int32)
        rename[drawn] = shuffled.int()
        found.append(rename[ids])
        order = order[len(oldest) :] + oldest
        everything = drawn.numel() == experts  # then each set uses all experts: no distance to gain
        if len(found) >= at_least and (
            everything or _enough(found, experts, bytes_per_expert, distance)
        ):
            break
    return tuple(found)


def _enough(
    sets: Sequence[torch.Tensor], experts: int, bytes_per_expert: int, distance: int
) -> bool:
    """True when the reuse distance is kept and, where that is possible, few sets share experts.

    At one token the sets go through all experts, so that the mean is over many choices.
    """
    touched = sum(ids.unique().numel() for ids in sets)
    next_size = sets[-1].unique().numel()
    if touched + next_size <= experts:
        return False
    return reuse_bytes(sets, bytes_per_expert) >= distance
