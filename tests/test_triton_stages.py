"""The unfused GPU stages in Triton's interpreter, each alone and as a whole layer."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from moegraft.activations import apply_activation
from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.stages import PairOrder, TritonStages
from moegraft.backends.triton.unfused import run_unfused
from moegraft.backends.triton.workspace import MAX_PAIRS
from moegraft.call import LayerCall
from moegraft.errors import MoegraftError
from moegraft.factor_table import site_table
from moegraft.layer import run_stages
from moegraft.sites import Site, expert_site
from moegraft.stages import split_columns
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    layer_case,
    poisoned_empty,
    random_activations,
    random_factors,
    random_routing,
    random_weights,
)
from moegraft.types import SiteFactors, TokenSlots, WeightLayout

CONFIG = FusedConfig(16, GemmConfig(16, 32, 4, 2), GemmConfig(32, 16, 4, 2))
STAGES = TritonStages(CONFIG)
EXPERTS, HIDDEN, INTERMEDIATE = 5, 40, 24
SITE = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
SLOTS = [0, 1, -1, 3, 4, 5, 2]
ROUTING = random_routing(7, 2, EXPERTS, minus_ones=0.2)
LOCAL = (ROUTING.topk_ids >= 0).flatten()
PAIR_TOKEN = torch.arange(14) // 2


def adapters(site: Site, dtype: torch.dtype = torch.float32) -> list[SiteFactors | None]:
    """Return slots with factors of every kind and mixed ranks, and an empty one."""
    return [
        random_factors(site, 3, "fused", seed=1, dtype=dtype),
        random_factors(site, 20, "separate", seed=2, dtype=dtype),
        None,
        random_factors(site, 4, "separate", experts=[0, 3], seed=3, dtype=dtype),
        random_factors(site, 1, "separate", projections=["up"], seed=4, dtype=dtype),
        random_factors(site, 33, "shared_outer", seed=5, dtype=dtype),
    ]


def permute(slots: list[int] | None = None) -> PairOrder:
    """Return the order of ROUTING's pairs, in poisoned memory."""
    token_slots = None if slots is None else TokenSlots.of(slots)
    with poisoned_empty(integers=True):
        return STAGES.permute(ROUTING.topk_ids, token_slots, EXPERTS, 0)


def by_pair(rows: torch.Tensor) -> torch.Tensor:
    """Put NaN into the rows of pairs that are not local."""
    return torch.where(LOCAL[:, None], rows, torch.nan)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset", [0, 4])
