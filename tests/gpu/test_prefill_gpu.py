"""The kernels for many rows per expert, on a real GPU with their real tiles."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.prefill.config import SHARED_MEMORY
from moegraft.factor_table import site_table
from moegraft.layer import MoeLoraLayer
from moegraft.reference import moe_lora_reference
from moegraft.sites import expert_site
from moegraft.testing import random_factors, random_weights
from moegraft.testing.cases import table_on
from moegraft.testing.compare import assert_bit_equal, assert_close, assert_delta_close
from moegraft.testing.generate import random_activations, random_routing
from moegraft.testing.poison import poisoned_empty
from moegraft.types import SiteFactors, TokenSlots

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 512, 384, 4
CHECKED = 24


def make_layer(ranks: list[int], mode: str | None = None) -> tuple[MoeLoraLayer, list[SiteFactors]]:
    """Return a bf16 layer with one adapter per rank, of kinds in turn."""
    if device_facts().capability < 90 or device_facts().shared_memory < SHARED_MEMORY:
        pytest.skip("this GPU has no tensor maps, or too little shared memory")
    weights = random_weights(
        EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="cuda", seed=0
    )
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
    kinds = ("separate", "fused", "shared_outer")
    adapters = [
        random_factors(site, rank, kinds[i % 3], seed=i)  # type: ignore[arg-type]
        for i, rank in enumerate(ranks)
    ]
    table = table_on(site_table(site, adapters, torch.bfloat16), "cuda")
    return MoeLoraLayer(weights, table, mode=mode), adapters  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [[16, 8, 3, 16, 12], [64, 20, 33], [128, 16]])
@pytest.mark.parametrize("order", ["interleaved", "contiguous"])
def test_many_rows_match_the_reference(ranks: list[int], order: str) -> None:
    layer, adapters = make_layer(ranks)
    tokens = 1500
    assert "many rows per expert" in layer.plan(tokens, TOP_K).explain()
    routing = random_routing(tokens, TOP_K, EXPERTS, 1, device="cuda")
    x = random_activations(tokens, HIDDEN, torch.bfloat16, 2, "cuda")
    kinds = len(ranks) + 1
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
    factors = [layer.table.factors(slot) for slot in range(len(adapters))]
    wanted = moe_lora_reference(*inputs, factors, slots.slots[rows].tolist())
    assert_close(base[rows], wanted_base, torch.bfloat16)
    assert_close(ours[rows], wanted, torch.bfloat16)
    assert_delta_close(ours[rows], base[rows], wanted, wanted_base)


def test_a_graph_serves_other_tokens_and_slots() -> None:
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
