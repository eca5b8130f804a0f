"""Random problems, random allocations, random factors. A failure prints how to repeat it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moegraft.backends.cpu as cpu
from moegraft.adapters.arena import FreeList
from moegraft.factor_table import Arena, SiteTable, site_table
from moegraft.factors import TableLayout
from moegraft.layer import MoeLoraLayer
from moegraft.packing import pack_adapter
from moegraft.plan import Plan
from moegraft.sites import Site, expert_site, linear_site
from moegraft.testing import (
    ACTIVATIONS,
    FACTOR_KINDS,
    LAYOUTS,
    LayerCase,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    assert_same_factors,
    layer_case,
    random_factors,
)
from moegraft.types import SiteFactors

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def run_with(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run ``examples`` random examples; print the blob that repeats a failing one."""
    return settings(
        max_examples=examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@st.composite
def adapters_of(draw: st.DrawFn, site: Site, dtype: torch.dtype) -> SiteFactors | None:
    """An empty slot, or any kind, ranks, subset of projections and ordered subset of experts."""
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    kind = draw(st.sampled_from(FACTOR_KINDS))
    names = [p.name for p in site.projections]
    present = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    ranks = st.integers(0, 20)
    same = draw(ranks)
    rank = {n: draw(ranks) if kind == "separate" else same for n in names}
    experts = None
    if draw(st.booleans()):
        ids = st.integers(0, site.num_experts - 1)
        experts = draw(st.lists(ids, min_size=1, unique=True))
    return random_factors(
        site,
        rank,
        kind,
        [n for n in names if n in present],
        experts,
        draw(st.sampled_from([0.125, 1.0, 16.0])),
        draw(st.integers(0, 10**6)),
        dtype,
    )


@st.composite
def layer_cases(draw: st.DrawFn) -> LayerCase:
    """A whole random layer call."""
    dtype = draw(DTYPES)
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    num_experts, hidden = draw(st.integers(1, 9)), draw(st.integers(6, 40))
    intermediate = draw(st.integers(4, 40))
    site = expert_site("experts", num_experts, hidden, intermediate, layout)
    num_slots = draw(st.integers(0, 4))
    adapters = [draw(adapters_of(site, dtype)) for _ in range(num_slots)]
    slots = draw(st.lists(st.integers(-1, num_slots - 1), min_size=1, max_size=8))
    names = ["silu", "gelu", "relu2"] if layout.gated else ["relu2", "gelu"]
    if layout.gated:
        names.append("clamped")
    return layer_case(
        draw(st.integers(0, 24)),
        adapters,
        slots,
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        top_k=draw(st.integers(1, 4)),
        layout=layout,
        activation=ACTIVATIONS[draw(st.sampled_from(names))],
        biases=draw(st.booleans()),
        minus_ones=draw(st.sampled_from([0.0, 0.2, 1.0])),
        expert_offset=draw(st.sampled_from([0, 3])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        dtype=dtype,
        seed=draw(st.integers(0, 10**6)),
    )


class _Forced(MoeLoraLayer):
    """The layer on torch's operators with one LoRA method, whatever the plan would take."""

    method: cpu.LoraMethod = "segments"

    def plan(self, num_tokens: int, top_k: int) -> Plan:
        return replace(super().plan(num_tokens, top_k), stages=cpu.CpuStages(self.method))


@run_with(250)
@given(case=layer_cases())
def test_any_layer_call_agrees_with_the_reference_and_base_rows_keep_their_bits(
    case: LayerCase,
) -> None:
    no_delta = torch.tensor(
        [
            slot < 0 or (adapter := case.adapters[slot]) is None or _is_idle(adapter)
            for slot in case.token_slots
        ],
        dtype=torch.bool,
    )
    for method in get_args(cpu.LoraMethod):
        layer = _Forced(
            case.weights,
            case.table(),
            expert_offset=case.expert_offset,
            routed_scaling_factor=case.scale,
            backend="cpu",
        )
        layer.method = method
        _assert_agrees(case, layer, no_delta, method)
    # The plan's choice: compiled kernels, where there are any.
    _assert_agrees(case, case.layer(), no_delta, "chosen")


def _assert_agrees(
    case: LayerCase, layer: MoeLoraLayer, no_delta: torch.Tensor, method: str
) -> None:
    """Check output and delta, each where rounding alone can't make it fail, and base rows' bits."""
    ref_with, ref_base = case.reference(), case.reference(base=True)
    with_lora, base = case.run(layer), case.run(layer, base=True)
    assert_bit_equal(with_lora[no_delta], base[no_delta], method)
    for found, wanted in ((with_lora, ref_with), (base, ref_base)):
        if float(wanted.norm()) == 0 or float(wanted.square().mean().sqrt()) > 0.05:
            assert_close(found, wanted, case.x.dtype)
    if float((ref_with - ref_base).norm()) >= 0.3 * float(ref_base.norm()):
        assert_delta_close(with_lora, base, ref_with, ref_base)


def _is_idle(adapter: SiteFactors) -> bool:
    return all(f.rank == 0 for f in adapter.projections.values())


@run_with(150)
@given(
    capacity=st.integers(0, 60),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 25), st.integers(0, 99)), max_size=60),
    growth=st.integers(0, 40),
)
def test_free_list_never_overlaps_and_always_merges_back(
    capacity: int, steps: list[tuple[bool, int, int]], growth: int
) -> None:
    free = FreeList(capacity)
    held: list[tuple[int, int]] = []
    for i, (allocate, units, choice) in enumerate(steps):
        if i == len(steps) // 2:
            capacity += growth
            free.grow(capacity)
        if allocate:
            largest = free.largest
            start = free.allocate(units)
            assert (start is None) == (units > largest)
            if start is not None:
                assert start >= 0 and start + units <= capacity
                for other, size in held:
                    assert not units or not size or start + units <= other or other + size <= start
                held.append((start, units))
        elif held:
            free.release(*held.pop(choice % len(held)))
        assert free.free_units == capacity - sum(units for _, units in held)
    for start, units in held:
        free.release(start, units)
    assert (free.free_units, free.largest) == (capacity, capacity)
    assert free.allocate(capacity) == 0