def test_permute_puts_exactly_the_local_pairs_into_blocks_of_their_expert(
    offset: int, dtype: torch.dtype
) -> None:
    ids = random_routing(20, 3, 12, minus_ones=0.1).topk_ids.to(dtype)
    with poisoned_empty(integers=True):
        perm = STAGES.permute(ids, None, 5, offset)
    assert (perm.num_rows, perm.num_tokens, perm.top_k, perm.has_slots) == (60, 20, 3, False)
    found = {}
    for block, info in enumerate(perm.route.block_info.tolist()):
        for row in range(block * 16, block * 16 + info % 256):
            found[int(perm.route.row_pair[row])] = (info // 256, row)
    flat = (ids.flatten() - offset).tolist()
    assert {p: e for p, (e, _) in found.items()} == {p: e for p, e in enumerate(flat) if 0 <= e < 5}
    assert perm.route.pair_row.tolist() == [found.get(p, (0, -1))[1] for p in range(60)]


def test_permute_takes_no_pairs_and_refuses_too_many() -> None:
    assert STAGES.permute(torch.zeros(0, 2, dtype=torch.int32), None, 3, 0).num_rows == 0
    ids = torch.zeros(MAX_PAIRS + 1, 1, dtype=torch.int32)
    with pytest.raises(MoegraftError, match=f"at most {MAX_PAIRS} pairs .* {MAX_PAIRS + 1}"):
        STAGES.permute(ids, None, 3, 0)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gate_up_and_down_multiply_the_rows_of_local_pairs_only(layout: str, biases: bool) -> None:
    weights = random_weights(EXPERTS, HIDDEN, INTERMEDIATE, LAYOUTS[layout], None, biases)
    perm, expert = permute(), ROUTING.topk_ids.flatten()[LOCAL].long()
    x, h = random_activations(7, HIDDEN), by_pair(random_activations(14, INTERMEDIATE))
    with poisoned_empty():
        rows, y = STAGES.gate_up(x, weights, perm), STAGES.down(h, weights, perm)
    wanted = torch.einsum("noh,nh->no", weights.gate_up_oi[expert], x[PAIR_TOKEN[LOCAL]])
    wanted_y = torch.einsum("nhi,ni->nh", weights.down_oi[expert], h[LOCAL])
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        wanted, wanted_y = (
            wanted + weights.gate_up_bias[expert],
            wanted_y + weights.down_bias[expert],
        )
    assert_close(rows[LOCAL], wanted, torch.float32)
    assert_close(y[LOCAL], wanted_y, torch.float32)
    assert rows[~LOCAL].isnan().all() and y[~LOCAL].isnan().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_that_of_the_activations_module(name: str) -> None:
    for layout in ("gate_first", "up_first", "interleaved"):
        if name == "custom" and layout != "gate_first":
            continue
        weights = random_weights(2, 4, 6, LAYOUTS[layout], ACTIVATIONS[name])
        rows = random_activations(9, 12, seed=1) * 2
        h = STAGES.activation(rows, weights, torch.float16)
        assert h.dtype == torch.float16
        wanted = apply_activation(rows.double(), weights.activation, weights.layout, 6)
        assert_close(h, wanted, torch.float16)


def test_finalize_sums_the_weighted_rows_of_local_pairs_and_scales_once() -> None:
    y = by_pair(random_activations(14, 12))
    with poisoned_empty():
        out = STAGES.finalize(y, ROUTING.topk_weights, permute(), 2.5)
    weighted = ROUTING.topk_weights.flatten()[:, None].double() * y
    wanted = weighted.nan_to_num(0).view(7, 2, 12).sum(1) * 2.5
    assert_close(out, wanted, torch.float32)


@pytest.mark.parametrize("projections", [("gate", "up"), ("down",), ("up",)])
def test_lora_shrink_is_a_times_x_and_zero_elsewhere(projections: tuple[str, ...]) -> None:
    slots, held = TokenSlots.of(SLOTS), adapters(SITE)
    down = projections == ("down",)
    rows = by_pair(random_activations(14, INTERMEDIATE)) if down else random_activations(7, HIDDEN)
    table = site_table(SITE, held)
    ranks = STAGES.lora_shrink(rows, table, projections, permute(SLOTS), slots)
    for name, values in zip(projections, ranks.values, strict=True):
        wanted = torch.zeros(14, 33, dtype=torch.float64)
        for pair in LOCAL.nonzero().flatten().tolist():
            adapter, token = held[SLOTS[pair // 2]], pair // 2
            expert = int(ROUTING.topk_ids[token, pair % 2])
            if SLOTS[token] >= 0 and adapter is not None and name in adapter.projections:
                entry, factor = adapter.entry(expert), adapter.projections[name]
                if entry >= 0:
                    a = factor.lora_A[entry if factor.lora_A.shape[0] > 1 else 0]
                    wanted[pair, : factor.rank] = (
                        a.double() @ rows[pair if down else token].double()
                    )
        assert_close(values, wanted, torch.float32)
        assert bool((values[wanted == 0] == 0).all())


@pytest.mark.parametrize("layout", ["gate_first", "up_first", "interleaved", "no_gate"])
def test_shrink_and_expand_add_scale_b_a_x_to_their_own_columns(layout: str) -> None:
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE, LAYOUTS[layout])
    held, slots, perm = adapters(site), TokenSlots.of(SLOTS), permute(SLOTS)
    sides = tuple(p.name for p in site.projections[:-1])
    x = random_activations(7, HIDDEN)
    packed = by_pair(random_activations(14, INTERMEDIATE * len(sides), seed=5))
    before, wanted = packed.clone(), packed.double()
    fused = packed.clone()
    table = site_table(site, held)
    ranks = STAGES.lora_shrink(x, table, sides, perm, slots)
    STAGES.lora_expand(ranks, table, sides, perm, split_columns(packed, site, sides))
    STAGES.lora_shrink_expand(x, table, sides, perm, slots, fused)
    assert_bit_equal(fused, packed)
    for pair, (side, out) in (
        (pair, item)
        for pair in range(14)
        for item in zip(sides, split_columns(wanted, site, sides), strict=True)
    ):
        token = pair // 2
        adapter = held[SLOTS[token]] if SLOTS[token] >= 0 else None
        factor = None if adapter is None else adapter.projections.get(side)
        entry = -1
        if adapter is not None and LOCAL[pair]:
            entry = adapter.entry(int(ROUTING.topk_ids[token, pair % 2]))
        if factor is None or entry < 0:
            columns = site.layout.columns(side, INTERMEDIATE)
            assert_bit_equal(packed[pair, columns], before[pair, columns], f"{side} without delta")
        else:
            a = factor.lora_A[entry if factor.lora_A.shape[0] > 1 else 0].double()
            b = factor.lora_B[entry if factor.lora_B.shape[0] > 1 else 0].double()
            out[pair] += factor.scale * (b @ (a @ x[token].double()))
    assert_close(packed[LOCAL], wanted[LOCAL], torch.float32)


def call_of(case: LayerCase, base: bool) -> LayerCall:
    """Return a case as a call into a poisoned output."""
    slots = None if base else case.slots()
    return LayerCall(
        case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights, case.table(), slots,
        case.expert_offset, case.scale, torch.full_like(case.x, torch.nan),
    )  # fmt: skip


def check(case: LayerCase) -> torch.Tensor:
    """Check the composed stages and both modes, in poisoned memory; return the serial result."""
    ref, ref_base = case.reference(), case.reference(base=True)
    rows = torch.tensor([s < 0 or case.adapters[s] is None for s in case.token_slots]).bool()
    results = []
    for run in (
        lambda call: run_stages(STAGES, call),
        lambda call: run_unfused(call, CONFIG, two_stream=True),
        lambda call: run_unfused(call, CONFIG),
    ):
        with poisoned_empty(integers=True):
            with_lora, base = run(call_of(case, False)), run(call_of(case, True))
        assert_close(base, ref_base, case.x.dtype)
        assert_close(with_lora, ref, case.x.dtype)
        assert_delta_close(with_lora, base, ref, ref_base)
        assert_bit_equal(with_lora[rows], base[rows], "base rows")
        results.append(with_lora)
    assert_bit_equal(results[1], results[2], "two_stream and serial")
    return results[2]


def case_of(
    num_tokens: int = 7, layout: WeightLayout | None = None, **options: object
) -> LayerCase:
    """Return a case with mixed adapters."""
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE, layout)
    dtype = options.get("dtype", torch.float32)
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    return layer_case(
        num_tokens, adapters(site, dtype), SLOTS, layout=layout, **{**sizes, **options}
    )


@pytest.mark.parametrize(
    ("layout", "activation"),
    [
        ("gate_first", "silu"),
        ("gate_first", "custom"),
        ("up_first", "gelu_tanh"),
        ("interleaved_in_major", "clamped"),
        ("gate_first_in_major", "gelu"),
        ("no_gate", "relu2"),
        ("no_gate_in_major", "relu"),
    ],
)
def test_whole_layers_match_the_reference(layout: str, activation: str) -> None:
    check(
        case_of(
            layout=LAYOUTS[layout], activation=ACTIVATIONS[activation], biases=True, minus_ones=0.2
        )
    )


@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (1, 5), (2, 22), (20, 2)])
def test_any_number_of_tokens_and_choices(num_tokens: int, top_k: int) -> None:
    check(case_of(num_tokens, top_k=top_k, expert_offset=3, scale=1.5))


