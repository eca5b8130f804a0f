"""The kernels for many rows per expert, on a real GPU with their real tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moegraft.backends.cuda.compiler import has_compiler
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.prefill import config as prefill
from moegraft.backends.triton.prefill import layer as prefill_layer
from moegraft.backends.triton.prefill.config import (
    SHARED_MEMORY,
    PrefillConfig,
    prefill_config,
)
from moegraft.factor_table import site_table
from moegraft.layer import MoeLoraLayer
from moegraft.reference import moe_lora_reference
from moegraft.sites import expert_site
from moegraft.testing import random_factors, random_weights
from moegraft.testing.cases import table_on
from moegraft.testing.compare import assert_bit_equal, assert_close, assert_delta_close
from moegraft.testing.generate import random_activations, random_routing
from moegraft.testing.poison import poisoned_empty
from moegraft.types import Activation, SiteFactors, TokenSlots, WeightLayout

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 512, 384, 4
CHECKED = 24
KINDS = ("separate", "fused", "shared_outer")


@pytest.fixture(params=["hopper", "portable"])
def gemms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the Hopper GEMMs, or the portable ones that other GPUs have."""
    facts = device_facts()
    if facts.capability < 90 or facts.shared_memory < SHARED_MEMORY:
        pytest.skip("this GPU has no tensor maps, or too little shared memory")
    if request.param == "hopper" and not (facts.capability == 90 and has_compiler()):
        pytest.skip("this GPU is not a Hopper, or there is no NVRTC")
    if request.param == "portable":

        def portable(*given: Any) -> PrefillConfig | None:
            found = prefill_config(*given)
            return None if found is None else PrefillConfig()

        monkeypatch.setattr(prefill, "prefill_config", portable)
    return request.param


def make_layer(
    ranks: list[int],
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    gated: bool = True,
    **options: Any,
) -> tuple[MoeLoraLayer, list[SiteFactors]]:
    """Return a bf16 layer with one adapter per rank, of kinds in turn."""
    layout = WeightLayout() if gated else WeightLayout("no_gate")
    weights = random_weights(
        EXPERTS, hidden, intermediate, dtype=torch.bfloat16, device="cuda", seed=0, layout=layout,
        **options,
    )  # fmt: skip
    site = expert_site("experts", EXPERTS, hidden, intermediate, layout)
    adapters = [
        random_factors(site, rank, KINDS[i % 3], seed=i)  # type: ignore[arg-type]
        for i, rank in enumerate(ranks)
    ]
    table = table_on(site_table(site, adapters, torch.bfloat16), "cuda")
    return MoeLoraLayer(weights, table), adapters


@pytest.mark.parametrize("ranks", [[16, 8, 3, 16, 12], [64, 20, 33], [128, 16]])
@pytest.mark.parametrize("order", ["interleaved", "contiguous"])
def test_many_rows_match_the_reference(ranks: list[int], order: str, gemms: str) -> None:
    check(make_layer(ranks)[0], len(ranks), order, gemms)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 200, "intermediate": 136},
        {"hidden": 264, "intermediate": 1000, "biases": True},
        {"gated": False, "activation": Activation("relu2"), "biases": True},
        {"activation": Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0)},
    ],
    ids=["odd sizes", "odd sizes and biases", "no gate", "clamped"],
)
def test_shapes_and_activations_match_the_reference(options: dict[str, Any], gemms: str) -> None:
    check(make_layer([16, 5, 40], **options)[0], 3, "interleaved", gemms)


