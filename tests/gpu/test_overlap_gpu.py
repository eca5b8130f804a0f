"""Overlap as a trace shows it: which launches of a layer are under way at the same time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moegraft.backends.triton.device import device_facts
from moegraft.call import Mode
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.testing import random_factors, random_weights
from moegraft.testing.cases import table_on
from moegraft.testing.generate import random_activations, random_routing
from moegraft.types import TokenSlots

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 32, 2048, 768, 8, 64
REPLAYS = 5
#: Time stamps of a launch that follows another one lie up to 0.3 us before that one's end.
BLUR_US = 0.5


def trace(mode: Mode) -> list[tuple[str, float, float]]:
    """Return (kernel, start, end) in microseconds of one layer call with four adapters."""
    from moegraft.factor_table import site_table

    weights = random_weights(
        EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="cuda", seed=0
    )
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
    adapters = [random_factors(site, 16, "separate", seed=s) for s in range(4)]
    table = table_on(site_table(site, adapters, torch.bfloat16), "cuda")
    layer = MoeLoraLayer(weights, table, mode=mode)
    routing = random_routing(TOKENS, TOP_K, EXPERTS, 1, device="cuda")
    x = random_activations(TOKENS, HIDDEN, torch.bfloat16, 2, "cuda")
    slots = TokenSlots.of([t % 4 for t in range(TOKENS)], "cuda")
    for _ in range(3):
        layer(x, routing.topk_ids, routing.topk_weights, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = TokenSlots.captured(slots.slots)
        layer(x, routing.topk_ids, routing.topk_weights, captured)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    found = []
    for event in profile.events():
        if "kernel" in event.name:
            found.append((event.name, event.time_range.start, event.time_range.end))
    assert found, "the profiler saw no kernel"
    return found


def overlap(found: list[tuple[str, float, float]], first: str, second: str) -> float:
    """Return the microseconds per replay in which kernels of both names were under way at once."""
    together = sum(
        max(0.0, min(end_a, end_b) - max(start_a, start_b))
        for name_a, start_a, end_a in found
        if first in name_a
        for name_b, start_b, end_b in found
        if second in name_b
    )
    return together / REPLAYS


def test_two_stream_computes_the_delta_beside_the_base_product() -> None:
    assert overlap(trace("two_stream"), "lora_", "grouped_gemm") > 5.0
    assert overlap(trace("serial"), "lora_", "grouped_gemm") < BLUR_US


def test_in_kernel_computes_the_delta_beside_the_base_product() -> None:
    if not device_facts().has_dependent_launch:
        pytest.skip("needs dependent launch")
    assert overlap(trace("in_kernel"), "lora_shrink_expand", "gate_up_activation") > 5.0
    assert overlap(trace("fused_serial"), "lora_shrink_expand", "gate_up_activation") < BLUR_US