def test_half_precision_and_all_tokens_on_one_expert() -> None:
    case = case_of(21, dtype=torch.float16, top_k=1)
    ids = torch.full_like(case.routing.topk_ids, 3, dtype=torch.int64)
    check(replace(case, routing=replace(case.routing, topk_ids=ids)))


def test_unfused_and_fused_layers_agree() -> None:
    case = case_of(9, biases=True, minus_ones=0.1)
    assert_close(check(case), run_layer(call_of(case, False), CONFIG), case.x.dtype)


@pytest.mark.parametrize("activation", ["silu", "custom"])
def test_a_nan_adapter_reaches_no_other_row(activation: str) -> None:
    case = case_of(activation=ACTIVATIONS[activation])
    broken = case.adapters[1]
    assert broken is not None
    factors = {
        name: replace(factor, lora_A=torch.full_like(factor.lora_A, torch.nan))
        for name, factor in broken.projections.items()
    }
    bad = replace(case, adapters=(case.adapters[0], SiteFactors(factors), *case.adapters[2:]))
    rows = torch.tensor(case.token_slots) != 1
    good, found = (run_unfused(call_of(c, False), CONFIG, True) for c in (case, bad))
    assert_bit_equal(found[rows], good[rows], "rows of other adapters")
    assert found[~rows].isnan().any()
