"""The layer on the CPU backend against the reference: layouts, sizes, routing, local ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cpu_layer import DTYPES, check, mixed_adapters
from moegraft.sites import expert_site
from moegraft.testing import (
    ACTIVATIONS,
    FACTOR_KINDS,
    LAYOUTS,
    Routing,
    assert_case,
    assert_close,
    assert_delta_close,
    layer_case,
    random_factors,
    random_routing,
)
from moegraft.types import LoraFactor, SiteFactors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_mixed_adapters(
    layout: str, biases: bool, dtype: torch.dtype, lora_method: str
) -> None:
    site = expert_site("experts", 5, 24, 20, LAYOUTS[layout])
    activation = ACTIVATIONS["relu2" if layout.startswith("no_gate") else "silu"]
    case = layer_case(
        18,
        mixed_adapters(site, dtype),
        [-1, 0, 1, 2, 3, 4],
        layout=LAYOUTS[layout],
        activation=activation,
        biases=biases,
        minus_ones=0.1,
        scale=2.5,
        dtype=dtype,
    )
    check(case, lora_method)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, dtype: torch.dtype) -> None:
    site = expert_site("experts", 5, 24, 20)
    adapters = mixed_adapters(site, dtype)
    case = layer_case(
        12, adapters, [1, -1, 2], activation=ACTIVATIONS[activation], biases=True, dtype=dtype
    )
    assert_case(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_h_is_rounded_to_the_dtype_of_x_not_of_the_weights(dtype: torch.dtype) -> None:
    site = expert_site("experts", 5, 24, 20)
    case = layer_case(12, mixed_adapters(site, dtype), [1, -1, 2], dtype=dtype)
    case = replace(case, x=case.x.float())  # the tolerances are those of x's dtype
    assert case.run().dtype == torch.float32
    assert_case(case)


def test_gpt_oss_layer(lora_method: str) -> None:
    layout = LAYOUTS["interleaved_in_major"]
    site = expert_site("experts", 5, 24, 20, layout)
    adapters = mixed_adapters(site, torch.bfloat16)
    case = layer_case(
        12,
        adapters,
        [1, -1, 2, 4],
        layout=layout,
        activation=ACTIVATIONS["clamped"],
        biases=True,
        dtype=torch.bfloat16,
    )
    check(case, lora_method)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64, 200])
def test_every_number_of_tokens(num_tokens: int, dtype: torch.dtype, lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    case = layer_case(num_tokens, mixed_adapters(site, dtype), [1, 2, -1, 3, 0, 4], dtype=dtype)
    check(case, lora_method)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 65])
def test_the_plan_may_change_method_between_batch_sizes_of_one_layer(num_tokens: int) -> None:
    site = expert_site("experts", 5, 24, 20)
    small = layer_case(4, mixed_adapters(site, torch.float32), [1, 2, -1, 3])
    layer = small.layer()
    assert_case(small, layer)
    case = layer_case(num_tokens, mixed_adapters(site, torch.float32), [1, 2, -1, 3, 0, 4])
    assert_case(case, layer)
    assert_case(small, layer)


@pytest.mark.parametrize("top_k", [1, 2])
def test_all_tokens_on_one_expert(top_k: int, lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    case = layer_case(20, mixed_adapters(site, torch.float32), [-1, 0, 1, 2, 3, 4], top_k=top_k)
    ids = torch.full_like(case.routing.topk_ids, 2)
    check(replace(case, routing=replace(case.routing, topk_ids=ids)), lora_method)


@pytest.mark.parametrize("num_experts", [1, 60, 65, 128, 384])
def test_any_number_of_experts(num_experts: int, lora_method: str) -> None:
    site = expert_site("experts", num_experts, 8, 12)
    adapters = [random_factors(site, 3, kind, seed=i) for i, kind in enumerate(FACTOR_KINDS)]
    case = layer_case(
        16, adapters, [0, 1, 2, -1], num_experts=num_experts, hidden=8, intermediate=12, top_k=4
    )
    check(case, lora_method)


def test_dropped_pairs_add_nothing_and_their_weights_are_never_read(lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    case = layer_case(30, mixed_adapters(site, torch.float32), [1, 2, -1, 4], minus_ones=0.4)
    ids = case.routing.topk_ids
    ids[3:5] = -1
    case.routing.topk_weights[3:5] = float("nan")
    check(case, lora_method)
    assert not bool(case.run()[3:5].any())


def test_a_batch_without_any_local_pair_is_all_zeros(lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    case = layer_case(6, mixed_adapters(site, torch.float32), [1, 2, -1, 4])
    none = torch.full_like(case.routing.topk_ids, -1)
    case = replace(case, routing=Routing(none, case.routing.topk_weights, -1))
    assert not bool(case.run().any())
    other_rank = replace(case, routing=Routing(none + 6, case.routing.topk_weights, -1))
    assert not bool(other_rank.run().any())


def _part(adapter: SiteFactors, start: int, stop: int) -> SiteFactors:
    """The factors of experts [start, stop); a shared factor stays shared, A stays one tensor."""
    cut: dict[int, torch.Tensor] = {}

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in cut:
            cut[id(tensor)] = tensor if tensor.shape[0] == 1 else tensor[start:stop]
        return cut[id(tensor)]

    return SiteFactors(
        {
            name: LoraFactor(part(f.lora_A), part(f.lora_B), f.scale)
            for name, f in adapter.projections.items()
        }
    )


@pytest.mark.parametrize("split", [1, 3, 5])
def test_the_sum_over_two_ranks_is_the_whole(split: int, lora_method: str) -> None:
    site = expert_site("experts", 6, 24, 20)
    adapters = [random_factors(site, 3, kind, seed=i) for i, kind in enumerate(FACTOR_KINDS)]
    whole = layer_case(16, adapters, [0, 1, 2, -1], num_experts=6, biases=True, minus_ones=0.1)
    w = whole.weights
    assert w.gate_up_bias is not None and w.down_bias is not None
    with_lora, base = torch.zeros(16, 24), torch.zeros(16, 24)
    for start, stop in ((0, split), (split, 6)):
        weights = replace(
            w,
            gate_up=w.gate_up[start:stop],
            down=w.down[start:stop],
            gate_up_bias=w.gate_up_bias[start:stop],
            down_bias=w.down_bias[start:stop],
        )
        parts = tuple(_part(a, start, stop) for a in adapters)
        rank = replace(whole, weights=weights, adapters=parts, expert_offset=start)
        check(rank, lora_method)
        with_lora += rank.run()
        base += rank.run(base=True)
    assert_close(with_lora, whole.reference(), torch.float32)
    assert_delta_close(with_lora, base, whole.reference(), whole.reference(base=True))


def test_routing_ids_may_be_int64(lora_method: str) -> None:
    site = expert_site("experts", 5, 24, 20)
    case = layer_case(9, mixed_adapters(site, torch.float32), [1, 2, -1], minus_ones=0.1)
    ids = random_routing(9, 2, 5, seed=1, minus_ones=0.1).topk_ids.long()
    check(replace(case, routing=replace(case.routing, topk_ids=ids)), lora_method)
