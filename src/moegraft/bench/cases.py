"""Weights, adapters and inputs of a decode measurement, made where they are used."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moegraft.bench.harness import L2_TIMES
from moegraft.bench.options import DecodeRequest
from moegraft.bench.shapes import ModelShape
from moegraft.bench.traffic import Traffic, expert_bytes, layer_traffic, reuse_bytes
from moegraft.errors import MoegraftError
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
#: Share of the free memory that weights and adapters may take; the rest is for work buffers.
_MEMORY_SHARE = 0.8
_MIN_SETS, _MAX_SETS = 3, 32


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
    """

    request: DecodeRequest
    weights: ExpertWeights
    table: SiteTable
    sets: tuple[Inputs, ...]
    slots: torch.Tensor
    live: tuple[int, ...]

    def traffic(self) -> Traffic:
        """Return the mean traffic of the input sets."""
        parts = [layer_traffic(self.weights, self.table, s.topk_ids, self.slots) for s in self.sets]
        return Traffic.mean(parts)

    def reuse_bytes(self) -> int:
        """Return the fewest bytes between two uses of an expert."""
        return reuse_bytes([s.topk_ids.cpu() for s in self.sets], expert_bytes(self.weights))


def check_memory(request: DecodeRequest, device: torch.device) -> None:
    """Raise :class:`MoegraftError` unless weights and adapters fit a GPU's free memory."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    refuse_too_large(request, free)


def refuse_too_large(request: DecodeRequest, free_bytes: int) -> None:
    """Raise :class:`MoegraftError` when a request needs too much of this many bytes."""
    if request.bytes_needed > _MEMORY_SHARE * free_bytes:
        raise MoegraftError(
            f"{request.title()} needs {request.bytes_needed / 1e9:.1f} GB for weights and "
            f"adapters, {free_bytes / 1e9:.1f} GB are free and a fifth of it is kept for work "
            "buffers: lower --slots or --rank, or take a smaller model."
        )


def random_layer(shape: ModelShape, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Return bf16 weights drawn on the device, sized so that gate, up and y are of size 1."""
    activation, layout = _STYLES[shape.kind]
    generator = torch.Generator(device).manual_seed(seed)
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
    layout = _STYLES[shape.kind][1]
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


class Made:
    """The last weights and table, which the next request may share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: tuple[str, ExpertWeights] | None = None
        self._table: tuple[tuple[Any, ...], SiteTable] | None = None

    def get(self, request: DecodeRequest) -> tuple[ExpertWeights, SiteTable]:
        """Return a request's weights and table, freeing those of another request first."""
        key = (request.shape.name, request.rank, request.slots, request.kind)
        if self._table is not None and self._table[0] != key:
            self._table = None
        if self._weights is not None and self._weights[0] != request.shape.name:
            self._weights = None
        if self._table is None:
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            check_memory(request, self._device)
        if self._weights is None:
            self._weights = (request.shape.name, random_layer(request.shape, self._device))
        if self._table is None:
            made = random_table(
                request.shape, request.rank, request.slots, request.kind, self._device
            )
            self._table = (key, made)
        return self._weights[1], self._table[1]


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
