"""Each CPU stage alone, against the formula in its docstring."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from moegraft.backends.cpu import CpuStages, LoraMethod
from moegraft.factor_table import Arena, SiteTable, site_table
from moegraft.factors import TableLayout
from moegraft.layer import MoeLoraLayer
from moegraft.packing import pack_adapter
from moegraft.reference import linear_lora_reference
from moegraft.sites import expert_site, linear_site
from moegraft.stages import Permutation
from moegraft.testing import (
    ACTIVATIONS,
    FACTOR_KINDS,
    LAYOUTS,
    FactorKind,
    assert_bit_equal,
    assert_close,
    layer_case,
    random_activations,
    random_factors,
    random_routing,
    random_weights,
)
from moegraft.types import SiteFactors, TokenSlots

METHODS: tuple[LoraMethod, ...] = get_args(LoraMethod)
STAGES = CpuStages("segments")
SITE = expert_site("experts", 5, 12, 7)
SLOTS = [0, -1, 1, 2, 3, 0, 1]


def _adapters() -> list[SiteFactors | None]:
    return [
        random_factors(SITE, 3, "fused", seed=1),
        random_factors(SITE, 6, "separate", experts=[4, 1, 0], scale=0.5, seed=2),
        None,
        random_factors(SITE, 2, "shared_outer", seed=3),
    ]


def _permutation(minus_ones: float = 0.2) -> tuple[Permutation, TokenSlots]:
    slots = TokenSlots.of(SLOTS)
    routing = random_routing(7, 2, 5, minus_ones=minus_ones)
    return STAGES.permute(routing.topk_ids, slots, 5, 0), slots


def test_permute_gives_the_worked_example_of_its_docstring() -> None:
    perm = STAGES.permute(torch.tensor([[2, 0], [-1, 2]]), None, 3, 0)
    assert perm.row_to_pair.tolist() == [1, 0, 3]
    assert perm.row_to_expert.tolist() == [0, 2, 2]
    assert perm.row_to_token.tolist() == [0, 0, 1]
    assert perm.pair_to_row.tolist() == [1, 0, -1, 2]
    assert perm.expert_ends.tolist() == [1, 1, 3]
    assert perm.expert_offsets == (0, 1, 1, 3)
    assert (perm.num_rows, perm.num_tokens, perm.top_k, perm.row_to_slot) == (3, 2, 2, None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset", [0, 4])
def test_permute_keeps_exactly_the_local_pairs_in_expert_order(
    offset: int, dtype: torch.dtype
) -> None:
    ids = random_routing(20, 3, 12, minus_ones=0.1).topk_ids.to(dtype)
    perm = STAGES.permute(ids, TokenSlots.of([-1, 5] * 10), 5, offset)
    flat = ids.reshape(-1).tolist()
    wanted = sorted((e - offset, pair) for pair, e in enumerate(flat) if offset <= e < offset + 5)
    assert list(zip(perm.row_to_expert.tolist(), perm.row_to_pair.tolist(), strict=True)) == wanted
    assert perm.row_to_token.tolist() == [pair // 3 for _, pair in wanted]
    assert perm.row_to_slot is not None
    assert perm.row_to_slot.tolist() == [5 if (pair // 3) % 2 else -1 for _, pair in wanted]
    for e in range(5):
        rows = perm.row_to_expert[perm.expert_offsets[e] : perm.expert_offsets[e + 1]]
        assert rows.tolist() == [e] * sum(expert == e for expert, _ in wanted)
    inverse = {pair: row for row, (_, pair) in enumerate(wanted)}
    assert perm.pair_to_row.tolist() == [inverse.get(pair, -1) for pair in range(60)]


def test_permute_has_no_slots_for_a_base_batch_and_no_rows_for_an_empty_one() -> None:
    ids = torch.zeros(2, 1, dtype=torch.int32)
    assert STAGES.permute(ids, TokenSlots.of([-1, -1]), 3, 0).row_to_slot is None
    empty = STAGES.permute(ids[:0], None, 3, 0)
    assert (empty.num_rows, empty.expert_offsets) == (0, (0, 0, 0, 0))
    dropped = STAGES.permute(ids - 1, TokenSlots.of([0, 1]), 3, 0)
    assert (dropped.num_rows, dropped.pair_to_row.tolist()) == (0, [-1, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gate_up_and_down_multiply_each_row_by_its_experts_weights(
    layout: str, biases: bool, dtype: torch.dtype
) -> None:
    weights = random_weights(5, 12, 8, LAYOUTS[layout], None, biases, dtype)
    perm, _ = _permutation()
    x, h = random_activations(7, 12, dtype), random_activations(perm.num_rows, 8, dtype, seed=1)
    rows = STAGES.gate_up(x, weights, perm)
    expected = torch.einsum(
        "noh,nh->no",
        weights.gate_up_oi[perm.row_to_expert].double(),
        x[perm.row_to_token].double(),
    )
    y = STAGES.down(h, weights, perm)
    expected_y = torch.einsum(
        "nhi,ni->nh", weights.down_oi[perm.row_to_expert].double(), h.double()
    )
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        expected += weights.gate_up_bias[perm.row_to_expert].double()
        expected_y += weights.down_bias[perm.row_to_expert].double()
    assert_close(rows, expected, torch.float32)
    assert_close(y, expected_y, torch.float32)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_the_formula_of_the_types_module(name: str) -> None:
    activation = ACTIVATIONS[name]
    weights = random_weights(2, 4, 6, activation=activation)
    rows = random_activations(9, 12, seed=1) * 2
    gate, up = rows[:, :6], rows[:, 6:]
    plain = {
        "silu": gate * torch.sigmoid(gate) * up,
        "gelu": 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up,
        "gelu_tanh": 0.5
        * gate
        * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        * up,
        "relu": gate.clamp(min=0) * up,
        "relu2": gate.clamp(min=0) ** 2 * up,
        "custom": gate.tanh() * up,
    }
    g = gate.clamp(max=0.7)
    plain["clamped"] = g * torch.sigmoid(1.702 * g) * (up.clamp(-0.7, 0.7) + 1)
    h = STAGES.activation(rows, weights, torch.float16)
    assert h.dtype == torch.float16
    assert_close(h, plain[name], torch.float16)
    assert bool((rows.abs() > 0.7).any())


@pytest.mark.parametrize("order", ["gate_first", "up_first", "interleaved"])
def test_activation_finds_gate_and_up_in_every_order(order: str) -> None:
    gate, up = random_activations(3, 6, seed=1), random_activations(3, 6, seed=2)
    packed = {
        "gate_first": torch.cat([gate, up], 1),
        "up_first": torch.cat([up, gate], 1),
        "interleaved": torch.stack([gate, up], 2).reshape(3, 12),
    }
    weights = random_weights(2, 4, 6, LAYOUTS[order])
    h = STAGES.activation(packed[order], weights, torch.float32)
    assert_close(h, torch.nn.functional.silu(gate) * up, torch.float32)


@pytest.mark.parametrize("minus_ones", [0.0, 0.3])
def test_finalize_sums_weighted_rows_per_token_and_scales_once(minus_ones: float) -> None:
    routing = random_routing(7, 2, 5, minus_ones=minus_ones)
    perm = STAGES.permute(routing.topk_ids, None, 5, 0)
    y = random_activations(perm.num_rows, 12)
    out = STAGES.finalize(y, routing.topk_weights, perm, 2.5)
    expected = torch.zeros(7, 12, dtype=torch.float64)
    for row, pair in enumerate(perm.row_to_pair.tolist()):
        expected[pair // 2] += 2.5 * routing.topk_weights[pair // 2, pair % 2].double() * y[row]
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("projections", [("gate", "up"), ("down",)])
def test_lora_shrink_is_a_times_x_and_zero_elsewhere(projections: tuple[str, ...]) -> None:
    adapters = _adapters()
    perm, slots = _permutation()
    rows = random_activations(perm.num_rows if projections == ("down",) else 7, 12)
    rows = rows[:, : 7 if projections == ("down",) else 12]
    ranks = STAGES.lora_shrink(rows, site_table(SITE, adapters), projections, perm, slots)
    assert len(ranks.values) == len(projections)
    for name, values in zip(projections, ranks.values, strict=True):
        expected = torch.zeros(perm.num_rows, values.shape[1], dtype=torch.float64)
        for n in range(perm.num_rows):
            slot = SLOTS[int(perm.row_to_token[n])]
            adapter = adapters[slot] if slot >= 0 else None
            entry = -1 if adapter is None else adapter.entry(int(perm.row_to_expert[n]))
            if adapter is not None and entry >= 0:
                f = adapter.projections[name]
                a = f.lora_A[entry if f.lora_A.shape[0] > 1 else 0].double()
                source = n if projections == ("down",) else int(perm.row_to_token[n])
                expected[n, : f.rank] = a @ rows[source].double()
        assert_close(values, expected, torch.float32)
        assert bool((values[expected == 0] == 0).all())


def test_lora_shrink_computes_a_shared_a_once() -> None:
    perm, slots = _permutation()
    fused = random_factors(SITE, 3, "fused")
    table = site_table(SITE, [fused] * 4)
    ranks = STAGES.lora_shrink(random_activations(7, 12), table, ("gate", "up"), perm, slots)
    assert ranks.values[0] is ranks.values[1]
    separate = site_table(SITE, [random_factors(SITE, 3)] * 4)
    ranks = STAGES.lora_shrink(random_activations(7, 12), separate, ("gate", "up"), perm, slots)
    assert not torch.equal(ranks.values[0], ranks.values[1])


@pytest.mark.parametrize("layout", ["gate_first", "up_first", "interleaved", "no_gate"])
def test_shrink_and_expand_add_scale_b_a_x_to_their_own_columns(layout: str) -> None:
    site = expert_site("experts", 5, 12, 7, LAYOUTS[layout])
    adapters = [
        random_factors(site, 3, "fused", seed=1),
        random_factors(site, 6, experts=[4, 1, 0], scale=0.5, seed=2),
        None,
        random_factors(site, 2, projections=["up"], seed=3),
    ]
    sides = tuple(p.name for p in site.projections[:-1])
    perm, slots = _permutation()
    x = random_activations(7, 12)
    packed = random_activations(perm.num_rows, 7 * len(sides), seed=5)
    before, expected = packed.clone(), packed.double()
    table = site_table(site, adapters)
    outs = tuple(packed[:, site.layout.columns(side, 7)] for side in sides)
    ranks = STAGES.lora_shrink(x, table, sides, perm, slots)
    STAGES.lora_expand(ranks, table, sides, perm, outs)
    for n in range(perm.num_rows):
        t = int(perm.row_to_token[n])
        adapter = adapters[SLOTS[t]] if SLOTS[t] >= 0 else None
        entry = -1 if adapter is None else adapter.entry(int(perm.row_to_expert[n]))
        for side in sides:
            columns = site.layout.columns(side, 7)
            f = None if adapter is None else adapter.projections.get(side)
            if f is None or entry < 0:
                assert_bit_equal(packed[n, columns], before[n, columns], f"{side} without delta")
            else:
                delta = f.lora_B[entry].double() @ (f.lora_A[entry].double() @ x[t].double())
                expected[n, columns] += f.scale * delta
    assert_close(packed, expected, torch.float32)


@pytest.mark.parametrize("kind", FACTOR_KINDS)
def test_offsets_past_two_to_the_31_elements_find_their_factors(
    kind: FactorKind, lora_method: str
) -> None:
    """The arena is only reserved, not touched: the factors lie 2**31 + 2**20 elements into it."""
    site = expert_site("experts", 5, 24, 20)
    adapter = random_factors(site, 3, kind)
    case = layer_case(7, [adapter], [0])
    layout = TableLayout.of([site])
    packed = pack_adapter({site.name: adapter}, layout, torch.float32)
    start = 2**31 + 2**20
    arena = torch.empty(start + packed.data.numel() + 4)
    arena[start : start + packed.data.numel()] = packed.data
    row = packed.relocated(start // 4, layout)[None]
    far = SiteTable(site, Arena(arena), layout.records(row, site), layout.expert_map(row, site), 4)
    assert_bit_equal(case.run(MoeLoraLayer(case.weights, far)), case.run())
    assert not torch.equal(case.run(), case.run(base=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 9, 100])
def test_linear_lora_adds_each_rows_delta_and_leaves_the_others(
    num_rows: int, dtype: torch.dtype, method: LoraMethod
) -> None:
    site = linear_site("q_proj", 11, 13)
    adapters = [random_factors(site, r, seed=r, dtype=dtype) for r in (1, 8, 3, 8)]
    slots = [(t % 6) - 1 if t % 6 != 5 else 2 for t in range(num_rows)]
    x, base = random_activations(num_rows, 11, dtype), random_activations(num_rows, 13, dtype, 1)
    out = base.clone()
    table = site_table(site, [*adapters, None], dtype)
    CpuStages(method).linear_lora(x, table, TokenSlots.of(slots), out)
    delta = linear_lora_reference(x, [*adapters, None], slots, 13, torch.float64)
    assert_close(out, base.double() + delta, dtype)
    untouched = torch.tensor([slot in (-1, 4) for slot in slots])
    assert_bit_equal(out[untouched], base[untouched], "rows without an adapter")
    assert bool((out[~untouched] != base[~untouched]).any(dim=1).all())


@pytest.mark.parametrize("method", METHODS)
def test_linear_lora_on_all_rows_and_with_a_damaged_neighbour(method: LoraMethod) -> None:
    site = linear_site("q_proj", 11, 13)
    good, other = (random_factors(site, 4, seed=s) for s in (1, 2))
    bad = random_factors(site, 4, seed=3)
    bad.projections["linear"].lora_A.fill_(float("nan"))
    x = random_activations(6, 11)
    outs = []
    for second in (other, bad):
        out = torch.zeros(6, 13)
        CpuStages(method).linear_lora(
            x, site_table(site, [good, second]), TokenSlots.of([0, 1, 0, 1, 0, 0]), out
        )
        outs.append(out)
    rows = torch.tensor([True, False, True, False, True, True])
    assert_bit_equal(outs[1][rows], outs[0][rows])
    assert bool(outs[1][~rows].isnan().all())
    every = torch.zeros(6, 13)
    CpuStages(method).linear_lora(x, site_table(site, [good]), TokenSlots.of([0] * 6), every)
    expected = linear_lora_reference(x, [good], [0] * 6, 13, torch.float64)
    assert_close(every, expected, torch.float32)
