"""The kernels for many rows per expert, in Triton's interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.device import is_interpreted
from moegraft.backends.triton.prefill import layer as prefill_layer
from moegraft.backends.triton.prefill import route as prefill_route
from moegraft.backends.triton.prefill.config import (
    MAX_BYTES,
    PrefillConfig,
    has_tensor_map,
    max_pairs,
)
from moegraft.backends.triton.prefill.layer import run_prefill
from moegraft.backends.triton.workspace import max_blocks
from moegraft.call import LayerCall
from moegraft.factor_table import SiteTable, site_table
from moegraft.sites import expert_site
from moegraft.testing import layer_case, random_factors
from moegraft.testing.cases import LayerCase
from moegraft.testing.compare import assert_close, assert_delta_close
from moegraft.testing.poison import poisoned_empty
from moegraft.types import Activation, SiteFactors, WeightLayout

if not is_interpreted():
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

EXPERTS, HIDDEN, INTERMEDIATE = 5, 48, 40
TILE = GemmConfig(32, 16, 4, 2)
SHRINK = GemmConfig(16, 16, 4, 2)
CONFIG = PrefillConfig(32, tail_m=16, gate_up=TILE, down=TILE, shrink=SHRINK, wide_shrink=SHRINK)
OTHER = FusedConfig(
    16, GemmConfig(32, 32, 4, 3), GemmConfig(32, 32, 4, 3), GemmConfig(64, 64, 4, 2)
)
SWIGLU, RELU2 = Activation(), Activation("relu2")


def adapters(layout: WeightLayout, wide: bool = True) -> list[SiteFactors | None]:
    """Return adapters of several kinds and ranks; ``wide``: one rank is above 16."""
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE, layout)
    return [
        random_factors(site, 8, "separate", seed=1),
        random_factors(site, 3, "fused", seed=2),
        None,
        random_factors(site, 33 if wide else 16, "shared_outer", seed=5),
    ]


def make(num_tokens: int, layout: WeightLayout | None = None, **options: Any) -> LayerCase:
    """Return a case with rows of all adapters, base rows and biases."""
    layout = WeightLayout() if layout is None else layout
    settings: dict[str, Any] = {
        "activation": SWIGLU if layout.gated else RELU2,
        "biases": True,
        "minus_ones": 0.2,
        "scale": 1.5,
    }
    settings |= options
    held = settings.pop("adapters", None) or adapters(layout)
    slots = settings.pop("slots", [0, 1, -1, 3, 2])
    return layer_case(
        num_tokens, held, slots, num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE,
        layout=layout, **settings,
    )  # fmt: skip


def run(case: LayerCase, base: bool = False, config: PrefillConfig = CONFIG) -> torch.Tensor:
    """Run a case with all work buffers poisoned."""
    call = LayerCall(
        case.x,
        case.routing.topk_ids,
        case.routing.topk_weights,
        case.weights,
        case.table(),
        None if base else case.slots(),
        case.expert_offset,
        case.scale,
        torch.full_like(case.x, torch.nan),
    )
    with poisoned_empty():
        return run_prefill(call, config, OTHER)


def check(case: LayerCase, config: PrefillConfig = CONFIG) -> None:
    """Compare output, base and delta alone with the reference; base rows bit by bit."""
    with_lora, base = run(case, config=config), run(case, base=True, config=config)
    ref_with, ref_base = case.reference(), case.reference(base=True)
    assert_close(base, ref_base, case.x.dtype)
    assert_close(with_lora, ref_with, case.x.dtype)
    assert_delta_close(with_lora, base, ref_with, ref_base)
    rows = torch.tensor([slot < 0 or case.adapters[slot] is None for slot in case.token_slots])
    assert torch.equal(with_lora[rows], base[rows])


@pytest.mark.parametrize("wide", [False, True], ids=["ranks to 16", "a rank above 16"])
@pytest.mark.parametrize("order", ["gate_first", "up_first", "no_gate"])
def test_layouts_and_mixed_adapters_match_the_reference(order: str, wide: bool) -> None:
    layout = WeightLayout(order)  # type: ignore[arg-type]
    check(make(20, layout, adapters=adapters(layout, wide)))


def test_experts_that_share_their_rows_among_blocks_match_the_reference() -> None:
    check(make(30, minus_ones=0.0), replace(CONFIG, row_step=16))


@pytest.mark.parametrize("num_tokens", [1, 25])
def test_few_and_many_tokens_on_a_part_of_the_experts(num_tokens: int) -> None:
    check(make(num_tokens, expert_offset=3))


def test_more_slots_in_a_block_than_the_first_ones() -> None:
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
    held: list[SiteFactors | None] = [
        random_factors(site, 4 + i % 5, "separate", seed=i) for i in range(9)
    ]
    check(make(30, adapters=held, slots=[*range(9), -1], top_k=1))


def test_all_tokens_on_one_expert() -> None:
    case = make(34, minus_ones=0.0)
    ids = torch.full_like(case.routing.topk_ids, -1)
    ids[:, 0] = 2
    check(replace(case, routing=replace(case.routing, topk_ids=ids)))


def test_half_precision_matches_the_reference() -> None:
    check(make(20, dtype=torch.float16))


def test_a_nan_adapter_reaches_no_other_row() -> None:
    case = make(20, adapters=adapters(WeightLayout(), wide=False))
    broken = case.adapters[1]
    assert broken is not None
    factors = {
        name: replace(factor, lora_B=torch.full_like(factor.lora_B, torch.nan))
        for name, factor in broken.projections.items()
    }
    bad = replace(case, adapters=(case.adapters[0], SiteFactors(factors), *case.adapters[2:]))
    mine = torch.tensor(case.token_slots) == 1
    assert torch.equal(run(bad)[~mine], run(case)[~mine])
    local = (case.routing.topk_ids >= 0).any(1)
    assert run(bad)[mine & local].isnan().any(1).all()


def test_a_table_of_empty_slots_adds_nothing() -> None:
    case = make(20, adapters=[None, None], slots=[0, 1, -1])
    assert torch.equal(run(case), run(case, base=True))


def test_no_tokens() -> None:
    assert run(make(1)).shape == (1, HIDDEN)
    case = make(1)
    empty = replace(
        case,
        x=case.x[:0],
        token_slots=(),
        routing=replace(
            case.routing,
            topk_ids=case.routing.topk_ids[:0],
            topk_weights=case.routing.topk_weights[:0],
        ),
    )
    assert run(empty, base=True).shape == (0, HIDDEN)


def test_a_call_in_pieces_equals_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU bit by bit (tests/gpu): there each group is a product of its own, here four are."""
    case = make(20)
    whole, base = run(case), run(case, base=True)
    monkeypatch.setattr(prefill_layer, "max_pairs", lambda *_: 30)
    pieces = run(case)
    assert torch.equal(run(case, base=True), base)
    assert_close(pieces, whole, case.x.dtype)
    assert_delta_close(pieces, base, whole, base)


