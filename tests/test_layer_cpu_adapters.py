"""The layer on the CPU backend against the reference: ranks, kinds and gaps of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from cpu_layer import DTYPES, check, mixed_adapters
from moegraft.sites import expert_site
from moegraft.testing import (
    FACTOR_KINDS,
    FactorKind,
    assert_close,
    layer_case,
    random_factors,
)
from moegraft.types import LoraFactor, SiteFactors, WeightLayout

RANKS = [1, 3, 8, 12, 16, 20, 64, 128, 256]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FACTOR_KINDS)
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_at_odd_sizes(
    rank: int, kind: FactorKind, dtype: torch.dtype, lora_method: str
) -> None:
    site = expert_site("experts", 7, 37, 29)
    adapter = random_factors(site, rank, kind, dtype=dtype)
    case = layer_case(
        9,
        [None, adapter],
        [1, -1, 1],
        num_experts=7,
        hidden=37,
        intermediate=29,
        top_k=3,
        minus_ones=0.05,
        dtype=dtype,
    )
    check(case, lora_method)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_ranks_and_kinds_in_one_batch(dtype: torch.dtype, lora_method: str) -> None:
    site = expert_site("experts", 5, 37, 29)
    adapters = [
        random_factors(site, rank, FACTOR_KINDS[i % 3], seed=i, dtype=dtype)
        for i, rank in enumerate([*RANKS, *RANKS[1:]])
    ]
    slots = [-1, *range(len(adapters))]
    case = layer_case(40, adapters, slots, hidden=37, intermediate=29, dtype=dtype)
    check(case, lora_method)


def test_ranks_that_differ_by_projection(lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    ranks = [{"gate": 1, "up": 20, "down": 6}, {"gate": 5, "up": 2, "down": 1}]
    adapters = [random_factors(site, r, seed=i) for i, r in enumerate(ranks)]
    check(layer_case(9, adapters, [0, 1, -1]), lora_method)


@pytest.mark.parametrize("kind", FACTOR_KINDS)
@pytest.mark.parametrize(
    "present",
    [["gate"], ["up"], ["down"], ["gate", "up"], ["gate", "down"], ["up", "down"]],
    ids="+".join,
)
def test_absent_projections_beside_a_complete_adapter_of_the_same_rank(
    present: Sequence[str], kind: FactorKind, lora_method: str
) -> None:
    site = expert_site("experts", 5, 24, 20)
    partial = random_factors(site, 4, kind, projections=present, seed=1)
    complete = random_factors(site, 4, "fused", seed=2)
    check(layer_case(10, [partial, complete], [0, 1]), lora_method)
    check(layer_case(10, [complete, partial], [-1, 1, 0, 0]), lora_method)
    check(layer_case(1, [partial], [0]), lora_method)


@pytest.mark.parametrize("kind", FACTOR_KINDS)
@pytest.mark.parametrize("experts", [[2], [3, 0], [4, 3, 2, 1, 0]], ids=str)
def test_adapters_on_some_experts_only_in_any_order(
    experts: Sequence[int], kind: FactorKind, lora_method: str
) -> None:
    site = expert_site("experts", 5, 24, 20)
    some = random_factors(site, 4, kind, experts=experts, seed=1)
    every = random_factors(site, 4, kind, seed=2)
    check(layer_case(12, [some, every], [0, 1, -1]), lora_method)
    check(layer_case(12, [some], [0]), lora_method)


@pytest.mark.parametrize(("hidden", "intermediate"), [(48, 8), (8, 48), (16, 16), (1, 1)])
def test_narrow_and_wide_experts(hidden: int, intermediate: int, lora_method: str) -> None:
    site = expert_site("experts", 5, hidden, intermediate)
    adapters = [random_factors(site, 3, kind, seed=i) for i, kind in enumerate(FACTOR_KINDS)]
    case = layer_case(8, adapters, [0, 1, 2, -1], hidden=hidden, intermediate=intermediate)
    check(case, lora_method)


def test_a_shared_outer_adapter_equals_its_expanded_copy(lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    outer = random_factors(site, 6, "shared_outer")
    expanded = SiteFactors(
        {
            name: LoraFactor(
                f.lora_A.expand(5, -1, -1).contiguous(),
                f.lora_B.expand(5, -1, -1).contiguous(),
                f.scale,
            )
            for name, f in outer.projections.items()
        }
    )
    one, two = (layer_case(9, [adapter], [0, 0, -1]) for adapter in (outer, expanded))
    assert one.table().arena.data.numel() < two.table().arena.data.numel()
    assert_close(one.run(), two.run(), torch.float32)


@pytest.mark.parametrize("experts", [None, [2], [3, 0]], ids=str)
@pytest.mark.parametrize("leaf", ["A", "B", "both"])
def test_one_factor_serves_all_of_the_experts_that_the_adapter_has(
    leaf: str, experts: Sequence[int] | None, lora_method: str
) -> None:
    site = expert_site("experts", 5, 24, 20)
    plain = random_factors(site, 6, experts=experts)
    once = SiteFactors(
        {
            name: LoraFactor(
                f.lora_A if leaf == "B" else f.lora_A[:1],
                f.lora_B if leaf == "A" else f.lora_B[:1],
                f.scale,
            )
            for name, f in plain.projections.items()
        },
        plain.expert_map,
    )
    check(layer_case(12, [once, plain], [0, 1, -1]), lora_method)
    check(layer_case(12, [once], [0]), lora_method)


def test_the_up_delta_lands_in_the_up_half_in_every_order(lora_method: str) -> None:
    for order in ("gate_first", "up_first", "interleaved"):
        layout = WeightLayout(order)
        site = expert_site("experts", 2, 8, 3, layout)
        adapter = random_factors(site, 2, projections=["up"])
        case = layer_case(
            6, [adapter], [0], num_experts=2, hidden=8, intermediate=3, layout=layout, top_k=1
        )
        check(case, lora_method)


def test_the_scale_of_each_adapter_counts_once(lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    one = random_factors(site, 4, projections=["down"], scale=1.0)
    f = one.projections["down"]
    triple = SiteFactors({"down": LoraFactor(f.lora_A, f.lora_B, 3.0)})
    case = layer_case(10, [one, triple], [0])
    base = case.run(base=True)
    delta = case.run() - base
    tripled = replace(case, token_slots=(1,) * 10).run() - base
    assert_close(tripled, 3 * delta, torch.float32)
    check(replace(case, token_slots=(0, 1) * 5), lora_method)


def test_many_more_slots_than_live_adapters(lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    adapters: list[SiteFactors | None] = [None] * 300
    adapters[3], adapters[299] = mixed_adapters(site, torch.float32)[1:3]
    check(layer_case(9, adapters, [299, -1, 3]), lora_method)
    check(layer_case(9, adapters, [299]), lora_method)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rank_values_that_nearly_cancel_keep_their_difference(
    dtype: torch.dtype, lora_method: str
) -> None:
    """Fails when ``A x`` is rounded to 16 bits between shrink and expand."""
    torch.manual_seed(0)
    site = expert_site("experts", 5, 24, 20)
    plain = random_factors(site, 1, projections=["down"], seed=3, dtype=dtype)
    f = plain.projections["down"]
    ulp = torch.finfo(dtype).eps
    nearly = (f.lora_A.float() * (1 + 2 * ulp * torch.sign(torch.randn(f.lora_A.shape)))).to(dtype)
    pair = LoraFactor(
        torch.cat([f.lora_A, nearly], 1), torch.cat([f.lora_B, -f.lora_B], 2), 2.0 / ulp
    )
    check(layer_case(8, [SiteFactors({"down": pair})], [0], dtype=dtype), lora_method)


def test_rank_values_beyond_the_range_of_fp16_stay_finite(lora_method: str) -> None:
    torch.manual_seed(0)
    a = (torch.randn(5, 4, 24).sign() * 6e4).half()
    adapter = SiteFactors({"up": LoraFactor(a, torch.randn(5, 20, 4).half(), 1e-6)})
    case = layer_case(8, [adapter], [0], dtype=torch.float16)
    assert float((a[0].float() @ case.x.float().T).abs().max()) > torch.finfo(torch.float16).max
    check(case, lora_method)
