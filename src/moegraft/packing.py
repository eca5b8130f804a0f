"""Packing: an adapter's factors laid out as the arena holds them, in one run of copies.

The records that point into it are described in :mod:`moegraft.factors`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moegraft.check import checked_site
from moegraft.factors import (
    A_EXPERT_STRIDE,
    A_OFFSET,
    A_ROW_STRIDE,
    B_EXPERT_STRIDE,
    B_OFFSET,
    B_ROW_STRIDE,
    RANK_I32,
    SCALE_F32,
    SHARED_A_I32,
    UNIT_BYTES,
    PackedAdapter,
    TableLayout,
    align,
    empty_row,
)
from moegraft.pack_in_place import own_spans, reorder
from moegraft.pack_plan import PackPlan, Piece
from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors


def packed_bytes(
    factors: Mapping[str, SiteFactors], layout: TableLayout, dtype: torch.dtype
) -> int:
    """Return ``num_bytes`` of :func:`pack_adapter` for the same arguments, without packing."""
    return plan_adapter(factors, layout, dtype).elements * dtype.itemsize


def pack_adapter(
    factors: Mapping[str, SiteFactors],
    layout: TableLayout,
    dtype: torch.dtype,
    pin_memory: bool = False,
    memory: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> PackedAdapter:
    """Lay an adapter's factors out as the arena holds them.

    Args:
        factors: site name -> factors; AdapterError when one does not fit a site of ``layout``.
        layout: the model's table layout.
        dtype: dtype of the arena; factors are cast once, here.
        pin_memory: put ``data`` in page-locked memory, for asynchronous copies to a GPU.
        memory: uint8 buffer that the factors are views of and that nobody needs afterwards. Where
            they fill it site by site they are put in order inside of it, and it becomes ``data``:
            a large adapter is then never in memory twice.
        device: where ``data`` is made; on a GPU by work that is queued on the current stream.
    """
    plan = plan_adapter(factors, layout, dtype)
    if memory is not None and memory.is_pinned() == pin_memory:
        begins = own_spans(plan, memory, dtype)
        if begins is not None:
            plan = plan_adapter(factors, layout, dtype, begins)
            return plan.packed(reorder(plan, memory.view(dtype)))
    pins = pin_memory and torch.device(device).type == "cpu"
    data = torch.empty(plan.elements, dtype=dtype, device=device, pin_memory=pins)
    plan.fill(data)
    return plan.packed(data)


def places_of(factors: Mapping[str, SiteFactors]) -> set[str]:
    """Return the kinds of devices that factors are on: ``cpu``, ``cuda``."""
    found = [f for site in factors.values() for f in site.projections.values()]
    return {tensor.device.type for f in found for tensor in (f.lora_A, f.lora_B)}


def plan_adapter(
    factors: Mapping[str, SiteFactors],
    layout: TableLayout,
    dtype: torch.dtype,
    begins: Mapping[str, int] | None = None,
) -> PackPlan:
    """Find every factor's place; AdapterError when one does not fit a site of ``layout``.

    Sites and experts come in their order, whatever order they were found in, so equal adapters
    give equal bytes.

    Args:
        factors: site name -> factors.
        layout: the model's table layout.
        dtype: dtype of the arena.
        begins: site name -> where its factors begin; None = one site behind the other.
    """
    sites = {name: checked_site(layout.sites, name, found) for name, found in factors.items()}
    row = empty_row(layout)
    words = layout.all_records(row).numpy()
    ints, floats = words.view("int32"), words.view("float32")
    pieces: list[Piece] = []
    spans: dict[str, tuple[int, int]] = {}
    elements = max_rank = 0

    def place(matrix: torch.Tensor, is_b: bool, order: torch.Tensor | None) -> tuple[int, int, int]:
        nonlocal elements
        entries, rank, width = matrix.transpose(1, 2).shape if is_b else matrix.shape
        row_stride = align(width, dtype)
        offset = elements
        own_order = order if order is not None and len(order) == entries else None
        pieces.append(Piece(name, offset, matrix, is_b, row_stride, own_order))
        elements += entries * rank * row_stride
        expert_stride = 0 if entries == 1 else rank * row_stride
        return offset * dtype.itemsize // UNIT_BYTES, expert_stride, row_stride

    for name in layout.first_record:
        if name not in factors:
            continue
        site, site_factors = sites[name], factors[name]
        first = layout.first_record[name]
        begin = elements = elements if begins is None else begins.get(name, elements)
        expert_map, order = _in_expert_order(site, site_factors)
        previous: LoraFactor | None = None
        for i, projection in enumerate(site.projections, first):
            factor = site_factors.projections.get(projection.name)
            if factor is None or factor.rank == 0:
                previous = None
                continue
            max_rank = max(max_rank, factor.rank)
            shared = previous is not None and previous.lora_A is factor.lora_A
            of_a = (A_OFFSET, A_EXPERT_STRIDE, A_ROW_STRIDE)
            words[i, of_a] = words[i - 1, of_a] if shared else place(factor.lora_A, False, order)
            words[i, (B_OFFSET, B_EXPERT_STRIDE, B_ROW_STRIDE)] = place(factor.lora_B, True, order)
            ints[i, RANK_I32], ints[i, SHARED_A_I32] = factor.rank, int(shared)
            floats[i, SCALE_F32] = factor.scale
            previous = factor
        place_of_map = layout.expert_map(row, site)
        if place_of_map is not None:
            place_of_map.copy_(expert_map)
        spans[name] = (begin, elements)
    return PackPlan(pieces, spans, row, max_rank)


def _in_expert_order(site: Site, factors: SiteFactors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the expert map as stored, and the order of entries that it needs; None = as is."""
    given = factors.expert_map
    if given is None:
        return torch.arange(site.num_experts, dtype=torch.int32), None
    live = given >= 0
    order = given[live].long()
    count = torch.arange(len(order))
    entries = max((factor.num_entries for factor in factors.projections.values()), default=0)
    if entries not in (1, len(order)) or not torch.equal(order.sort().values, count):
        return given, None  # entries that several experts share, or none has
    stored = given.clone()
    stored[live] = count.int()
    return stored, None if entries == 1 or torch.equal(order, count) else order