@pytest.mark.parametrize("layout", [WeightLayout("interleaved"), WeightLayout(out_major=False)])
def test_weights_that_no_tensor_map_reads_take_the_other_kernels(layout: WeightLayout) -> None:
    case = make(12, layout, biases=False)
    assert not has_tensor_map(case.weights)
    check(case)


def routed(
    counts: list[int], top_k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids ``[T, K]`` that give each expert as many pairs, in any order, and an order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = torch.cat([ids, torch.full((-len(ids) % top_k,), -1)])
    ids = ids[torch.randperm(len(ids), generator=generator)].view(-1, top_k)
    return ids, torch.randperm(len(ids), generator=generator)


#: Pairs of experts 0, 1, ...: none, one block or less, just above a block, many blocks.
COUNTS = [70, 0, 1, 16, 17, 191, 192, 193, 385, 577, 700, 0, 2113, 5]


@pytest.mark.parametrize(("block_m", "row_step"), [(32, None), (32, 16), (192, 16)])
def test_route_sorts_by_expert_then_slot_over_several_chunks(
    block_m: int, row_step: int | None
) -> None:
    """Experts 1 to 11 are this rank's; 0 and those behind have pairs that are of other ranks."""
    top_k, experts = 4, 12
    ids, order = routed(COUNTS, top_k, torch.Generator().manual_seed(0))
    with poisoned_empty(integers=True):
        rows = prefill_route.run_route(ids, order, experts, block_m, 1, row_step)
    assert rows.block_m == block_m and ids.numel() > 4 * prefill_route.CHUNK
    assert rows.num_blocks == max_blocks(ids.numel(), experts, block_m)
    local = ids.flatten() - 1
    places = torch.empty(len(ids), dtype=torch.int64)
    places[order] = torch.arange(len(ids))
    wanted = {
        e: sorted(
            (int(places[p // top_k]), p % top_k, int(p)) for p in (local == e).nonzero().flatten()
        )
        for e in range(experts)
    }
    found: dict[int, list[list[int]]] = {e: [] for e in range(experts)}
    assert rows.live_blocks.item() == int((rows.block_info % 256 > 0).sum())
    assert rows.tickets.tolist() == [0, 0], "programs of the GEMMs count what they have taken here"
    for block, info in enumerate(rows.block_info.tolist()):
        expert, count = info // 256, info % 256
        assert (count > 0) == (block < rows.live_blocks.item()), "blocks with rows come first"
        assert count <= block_m
        pairs = rows.row_pair[block * block_m : block * block_m + count].tolist()
        if count:
            found[expert].append(pairs)
        for i, pair in enumerate(pairs):
            assert rows.pair_row[pair] == block * block_m + i
    for expert, blocks in found.items():
        assert [p for pairs in blocks for p in pairs] == [p for *_, p in wanted[expert]]
        assert len(blocks) == -(-len(wanted[expert]) // block_m), "no more blocks than needed"
        share = len(blocks[0]) if len(blocks) > 1 else 0
        assert share % (row_step or block_m) == 0, "whole steps"
        assert {len(pairs) for pairs in blocks[:-1]} <= {share}, "only the last one has fewer"
        if row_step and blocks:
            most = -(-len(wanted[expert]) // len(blocks) // row_step) * row_step
            assert max(map(len, blocks)) <= max(most, row_step), "as equal as steps allow"
    outside = (local < 0) | (local >= experts)
    assert bool((rows.pair_row[outside] == -1).all())


def test_work_buffers_are_bounded() -> None:
    weights = make(1).weights
    row = INTERMEDIATE * 4 + HIDDEN * 4
    assert max_pairs(weights) == MAX_BYTES // row
    assert max_pairs(weights) * row <= MAX_BYTES


def test_factors_beyond_the_range_of_x_reach_no_other_row() -> None:
    case = make(20, adapters=adapters(WeightLayout(), wide=False), dtype=torch.float16)
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
    table = site_table(site, case.adapters, torch.float32)
    good = call_with(case, table)
    factors = table.factors(1)
    assert factors is not None
    for factor in factors.projections.values():
        factor.lora_B.fill_(1e6)
    mine = torch.tensor(case.token_slots) == 1
    assert torch.equal(call_with(case, table)[~mine], good[~mine])


def call_with(case: LayerCase, table: SiteTable) -> torch.Tensor:
    """Run a case on another table."""
    call = LayerCall(
        case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights, table,
        case.slots(), case.expert_offset, case.scale,
    )  # fmt: skip
    return run_prefill(call, CONFIG, OTHER)
