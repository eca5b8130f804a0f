"""Kinds of fault that need a CUDA device to show; see ``docs/field-faults.md``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from moegraft import ops
from moegraft.adapters import AdapterBank, AdapterStore
from moegraft.compile_counter import count_compilations
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.testing import (
    LayerCase,
    assert_bit_equal,
    assert_close,
    layer_case,
    random_adapter,
    random_factors,
)
from moegraft.types import TokenSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
SIZES = {"num_experts": 8, "hidden": 256, "intermediate": 128}
SITE = expert_site("experts", 8, 256, 128)


def case_of(num_tokens: int, seed: int = 0) -> LayerCase:
    """A case in bf16 on the GPU, without adapters."""
    return layer_case(num_tokens, [], [-1], **SIZES, dtype=BF16, seed=seed, device="cuda")  # type: ignore[arg-type]


def run(case: LayerCase, layer: MoeLoraLayer, slots: TokenSlots | None) -> torch.Tensor:
    """Run a layer on a case's tensors."""
    return layer(case.x, case.routing.topk_ids, case.routing.topk_weights, slots)


def launches(function: Callable[[], object]) -> list[str]:
    """Return the names of the Triton kernels that a call launches."""
    from triton import knobs

    names: list[str] = []

    def enter(metadata: object) -> None:
        names.append(str(metadata.get()["name"]))  # type: ignore[attr-defined]

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        function()
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    return names


def test_nothing_is_compiled_for_other_adapters_ranks_slots_offsets_or_scales() -> None:
    bank = AdapterBank([SITE], num_slots=5, max_rank=32, dtype=BF16, device="cuda")
    store = AdapterStore(bank)
    for i, rank in enumerate((1, 2, 8, 15, 16, 17, 32)):
        store.add(f"r{rank}", random_adapter([SITE], rank, seed=i))
    table, sizes = bank.site_table("experts"), (1, 15, 16, 17)

    def serve(name: str, num_tokens: int, offset: int, scale: float) -> torch.Tensor:
        case = case_of(num_tokens, seed=offset)
        with store.use([name]) as slots:
            return ops.moe_lora(
                case.x,
                case.routing.topk_ids,
                case.routing.topk_weights,
                case.weights,
                table,
                TokenSlots.of([slots[name]] * num_tokens, "cuda"),
                expert_offset=offset,
                routed_scaling_factor=scale,
            )

    for num_tokens in sizes:
        serve("r1", num_tokens, 0, 1.0)
    with count_compilations() as found:
        for i, name in enumerate(("r2", "r8", "r15", "r16", "r17", "r32", "r1")):
            for num_tokens in sizes:
                serve(name, num_tokens, i, 1.0 + i)
    assert not found.kernels


def test_a_base_batch_launches_what_a_layer_without_adapters_does() -> None:
    case = case_of(16)
    adapters = [random_factors(SITE, 8, seed=i, dtype=BF16) for i in range(8)]
    with_table = replace(case, adapters=tuple(adapters)).layer()
    plain = MoeLoraLayer(case.weights)
    wanted = launches(lambda: run(case, plain, None))
    assert wanted
    assert launches(lambda: run(case, with_table, None)) == wanted
    nobody = TokenSlots.of([-1] * 16, "cuda")
    assert launches(lambda: run(case, with_table, nobody)) == wanted
    assert_bit_equal(run(case, with_table, nobody), run(case, plain, None))


def test_launches_do_not_grow_with_slots_or_live_adapters() -> None:
    case, found = case_of(16), []
    for num_slots, live in ((1, 1), (8, 1), (8, 8), (64, 8)):
        adapters = [random_factors(SITE, 8, seed=i % 8, dtype=BF16) for i in range(num_slots)]
        layer = replace(case, adapters=tuple(adapters)).layer()
        slots = TokenSlots.of([t % live for t in range(16)], "cuda")
        found.append(launches(lambda layer=layer, slots=slots: run(case, layer, slots)))  # type: ignore[misc]
    assert found[0] and all(names == found[0] for names in found)


def test_a_graph_keeps_its_memory_while_eager_batches_of_other_sizes_run() -> None:
    adapters = tuple(random_factors(SITE, 4 + i, seed=i, dtype=BF16) for i in range(4))
    case = replace(case_of(16), adapters=adapters)
    layer, buffer = case.layer(), torch.zeros(16, dtype=torch.int32, device="cuda")
    run(case, layer, TokenSlots.captured(buffer))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, layer, TokenSlots.captured(buffer))
    for seed in range(12):
        other = case_of(5 + 7 * seed, seed)
        mixed = TokenSlots.of([t % 5 - 1 for t in range(other.x.shape[0])], "cuda")
        run(other, layer, mixed)
        run(other, layer, None)
        slots = TokenSlots.of([(t + seed) % 5 - 1 for t in range(16)], "cuda")
        buffer.copy_(slots.slots)
        graph.replay()
        assert_bit_equal(out, run(case, layer, slots))


def test_deltas_and_rows_past_two_to_the_31_elements() -> None:
    num_tokens, top_k, wide = 70_000, 8, 2048
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=BF16, device="cuda", generator=generator)

    x = random(num_tokens, 64)
    gemm1, gemm2 = random(8, 2 * wide, 64) / 8, random(8, 64, wide) / 45
    weights, ids = random(num_tokens, 8).float().softmax(1).topk(top_k)
    delta = random(num_tokens, top_k, 2 * wide)
    assert delta.numel() > 2**31
    h = torch.empty(num_tokens, top_k, wide, dtype=BF16, device="cuda")
    out = ops.routed_moe_lora(
        ids,
        x,
        gemm1,
        gemm2,
        topk_weights=weights,
        gate_up_lora_delta=delta,
        activation_lora_input=h,
    )
    for rows in (slice(0, 16), slice(num_tokens - 16, None)):
        few = ops.routed_moe_lora(
            ids[rows],
            x[rows],
            gemm1,
            gemm2,
            topk_weights=weights[rows],
            gate_up_lora_delta=delta[rows].contiguous(),
        )
        assert_close(out[rows], few.double(), BF16)
    big = delta.view(num_tokens, top_k, 2 * wide)
    total = torch.zeros(num_tokens, 2 * wide, dtype=BF16, device="cuda")
    ops.add_down_delta(total, big, ids)
    assert_close(total[-16:], big[-16:].double().sum(1), BF16)
