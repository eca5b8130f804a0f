"""The fused decode kernels in Triton's interpreter: the same code as on a GPU, run on the CPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.workspace import make_workspace, max_blocks
from moegraft.call import LayerCall
from moegraft.sites import expert_site
from moegraft.testing import (
    assert_close,
    assert_delta_close,
    layer_case,
    random_factors,
)
from moegraft.testing.cases import LayerCase
from moegraft.types import Activation, SiteFactors, WeightLayout

CONFIG = FusedConfig(
    16, GemmConfig(16, 32, 4, 2), GemmConfig(32, 16, 4, 2), GemmConfig(16, 32, 4, 2)
)
SWAPPED = FusedConfig(
    32, GemmConfig(16, 32, 4, 2, True), GemmConfig(32, 16, 4, 2, True), GemmConfig(32, 16, 4, 2)
)
#: Where the delta's programs run. (The interpreter runs programs in their order.)
CONFIGS = {
    "plain": CONFIG,
    "swapped": SWAPPED,
    "merged": replace(CONFIG, merged=True, gate_up_splits=2, down_splits=3, delta_programs=7),
}
HIDDEN, INTERMEDIATE, EXPERTS = 40, 24, 5
GPT_OSS = Activation("silu", limit=1.0, alpha=1.702, up_shift=1.0)
LAYOUTS = {
    "gate_first": (WeightLayout(), Activation("silu")),
    "interleaved in-major": (WeightLayout("interleaved", False), GPT_OSS),
    "up_first": (WeightLayout("up_first"), Activation("gelu_tanh")),
    "no_gate": (WeightLayout("no_gate"), Activation("relu2")),
}


def adapters(layout: WeightLayout) -> list[SiteFactors | None]:
    """Return slots with factors of every kind and mixed ranks, and an empty one."""
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE, layout)
    return [
        random_factors(site, 3, "fused", seed=1),
        random_factors(site, 20, "separate", seed=2),
        None,
        random_factors(site, 4, "separate", experts=[0, 3], seed=3),
        random_factors(site, 1, "separate", projections=["up"], seed=4),
        random_factors(site, 33, "shared_outer", seed=5),
    ]


def run(case: LayerCase, base: bool = False, config: FusedConfig = CONFIG) -> torch.Tensor:
    """Run a case on the fused kernels, with every buffer poisoned."""
    ws = make_workspace(case.weights, case.routing.topk_ids.numel(), config.block_m, lora=True)
    for buffer in (ws.h, ws.y, ws.delta_gate_up, ws.delta_down):
        assert buffer is not None
        buffer.fill_(torch.nan)
    for buffer in (ws.states, ws.segments, ws.block_info, ws.h_counter, ws.row_pair, ws.pair_row):
        buffer.fill_(1 << 20)
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
    return run_layer(call, config, ws)


def check(case: LayerCase, config: FusedConfig = CONFIG) -> None:
    """Compare output, base and delta alone with the reference."""
    with_lora, base = run(case, config=config), run(case, base=True, config=config)
    ref_with, ref_base = case.reference(), case.reference(base=True)
    assert_close(base, ref_base, case.x.dtype)
    assert_close(with_lora, ref_with, case.x.dtype)
    assert_delta_close(with_lora, base, ref_with, ref_base)
    rows = torch.tensor([slot < 0 or case.adapters[slot] is None for slot in case.token_slots])
    assert torch.equal(with_lora[rows], base[rows])


@pytest.mark.parametrize("name_of_config", CONFIGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_and_activations_with_mixed_adapters_match_the_reference(
    name: str, name_of_config: str
) -> None:
    layout, activation = LAYOUTS[name]
    check(
        layer_case(
            7,
            adapters(layout),
            [0, 1, -1, 3, 4, 5, 2],
            num_experts=EXPERTS,
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            layout=layout,
            activation=activation,
            biases=True,
            minus_ones=0.2,
        ),
        CONFIGS[name_of_config],
    )


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_one_token_and_several_blocks_per_expert_match_the_reference(num_tokens: int) -> None:
    layout = WeightLayout()
    case = layer_case(
        num_tokens,
        adapters(layout),
        [1, 0, 5, -1, 3],
        num_experts=EXPERTS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        expert_offset=3,
        scale=1.5,
    )
    check(case)


def test_an_adapter_with_more_rows_than_one_product_takes() -> None:
    case = layer_case(
        150,
        adapters(WeightLayout()),
        [1] * 40 + [-1, 5] * 5,
        num_experts=EXPERTS,
        top_k=1,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
    )
    check(case, replace(SWAPPED, block_m=64))


def test_half_precision_matches_the_reference() -> None:
    layout = WeightLayout()
    case = layer_case(
        5,
        adapters(layout),
        [0, 1, -1, 5],
        num_experts=EXPERTS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        dtype=torch.float16,
    )
    check(case)


def test_a_nan_adapter_reaches_no_other_row() -> None:
    layout = WeightLayout()
    case = layer_case(
        6,
        adapters(layout),
        [0, 1, -1],
        num_experts=EXPERTS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
    )
    broken = case.adapters[1]
    assert broken is not None
    factors = {
        name: replace(factor, lora_B=torch.full_like(factor.lora_B, torch.nan))
        for name, factor in broken.projections.items()
    }
    bad = replace(case, adapters=(case.adapters[0], SiteFactors(factors)))
    good = replace(case, adapters=case.adapters[:2])
    rows = torch.tensor(case.token_slots) != 1
    assert torch.equal(run(bad)[rows], run(good)[rows])
    assert run(bad)[~rows].isnan().any()


def test_block_numbers_suffice_for_any_routing() -> None:
    assert max_blocks(8, 128, 16) == 8
    for sizes in ([1] * 64, [512], [17, 16, 15], [0, 33, 0, 1]):
        first = needed = 0
        for expert, size in enumerate(sizes):
            block = first // 16 + expert
            needed = max(needed, block + -(-size // 16))
            first += size
        assert needed <= max_blocks(max(first, 33), len(sizes), 16)
