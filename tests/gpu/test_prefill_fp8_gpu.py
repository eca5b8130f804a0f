"""The FP8 kernels for many rows per expert, on a real Hopper with their real tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moegraft.backends.cuda.compiler import has_compiler
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.prefill import hopper_fp8
from moegraft.backends.triton.prefill import layer as prefill_layer
from moegraft.backends.triton.prefill.block_groups import run_block_groups
from moegraft.backends.triton.prefill.config import FP8_BLOCK_M, FP8_STAGES, PrefillConfig
from moegraft.backends.triton.prefill.route import run_route
from moegraft.backends.triton.prefill.token_order import token_order
from moegraft.factor_table import site_table
from moegraft.layer import MoeLoraLayer
from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import quantise_experts
from moegraft.quant.formats import format_of
from moegraft.reference import moe_lora_reference
from moegraft.sites import expert_site
from moegraft.testing import random_factors, random_weights
from moegraft.testing.cases import table_on
from moegraft.testing.compare import assert_bit_equal, assert_close, assert_delta_close
from moegraft.testing.generate import random_activations, random_routing
from moegraft.testing.poison import poisoned_empty
from moegraft.testing.unrounded import unrounded_weights
from moegraft.types import Activation, ExpertWeights, TokenSlots, WeightLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        device_facts().capability != 90 or not has_compiler(),
        reason="needs a Hopper GPU and NVRTC",
    ),
]

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 512, 384, 4
TOKENS, CHECKED = 1501, 64
KINDS = ("separate", "fused", "shared_outer")


def uneven(weights: ExpertWeights) -> ExpertWeights:
    """Return FP8 weights whose blocks differ in size: a scale from another block shows."""
    generator = torch.Generator().manual_seed(5)

    def spread(matrix: torch.Tensor) -> torch.Tensor:
        experts, rows, columns = matrix.shape
        factors = 2.0 ** torch.randint(
            -2, 2, (experts, rows // 128, columns // 128), generator=generator
        )
        wide = factors.repeat_interleave(128, 1).repeat_interleave(128, 2).to(matrix)
        return matrix * wide

    return quantise_experts(
        replace(weights, gate_up=spread(weights.gate_up), down=spread(weights.down)), "fp8-block"
    )


def uneven_rows(tokens: int, hidden: int) -> torch.Tensor:
    """Return activations whose groups of columns differ in size, another way in each token."""
    generator = torch.Generator().manual_seed(6)
    factors = 2.0 ** torch.randint(-2, 2, (tokens, hidden // 128), generator=generator)
    x = random_activations(tokens, hidden, BF16, 102)  # a seed that no adapter has
    return (x * factors.repeat_interleave(128, 1).to(BF16)).cuda()


def make_layer(
    ranks: list[int], hidden: int = HIDDEN, intermediate: int = INTERMEDIATE,
    layout: WeightLayout | None = None, **options: Any,
) -> MoeLoraLayer:  # fmt: skip
    """Return an FP8 layer with one adapter per rank, of kinds in turn."""
    plain = random_weights(
        EXPERTS, hidden, intermediate, dtype=BF16, device="cuda", seed=0, layout=layout, **options
    )
    site = expert_site("experts", EXPERTS, hidden, intermediate, plain.layout)
    adapters = [
        random_factors(site, rank, KINDS[i % 3], seed=i)  # type: ignore[arg-type]
        for i, rank in enumerate(ranks)
    ]
    return MoeLoraLayer(uneven(plain), table_on(site_table(site, adapters, BF16), "cuda"))


def slots_of(order: str, kinds: int, tokens: int = TOKENS) -> TokenSlots:
    """Return the slots of tokens: -1 and all adapters in turn, or in runs."""
    return TokenSlots.of(
        [(t if order == "interleaved" else t * kinds // tokens) % kinds - 1 for t in range(tokens)],
        "cuda",
    )


def check(layer: MoeLoraLayer, num_adapters: int, order: str, tokens: int = TOKENS) -> None:
    """Compare output and delta with the references, base rows and a second run bit by bit."""
    weights, hidden = layer.weights, layer.weights.hidden
    assert f"block_m={FP8_BLOCK_M}" in layer.plan(tokens, TOP_K).explain()
    routing = random_routing(tokens, TOP_K, EXPERTS, 1, device="cuda")
    x = uneven_rows(tokens, hidden)
    slots = slots_of(order, num_adapters + 1, tokens)
    with poisoned_empty():
        ours = layer(x, routing.topk_ids, routing.topk_weights, slots)
        base = layer(x, routing.topk_ids, routing.topk_weights, None)
    plain = slots.slots < 0
    assert_bit_equal(ours[plain], base[plain], "rows without an adapter")
    assert_bit_equal(layer(x, routing.topk_ids, routing.topk_weights, slots), ours, "two runs")
    rows = torch.linspace(0, tokens - 1, CHECKED).long().cuda()
    inputs = (x[rows], routing.topk_ids[rows], routing.topk_weights[rows])
    assert layer.table is not None
    adapters = (
        [layer.table.factors(slot) for slot in range(num_adapters)], slots.slots[rows].tolist()
    )  # fmt: skip
    unrounded = unrounded_weights(weights)
    assert unrounded is not None
    wanted_base = moe_lora_reference(*inputs, weights)
    wanted = moe_lora_reference(*inputs, weights, *adapters)
    assert_close(base[rows], wanted_base, BF16, moe_lora_reference(*inputs, unrounded))
    assert_close(ours[rows], wanted, BF16, moe_lora_reference(*inputs, unrounded, *adapters))
    assert_delta_close(ours[rows], base[rows], wanted, wanted_base, w8a8=True)


@pytest.mark.parametrize("ranks", [[16, 8, 3, 16, 12, 16, 5, 16], [64, 20, 33], [128, 16]])
@pytest.mark.parametrize("order", ["interleaved", "contiguous"])
def test_many_rows_match_the_reference(ranks: list[int], order: str) -> None:
    check(make_layer(ranks), len(ranks), order)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 128, "intermediate": 128},
        {"hidden": 4352, "intermediate": 256},
        {"hidden": 384, "intermediate": 640, "biases": True},
        {"layout": WeightLayout("up_first"), "biases": True},
        {"layout": WeightLayout("no_gate"), "activation": Activation("relu2"), "biases": True},
        {"activation": Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0)},
    ],
    ids=["one step", "34 steps", "half a tile", "up first", "no gate", "clamped"],
)
def test_shapes_and_activations_match_the_reference(options: dict[str, Any]) -> None:
    check(make_layer([16, 5, 40], **options), 3, "interleaved")


@pytest.mark.parametrize("tokens", [97, 128, 333, 2100])
def test_any_number_of_rows_matches_the_reference(tokens: int) -> None:
    check(make_layer([16, 8]), 2, "interleaved", tokens)


@pytest.mark.parametrize("layout", ["gate_first", "no_gate"])
def test_h_is_rounded_to_fp8_with_the_bits_of_the_specification(layout: str) -> None:
    """And with adapters in the launch it has the bits of h without them, where no row has one."""
    kind = WeightLayout(layout)  # type: ignore[arg-type]
    layer = make_layer([16], layout=kind)
    weights, table = layer.weights, layer.table
    assert table is not None
    routing = random_routing(TOKENS, TOP_K, EXPERTS, 1, device="cuda")
    x, slots = uneven_rows(TOKENS, HIDDEN), slots_of("interleaved", 2)
    config = PrefillConfig(FP8_BLOCK_M, 16, stages=FP8_STAGES, hopper=True)
    order = token_order(slots, table.num_slots)
    rows = run_route(routing.topk_ids, order, EXPERTS, FP8_BLOCK_M, 0, 16)
    groups = run_block_groups(table, slots.slots, rows, TOP_K, FP8_BLOCK_M)
    seen_x = hopper_fp8.run_tokens(x, weights)
    s = hopper_fp8.run_shrink(seen_x, groups, False, rows, TOP_K, config)
    h = hopper_fp8.run_gate_up(seen_x, weights, groups, s, rows, TOP_K, config)
    rows.tickets.zero_()
    base = hopper_fp8.run_gate_up(seen_x, weights, None, None, rows, TOP_K, config)
    live = rows.pair_row[rows.pair_row >= 0].long()
    assert h.plain is not None and base.plain is None
    seen = h.values[live].float() * h.scales[:, live].T.repeat_interleave(128, 1)
    wanted = rounded_activations(h.plain[live].float(), format_of("fp8-block"))
    assert_bit_equal(seen, wanted, "h in FP8")
    pairs = torch.arange(TOKENS * TOP_K, device="cuda")
    plain = rows.pair_row[slots.slots[pairs // TOP_K] < 0].long()
    assert_bit_equal(h.values[plain].float(), base.values[plain].float(), "values of base rows")
    assert_bit_equal(h.scales[:, plain], base.scales[:, plain], "scales of base rows")


def test_all_tokens_on_few_experts() -> None:
    """Experts without rows, and one whose last block has a single row."""
    layer = make_layer([16, 8])
    tokens = 641
    x, slots = uneven_rows(tokens, HIDDEN), slots_of("interleaved", 3, tokens)
    ids = torch.tensor([[6, 1, 3, -1]], device="cuda").repeat(tokens, 1)
    ids[1:, 1] = -1
    weights = torch.rand(tokens, TOP_K, device="cuda")
    ours = layer(x, ids, weights, slots)
    assert layer.table is not None and "hopper=True" in layer.plan(tokens, TOP_K).explain()
    factors = [layer.table.factors(slot) for slot in range(2)]
    rows = torch.arange(0, CHECKED).cuda()
    given = (x[rows], ids[rows], weights[rows])
    adapters = (factors, slots.slots[rows].tolist())
    unrounded = unrounded_weights(layer.weights)
    assert unrounded is not None
    wanted = moe_lora_reference(*given, layer.weights, *adapters)
    assert_close(ours[rows], wanted, BF16, moe_lora_reference(*given, unrounded, *adapters))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("order", ["interleaved", "contiguous"])
def test_a_broken_adapter_reaches_no_other_row(value: float, order: str) -> None:
    layer = make_layer([16, 16, 40, 8])
    routing = random_routing(TOKENS, TOP_K, EXPERTS, 1, device="cuda")
    x, slots = uneven_rows(TOKENS, HIDDEN), slots_of(order, 5)
    good = layer(x, routing.topk_ids, routing.topk_weights, slots)
    assert layer.table is not None
    factors = layer.table.factors(2)
    assert factors is not None
    for factor in factors.projections.values():
        factor.lora_B[:, ::7, 1::5] = value  # a view of the arena
    bad = layer(x, routing.topk_ids, routing.topk_weights, slots)
    mine = slots.slots == 2
    assert_bit_equal(bad[~mine], good[~mine], "rows of other adapters and of none")
    assert not bad[mine].isfinite().all(1).any(), "its own rows show it"


def test_pieces_and_strided_rows_equal_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer([16, 40, 3])
    routing = random_routing(TOKENS, TOP_K, EXPERTS, 1, device="cuda")
    wide = random_activations(TOKENS, HIDDEN + 3, BF16, 2, "cuda")
    x, slots = wide[:, 3:], slots_of("interleaved", 4)
    ids = torch.where(torch.rand(TOKENS, TOP_K, device="cuda") < 0.1, -1, routing.topk_ids)
    whole = layer(x.contiguous(), ids, routing.topk_weights, slots)
    assert_bit_equal(layer(x, ids, routing.topk_weights, slots), whole, "rows at odd addresses")
    monkeypatch.setattr(prefill_layer, "max_pairs", lambda *_: 900 * TOP_K)
    assert_bit_equal(layer(x, ids, routing.topk_weights, slots), whole, "pieces and the whole")


def test_a_graph_serves_other_tokens_and_slots() -> None:
    layer = make_layer([16, 16])
    routing = random_routing(TOKENS, TOP_K, EXPERTS, 1, device="cuda")
    x = uneven_rows(TOKENS, HIDDEN)
    slots = torch.zeros(TOKENS, dtype=torch.int32, device="cuda")
    ids, weights = routing.topk_ids.clone(), routing.topk_weights.clone()
    layer(x, ids, weights, TokenSlots.of([0] * TOKENS, "cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, ids, weights, TokenSlots.captured(slots))
    for seed in range(5):
        other = random_routing(TOKENS, TOP_K, EXPERTS, 10 + seed, device="cuda")
        ids.copy_(other.topk_ids)
        weights.copy_(other.topk_weights)
        x.copy_(random_activations(TOKENS, HIDDEN, BF16, 20 + seed, "cuda"))
        each = [(t * (seed + 1)) % 3 - 1 for t in range(TOKENS)] if seed < 4 else [-1] * TOKENS
        slots.copy_(torch.tensor(each, dtype=torch.int32))
        graph.replay()
        wanted = layer(x, ids, weights, TokenSlots.of(each, "cuda"))
        assert_bit_equal(out, wanted, "the graph and the eager call")