@run_with(150)
@given(data=st.data(), dtype=DTYPES, base=st.integers(0, 50))
def test_factors_survive_packing_relocation_and_the_table_bit_for_bit(
    data: st.DataObject, dtype: torch.dtype, base: int
) -> None:
    layouts = st.sampled_from(["gate_first", "interleaved", "no_gate"])
    sizes = st.integers(1, 20)
    sites = [
        expert_site("a", data.draw(sizes), data.draw(sizes), 5, LAYOUTS[data.draw(layouts)]),
        linear_site("b", data.draw(sizes), data.draw(sizes)),
        expert_site("c", 3, 7, data.draw(sizes)),
    ]
    wanted = {site.name: data.draw(adapters_of(site, dtype)) for site in sites}
    given_factors = {name: f for name, f in wanted.items() if f is not None}
    layout = TableLayout.of(sites)
    packed = pack_adapter(given_factors, layout, dtype)
    ranks = [f.rank for fs in given_factors.values() for f in fs.projections.values()]
    assert packed.max_rank == max(ranks, default=0)
    assert packed.num_bytes % 16 == 0
    unit = 16 // dtype.itemsize
    arena = torch.full(((base + 3) * unit + packed.data.numel(),), float("nan"), dtype=dtype)
    arena[base * unit : base * unit + packed.data.numel()] = packed.data
    row = packed.relocated(base, layout)[None]
    for site in sites:
        records, expert_map = layout.records(row, site), layout.expert_map(row, site)
        table = SiteTable(site, Arena(arena), records, expert_map, packed.max_rank)
        found, want = table.factors(0), wanted[site.name]
        if want is None:
            assert found is None
        else:
            assert_same_factors(found, want, site)


@run_with(40)
@given(data=st.data(), dtype=DTYPES)
def test_a_stand_alone_table_holds_every_slot(data: st.DataObject, dtype: torch.dtype) -> None:
    site = expert_site("experts", 4, 9, 6)
    slots = data.draw(st.lists(adapters_of(site, dtype), max_size=5))
    table = site_table(site, slots, dtype)
    assert table.num_slots == len(slots)
    for slot, wanted in enumerate(slots):
        if wanted is None:
            assert table.factors(slot) is None
        else:
            assert_same_factors(table.factors(slot), wanted, site)
