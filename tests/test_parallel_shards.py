"""Slices of experts, linears and adapters, in one process: their partial sums make up the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import parallel_cases as cases
import tiny
from moegraft.adapters import AdapterBank, AdapterStore, bind, check_bound, make_source
from moegraft.errors import AdapterError, MoegraftError, UnsupportedError
from moegraft.factor_table import site_table
from moegraft.linear import LinearLora
from moegraft.parallel import (
    ExpertPlacement,
    ExpertShard,
    LinearShard,
    Part,
    PartialMoe,
    RankShards,
    shard_experts,
)
from moegraft.parallel.placement import to_local
from moegraft.quant import FORMATS
from moegraft.quant.experts import expert_matrix, quantise_experts
from moegraft.reference import linear_lora_reference
from moegraft.sites import expert_site, linear_site
from moegraft.testing import (
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    assert_same_factors,
    bound_adapter,
    random_activations,
    random_factors,
    random_weights,
)
from moegraft.types import TokenSlots
from parallel_cases import Spec
from stacked import experts_of, per_expert_form, random_pairs, stacked_form

SITE = expert_site("layers.0.experts", 8, 24, 20)


def test_contiguous_counts_differ_by_one_at_most() -> None:
    held = [ExpertPlacement.contiguous(10, r, 4).local_to_global for r in range(4)]
    assert held == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]
    assert [ExpertPlacement.contiguous(10, r, 4).offset for r in range(4)] == [0, 3, 6, 8]


def test_round_robin_deals_out_in_turn() -> None:
    held = [ExpertPlacement.round_robin(10, r, 4).local_to_global for r in range(4)]
    assert held == [(0, 4, 8), (1, 5, 9), (2, 6), (3, 7)]
    assert ExpertPlacement.round_robin(10, 1, 4).offset is None


def test_a_map_in_another_order_is_no_range() -> None:
    placement = ExpertPlacement.of(torch.tensor([-1, -7, 1, 0]))
    assert placement.local_to_global == (3, 2) and placement.offset is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_size_become_local_numbers_or_minus_one(dtype: torch.dtype) -> None:
    placement = ExpertPlacement.round_robin(5, 1, 2)
    ids = torch.tensor([[0, 1, 2, 3, 4], [-1, 5, 6, -2, 2**31 - 1]], dtype=dtype)
    local = to_local(ids, placement.lookup(torch.device("cpu")))
    assert local.dtype == torch.int32
    assert local.tolist() == [[-1, 0, -1, 1, -1], [-1] * 5]


@pytest.mark.parametrize("bad", [(), (-1, -1), (0, 0), (1, -1), (0, 2)])
def test_a_map_that_numbers_no_experts_is_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(MoegraftError, match=r"must be 0, 1, \.\. each once"):
        ExpertPlacement(bad)


def test_ranks_and_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(MoegraftError, match="rank=4 is not among size=4"):
        ExpertPlacement.contiguous(8, 4, 4)
    with pytest.raises(MoegraftError, match="3 experts on 4 ranks leave ranks without any"):
        ExpertPlacement.round_robin(3, 0, 4)
    with pytest.raises(MoegraftError, match=r"counts=\[4, 5\] do not spread 8 experts"):
        ExpertPlacement.contiguous(8, 0, 2, [4, 5])
    with pytest.raises(MoegraftError, match="Columns 6 to 6 of 6 are no part"):
        Part.of(6, 3, 4)  # as torch.chunk: 2, 2, 2 and nothing
    with pytest.raises(MoegraftError, match="rank=2 is not among 2 ranks"):
        Part.of(6, 2, 2)


@pytest.mark.parametrize("size", [1, 7, 8, 20, 31])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_cut_as_torch_does(size: int, ranks: int) -> None:
    columns = torch.arange(size)
    for rank, chunk in enumerate(columns.chunk(ranks)):
        part = Part.of(size, rank, ranks)
        assert torch.equal(columns[part.start : part.end], chunk)


def test_weights_that_are_not_sliced_are_not_copied() -> None:
    weights = random_weights(8, 24, 20)
    whole = ExpertShard(ExpertPlacement.contiguous(8, 0, 1), Part.of(20, 0, 1))
    assert shard_experts(weights, whole) is weights


def test_sliced_weights_own_their_memory() -> None:
    weights = random_weights(8, 24, 20, biases=True)
    shard = ExpertShard(ExpertPlacement.contiguous(8, 1, 2), Part.of(20, 1, 2))
    local = shard_experts(weights, shard)
    for name in ("gate_up", "down", "gate_up_bias"):
        tensor = getattr(local, name)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4, name
        assert tensor.is_contiguous(), name
    assert local.down_bias is None, "down's bias would count once per slice of I"


def test_a_shard_of_other_sizes_is_refused() -> None:
    weights = random_weights(8, 24, 20)
    shard = ExpertShard(ExpertPlacement.contiguous(6, 0, 2), Part.of(20, 0, 1))
    with pytest.raises(MoegraftError, match="maps 6 experts, the layer has 8"):
        shard_experts(weights, shard)
    shard = ExpertShard(ExpertPlacement.contiguous(8, 0, 2), Part.of(16, 0, 1))
    with pytest.raises(MoegraftError, match="the part is of 16 columns, the weights have 20"):
        shard_experts(weights, shard)
    with pytest.raises(MoegraftError, match="the part is of 16 columns, the weights have 20"):
        shard.site(SITE)


def test_slices_of_quantised_weights_are_refused_by_their_format() -> None:
    weights = quantise_experts(random_weights(8, 24, 20), "fp8-block")
    shard = ExpertShard(ExpertPlacement.contiguous(8, 0, 2), Part.of(20, 0, 2))
    with pytest.raises(UnsupportedError, match=r"fp8-block.*whole experts"):
        shard_experts(weights, shard)


@pytest.mark.parametrize("name", FORMATS)
def test_whole_quantised_experts_go_to_the_ranks_of_any_placement(name: str) -> None:
    weights = quantise_experts(random_weights(8, 160, 144, biases=True), name)
    for rank in range(2):
        placement = ExpertPlacement.round_robin(8, rank, 2)
        here = shard_experts(weights, ExpertShard(placement, Part.of(144, 0, 1)))
        assert (here.num_experts, here.weight_format, here.intermediate) == (4, name, 144)
        for local, expert in enumerate(placement.local_to_global):
            for side in ("gate_up", "down"):
                found = expert_matrix(here, side, local)  # type: ignore[arg-type]
                assert torch.equal(found, expert_matrix(weights, side, expert))  # type: ignore[arg-type]
            assert here.down_bias is not None and weights.down_bias is not None
            assert torch.equal(here.down_bias[local], weights.down_bias[expert])


@pytest.mark.parametrize("kind", ["separate", "fused", "shared_outer"])
@pytest.mark.parametrize("experts", [None, [5, 0, 3]])
def test_local_factors_are_the_global_ones_of_each_local_expert(
    kind: cases.Any, experts: list[int] | None
) -> None:
    factors = random_factors(SITE, 3, kind, experts=experts)
    shard = ExpertShard(ExpertPlacement.round_robin(8, 1, 2), Part.of(20, 1, 3))
    local = shard.factors(factors)
    assert local is not None
    for number, expert in enumerate(shard.placement.local_to_global):
        there, here = factors.entry(expert), local.entry(number)
        assert (there < 0) == (here < 0)
        if there < 0:
            continue
        for name, factor in factors.projections.items():
            found = local.projections[name]
            a = factor.lora_A[there if factor.lora_A.shape[0] > 1 else 0]
            b = factor.lora_B[there if factor.lora_B.shape[0] > 1 else 0]
            a, b = (a[:, 7:14], b) if name == "down" else (a, b[7:14])
            assert_bit_equal(found.lora_A[here if found.lora_A.shape[0] > 1 else 0], a, name)
            assert_bit_equal(found.lora_B[here if found.lora_B.shape[0] > 1 else 0], b, name)
            assert found.scale == factor.scale
    shared = {name: f.projections["gate"].lora_A is f.projections["up"].lora_A
              for name, f in (("global", factors), ("local", local))}  # fmt: skip
    assert shared["local"] == shared["global"]
    outer = kind == "shared_outer"
    assert (local.projections["down"].lora_B.shape[0] == 1) == outer, "one shared entry stays one"


def test_a_rank_without_any_of_an_adapters_experts_has_no_factors() -> None:
    factors = random_factors(SITE, 3, experts=[5, 0])
    shard = ExpertShard(ExpertPlacement.contiguous(8, 1, 4), Part.of(20, 0, 1))
    assert shard.factors(factors) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_of_a_row_sliced_linear_make_up_base_and_delta(dtype: torch.dtype) -> None:
    site = linear_site("o_proj", 30, 12)
    adapters = [random_factors(site, r, seed=r, dtype=dtype) for r in (4, 3)]
    slots = [0, -1, 1, 0, -1]
    x = random_activations(5, 30, dtype)
    weight = random_activations(12, 30, dtype, seed=9) / 6
    total, base = torch.zeros(5, 12), torch.zeros(5, 12)
    for rank in range(2):
        shard = LinearShard("row", Part.of(30, rank, 2))
        here = slice(15 * rank, 15 * rank + 15)
        table = site_table(shard.site(site), [shard.factors(a) for a in adapters], dtype)
        out = x[:, here].float() @ weight[:, here].float().T
        base += out
        local = x[:, here].contiguous()
        LinearLora(table, dtype, x.device).add_to(out, local, TokenSlots.of(slots))
        total += out
    exact = x.double() @ weight.double().T
    expected = linear_lora_reference(x, adapters, slots, 12, torch.float64)
    assert_delta_close(total.to(dtype), base.to(dtype), exact + expected, exact)
    assert_bit_equal(total[[1, 4]], base[[1, 4]])


def test_column_slices_of_a_linear_hold_their_own_outputs() -> None:
    site = linear_site("q_proj", 16, 10)
    adapters = [random_factors(site, 4, seed=1)]
    x, slots = random_activations(3, 16), TokenSlots.of([0, -1, 0])
    outs = []
    for rank in range(3):
        shard = LinearShard("column", Part.of(10, rank, 3))
        local = shard.site(site)
        assert local.projections[0].out_features == (4, 4, 2)[rank]
        table = site_table(local, [shard.factors(a) for a in adapters])
        outs.append(torch.zeros(3, local.projections[0].out_features))
        LinearLora(table, torch.float32, x.device).add_to(outs[-1], x, slots)
    expected = linear_lora_reference(x, adapters, [0, -1, 0], 10, torch.float64)
    assert_close(torch.cat(outs, 1), expected, torch.float32)


def test_a_whole_linear_is_left_as_it_is() -> None:
    site = linear_site("gate", 16, 8, "router")
    factors = random_factors(site, 4)
    assert LinearShard().site(site) is site and LinearShard().factors(factors) is factors
    with pytest.raises(MoegraftError, match="contradict"):
        LinearShard("row")
    with pytest.raises(MoegraftError, match="contradict"):
        LinearShard("whole", Part.of(4, 0, 2))


def test_a_bank_of_local_sites_takes_sliced_adapters() -> None:
    sites = (SITE, linear_site("layers.0.o_proj", 32, 24), linear_site("layers.0.mlp.up", 24, 40))
    shards = RankShards(
        sites,
        {
            SITE.name: ExpertShard(ExpertPlacement.contiguous(8, 1, 2), Part.of(20, 0, 2)),
            "layers.0.o_proj": LinearShard("row", Part.of(32, 0, 4)),
            "layers.0.mlp.up": LinearShard(),
        },
    )
    bank = AdapterBank(shards.local_sites, num_slots=2, max_rank=4, dtype=torch.float32)
    store = AdapterStore(bank)
    factors = {s.name: random_factors(s, 3, seed=i) for i, s in enumerate(sites)}
    bound = bound_adapter(factors)
    local = shards.slice(bound.factors)
    assert local.elsewhere == ()
    store.add("a", replace(bound, factors=local.factors))
    with store.use(["a"]) as slots:
        for site in shards.local_sites:
            found = bank.site_table(site.name).factors(slots["a"])
            assert_same_factors(found, local.factors[site.name], site)
    whole = AdapterBank(sites, num_slots=2, max_rank=4, dtype=torch.float32)
    AdapterStore(whole).add("a", bound)
    assert store.info("a").num_bytes < 3 * 4 * (8 * 100 + 100 + 70), "a rank keeps its part alone"


def test_shards_of_what_is_no_site_or_of_another_kind_are_refused() -> None:
    with pytest.raises(MoegraftError, match="no site of the model"):
        RankShards((SITE,), {"layers.9.experts": LinearShard()})
    with pytest.raises(MoegraftError, match="is of kind 'experts', its shard is LinearShard"):
        RankShards((SITE,), {SITE.name: LinearShard()})


def test_a_partial_layer_writes_where_it_is_told_and_only_what_fits() -> None:
    case = cases.case_of(Spec(((0,),), 1))
    shard = ExpertShard(ExpertPlacement.contiguous(8, 0, 2), Part.of(20, 0, 2))
    layer = PartialMoe(shard, shard_experts(case.weights, shard), cases.local_table(case, shard))
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights, case.slots())
    out = torch.full_like(case.x, float("nan"))
    assert layer(*args, out=out) is out
    assert_bit_equal(out, layer(*args))
    with pytest.raises(MoegraftError, match=r"out is torch\.bfloat16"):
        layer(*args, out=out.bfloat16())


def test_an_adapter_of_one_ranks_experts_counts_as_zero_elsewhere_and_says_so() -> None:
    spec, site = tiny.spec_of("qwen3_moe"), experts_of("qwen3_moe")
    pairs = random_pairs(site)
    half = {
        key: value
        for key, value in per_expert_form(site, pairs).items()
        if ".experts.0." in key or ".experts.1." in key
    }
    bound = bind(make_source(half, {"r": 3, "lora_alpha": 6}), spec)
    check_bound(bound.report, spec)
    assert bound.factors[site.name].entry(1) >= 0 and bound.factors[site.name].entry(2) == -1
    (report,) = bound.report.sites
    assert {p.experts for p in report.projections.values()} == {2}
    # Stacked, nothing says which experts they are: refused with both numbers.
    stacked = {key: value[:2] for key, value in stacked_form(site, pairs).items()}
    with pytest.raises(AdapterError, match=r"2.*4|4.*2"):
        check_bound(bind(make_source(stacked, {"r": 3, "lora_alpha": 6}), spec).report, spec)