def check(layer: MoeLoraLayer, num_adapters: int, order: str, gemms: str) -> None:
    """Compare output and delta with the reference, base rows and a second run bit by bit."""
    tokens, hidden = 1500, layer.weights.hidden
    plan = layer.plan(tokens, TOP_K).explain()
    whole_tiles = hidden % 128 == 0 and layer.weights.intermediate % 128 == 0
    assert f"hopper={gemms == 'hopper' and whole_tiles}" in plan, plan
    routing = random_routing(tokens, TOP_K, EXPERTS, 1, device="cuda")
    x = random_activations(tokens, hidden, torch.bfloat16, 2, "cuda")
    kinds = num_adapters + 1
    each = [
        (t if order == "interleaved" else t * kinds // tokens) % kinds - 1 for t in range(tokens)
    ]
    slots = TokenSlots.of(each, "cuda")
    with poisoned_empty():
        ours = layer(x, routing.topk_ids, routing.topk_weights, slots)
        base = layer(x, routing.topk_ids, routing.topk_weights, None)
    plain = slots.slots < 0
    assert_bit_equal(ours[plain], base[plain], "rows without an adapter")
    assert_bit_equal(layer(x, routing.topk_ids, routing.topk_weights, slots), ours, "two runs")
    rows = torch.linspace(0, tokens - 1, CHECKED).long().cuda()
    inputs = (x[rows], routing.topk_ids[rows], routing.topk_weights[rows], layer.weights)
    wanted_base = moe_lora_reference(*inputs)
    assert layer.table is not None
    factors = [layer.table.factors(slot) for slot in range(num_adapters)]
    wanted = moe_lora_reference(*inputs, factors, slots.slots[rows].tolist())
    assert_close(base[rows], wanted_base, torch.bfloat16)
    assert_close(ours[rows], wanted, torch.bfloat16)
    assert_delta_close(ours[rows], base[rows], wanted, wanted_base)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("order", ["interleaved", "contiguous"])
def test_a_broken_adapter_reaches_no_other_row(value: float, order: str, gemms: str) -> None:
    layer, _ = make_layer([16, 16, 40, 8])
    tokens = 1500
    routing = random_routing(tokens, TOP_K, EXPERTS, 1, device="cuda")
    x = random_activations(tokens, HIDDEN, torch.bfloat16, 2, "cuda")
    each = [(t if order == "interleaved" else t * 5 // tokens) % 5 - 1 for t in range(tokens)]
    slots = TokenSlots.of(each, "cuda")
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


def test_pieces_and_strided_rows_equal_the_whole_call(
    monkeypatch: pytest.MonkeyPatch, gemms: str
) -> None:
    layer, _ = make_layer([16, 40, 3])
    tokens = 1500
    routing = random_routing(tokens, TOP_K, EXPERTS, 1, device="cuda")
    wide = random_activations(tokens, HIDDEN + 3, torch.bfloat16, 2, "cuda")
    x = wide[:, 3:]
    slots = TokenSlots.of([t % 4 - 1 for t in range(tokens)], "cuda")
    ids = torch.where(torch.rand(tokens, TOP_K, device="cuda") < 0.1, -1, routing.topk_ids)
    whole = layer(x.contiguous(), ids, routing.topk_weights, slots)
    assert_bit_equal(layer(x, ids, routing.topk_weights, slots), whole, "rows at odd addresses")
    wider = torch.zeros(tokens, HIDDEN + 8, dtype=torch.bfloat16, device="cuda")
    wider[:, :HIDDEN] = x
    given = wider[:, :HIDDEN]
    assert_bit_equal(layer(given, ids, routing.topk_weights, slots), whole, "rows 16 bytes apart")
    monkeypatch.setattr(prefill_layer, "max_pairs", lambda *_: 900 * TOP_K)
    assert_bit_equal(layer(x, ids, routing.topk_weights, slots), whole, "pieces and the whole")


@pytest.mark.slow
def test_more_pairs_than_32_bits_can_address(monkeypatch: pytest.MonkeyPatch, gemms: str) -> None:
    """135,000 tokens in one round: rows of x and y lie beyond 2^31 elements from the first."""
    tokens, hidden = 135_000, 2048
    monkeypatch.setattr(prefill_layer, "max_pairs", lambda *_: 1 << 40)
    layer, _ = make_layer([16, 8], hidden=hidden, intermediate=256)
    generator = torch.Generator("cuda").manual_seed(0)
    wide = torch.empty(tokens, 16_400, dtype=torch.bfloat16, device="cuda")
    x = wide[:, :hidden]
    x.copy_(torch.randn(tokens, hidden, device="cuda", generator=generator))
    routing = random_routing(tokens, 8, EXPERTS, 1, device="cuda")
    each = torch.arange(tokens, device="cuda") * 3 // tokens - 1
    slots = TokenSlots(each.to(torch.int32), (0, 1))
    out = layer(x, routing.topk_ids, routing.topk_weights, slots)
    rows = torch.linspace(0, tokens - 1, CHECKED).long().cuda()
    assert layer.table is not None
    wanted = moe_lora_reference(
        x[rows], routing.topk_ids[rows], routing.topk_weights[rows], layer.weights,
        [layer.table.factors(slot) for slot in range(2)], each[rows].tolist(),
    )  # fmt: skip
    assert_close(out[rows], wanted, torch.bfloat16)


def test_a_graph_serves_other_tokens_and_slots(gemms: str) -> None:
    layer, _ = make_layer([16, 16])
    tokens = 1100
    routing = random_routing(tokens, TOP_K, EXPERTS, 1, device="cuda")
    x = random_activations(tokens, HIDDEN, torch.bfloat16, 2, "cuda")
    slots = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    ids, weights = routing.topk_ids.clone(), routing.topk_weights.clone()
    layer(x, ids, weights, TokenSlots.of([0] * tokens, "cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, ids, weights, TokenSlots.captured(slots))
    for seed in range(5):
        other = random_routing(tokens, TOP_K, EXPERTS, 10 + seed, device="cuda")
        ids.copy_(other.topk_ids)
        weights.copy_(other.topk_weights)
        x.copy_(random_activations(tokens, HIDDEN, torch.bfloat16, 20 + seed, "cuda"))
        each = [(t * (seed + 1)) % 3 - 1 for t in range(tokens)] if seed < 4 else [-1] * tokens
        slots.copy_(torch.tensor(each, dtype=torch.int32))
        graph.replay()
        wanted = layer(x, ids, weights, TokenSlots.of(each, "cuda"))
        assert_bit_equal(out, wanted, "the graph and the eager call")
