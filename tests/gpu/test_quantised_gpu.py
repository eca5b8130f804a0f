"""Layers with quantised weights on a CUDA device: every format and mode, graphs, exact weights."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from layer_cases import ALL_MODES, TWO_MODES, GpuCase, mixed_case

from moegraft.backends.triton import FORMATS
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.stages import TritonStages
from moegraft.backends.triton.tiles import choose_config
from moegraft.backends.triton.weights.rows import make_base_rows, run_base_rows
from moegraft.call import Mode
from moegraft.layer import MoeLoraLayer
from moegraft.problem import Problem
from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import expert_matrix, quantise_experts
from moegraft.quant.formats import format_of
from moegraft.sites import expert_site
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    assert_bit_equal,
    assert_close,
    layer_case,
    random_activations,
    random_factors,
    random_routing,
    random_weights,
)
from moegraft.types import ExpertWeights, SiteFactors, TokenSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16 = torch.bfloat16, torch.float16
#: E, H and I; the second with partial blocks and tiles.
WHOLE, PARTIAL = (8, 256, 128), (7, 320, 144)


def gpu_case(name: str, num_tokens: int, **options: Any) -> GpuCase:
    """A case with every kind of adapter, and the tiles that a plan would choose."""
    options = {"sizes": WHOLE, "minus_ones": 0.05, "scale": 1.5, **options}
    case = mixed_case(num_tokens, weight_format=name, **options)
    problem = Problem.of(case.weights, num_tokens, 2, case.table().max_rank)
    return GpuCase(case, choose_config(problem, device_facts())[0])


@pytest.mark.parametrize("num_tokens", [1, 9, 64, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_mode(name: str, num_tokens: int) -> None:
    gpu_case(name, num_tokens).check()


@pytest.mark.parametrize("name", FORMATS)
def test_partial_blocks_and_biases(name: str) -> None:
    gpu_case(name, 64, sizes=PARTIAL, biases=True).check()


@pytest.mark.parametrize("layout", ["up_first", "no_gate", "interleaved"])
@pytest.mark.parametrize("name", FORMATS)
def test_orders_of_gate_and_up(name: str, layout: str) -> None:
    if layout == "interleaved" and format_of(name).block[0] > 1:
        pytest.skip("blocks of 128 rows would mix gate and up")
    activation = {"no_gate": "relu2", "interleaved": "clamped"}.get(layout, "gelu_tanh")
    options = {"layout": LAYOUTS[layout], "activation": ACTIVATIONS[activation], "biases": True}
    gpu_case(name, 33, sizes=PARTIAL, **options).check(TWO_MODES)


@pytest.mark.parametrize("name", FORMATS)
def test_fp16(name: str) -> None:
    gpu = gpu_case(name, 33, dtype=FP16)
    if format_of(name).activation_group is None:
        gpu.check(TWO_MODES)
        return
    # FP8 products sum in fewer bits than fp32, and one value of h that e4m3 rounds the other way
    # is more than what half precision allows.
    for mode in TWO_MODES:
        found = gpu.run(mode)
        assert found.dtype == FP16
        assert_close(found.to(BF16), gpu.case.reference(), BF16)


@pytest.mark.parametrize("name", FORMATS)
def test_all_tokens_on_one_expert(name: str) -> None:
    gpu = gpu_case(name, 200)
    ids = torch.full_like(gpu.case.routing.topk_ids, 3)
    routing = replace(gpu.case.routing, topk_ids=ids, topk_weights=torch.ones_like(ids).float())
    replace(gpu, case=replace(gpu.case, routing=routing)).check(TWO_MODES)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_adapter_reaches_no_other_row(name: str, mode: Mode) -> None:
    gpu = gpu_case(name, 64)
    good = gpu.run(mode)
    held = list(gpu.case.adapters)
    broken = held[1]
    assert broken is not None
    held[1] = SiteFactors(
        {
            projection: replace(factor, lora_A=torch.full_like(factor.lora_A, torch.nan))
            for projection, factor in broken.projections.items()
        }
    )
    bad = replace(gpu, case=replace(gpu.case, adapters=tuple(held))).run(mode)
    rows = torch.tensor([s != 1 for s in gpu.case.token_slots])
    assert_bit_equal(bad[rows], good[rows], "rows of other adapters")


@pytest.mark.parametrize("name", FORMATS)
def test_the_plain_tiles_of_the_stages(name: str) -> None:
    gpu = gpu_case(name, 64, sizes=PARTIAL)
    layer = gpu.case.layer()
    normed = replace(gpu.case.weights, post_norm=torch.nn.functional.normalize)
    case = replace(gpu.case, weights=normed)
    assert_close(case.run(case.layer()), case.reference(), BF16, case.unrounded())
    assert name in layer.plan(64, 2).explain()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_activations_are_rounded_alike_by_the_kernel_and_by_torch_on_both(
    dtype: torch.dtype,
) -> None:
    x = random_activations(64, 1000, dtype, 5)
    wanted = rounded_activations(x.float(), format_of("fp8-block"))
    on_gpu = rounded_activations(x.cuda().float(), format_of("fp8-block"))
    assert_bit_equal(on_gpu, wanted, "torch on the GPU")
    rows = make_base_rows("fp8-block", 64, 1000, dtype, torch.device("cuda"))
    assert rows is not None and rows.scales is not None
    run_base_rows(x.cuda(), rows)
    seen = rows.values[:, :1000].float() * rows.scales.repeat_interleave(128, 1)[:, :1000]
    assert_bit_equal(seen, wanted, "the kernel")


def exact_weights(name: str, sizes: tuple[int, int, int]) -> ExpertWeights:
    """Weights whose fp32 scales are powers of two, so that no product of them is rounded."""
    weights = quantise_experts(random_weights(*sizes, dtype=BF16, device="cuda"), name)
    scales = weights.scales
    assert scales is not None
    found: dict[str, Any] = {}
    for field in ("gate_up", "down", "gate_up_global", "down_global"):
        scale = getattr(scales, field)
        if scale is not None and scale.dtype == torch.float32:
            found[field] = torch.exp2(torch.log2(scale).round())
    return replace(weights, scales=replace(scales, **found))


@pytest.mark.parametrize("sizes", [WHOLE, PARTIAL], ids=["whole", "partial"])
@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_inputs_read_the_exact_weights(name: str, sizes: tuple[int, int, int]) -> None:
    """With 448, the largest e4m3, the scale of a W8A8 activation is 1."""
    weights = exact_weights(name, sizes)
    for side, columns in (("gate_up", sizes[1]), ("down", sizes[2])):
        problem = Problem.of(weights, columns, 1)
        config, _ = choose_config(problem, device_facts())
        stages = TritonStages(config.overlapping(False))
        order = stages.permute(torch.full((columns, 1), 2, device="cuda"), None, sizes[0], 0)
        one_hot = 448.0 * torch.eye(columns, dtype=BF16, device="cuda")
        product = stages.gate_up if side == "gate_up" else stages.down
        found = product(one_hot, weights, order).cpu()
        wanted = 448.0 * expert_matrix(weights, side, 2).cpu().T  # type: ignore[arg-type]
        assert torch.equal(found, wanted), side  # 0 may lose its sign


@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_inputs_with_any_scales(name: str) -> None:
    case = layer_case(
        256, [], [-1] * 256, hidden=256, intermediate=128, num_experts=2, top_k=1, dtype=BF16,
        device="cuda", weight_format=name,
    )  # fmt: skip
    config, _ = choose_config(Problem.of(case.weights, 256, 1), device_facts())
    stages = TritonStages(config.overlapping(False))
    order = stages.permute(torch.ones(256, 1, dtype=torch.int32, device="cuda"), None, 2, 0)
    found = stages.gate_up(torch.eye(256, dtype=BF16, device="cuda"), case.weights, order).cpu()
    wanted = expert_matrix(case.weights, "gate_up", 1).cpu().T
    torch.testing.assert_close(found, wanted, rtol=4e-7, atol=0.0)


class Replays:
    """A layer of a format as a graph over static inputs, with new ones for each replay."""

    def __init__(self, name: str, mode: Mode, num_tokens: int) -> None:
        experts, hidden, intermediate = 16, 512, 256
        weights = random_weights(experts, hidden, intermediate, dtype=BF16, device="cuda")
        site = expert_site("experts", experts, hidden, intermediate)
        held = [random_factors(site, rank, seed=rank, dtype=BF16) for rank in (16, 7, 12)]
        case = layer_case(
            1, held, [0], num_experts=experts, hidden=hidden, intermediate=intermediate,
            dtype=BF16, device="cuda",
        )  # fmt: skip
        self.layer = MoeLoraLayer(quantise_experts(weights, name), case.table(), mode=mode)
        self.sizes = (num_tokens, hidden, experts)
        self.x, self.ids, self.weights, self.slots = self.inputs(0)
        self.run(replace(self.slots, live=(0, 1, 2)))
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run(TokenSlots.captured(self.slots.slots))

    def inputs(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TokenSlots]:
        tokens, hidden, experts = self.sizes
        routing = random_routing(tokens, 4, experts, seed, minus_ones=0.02, device="cuda")
        x = random_activations(tokens, hidden, BF16, seed, "cuda")
        slots = TokenSlots.of([random.Random(seed + t).randrange(-1, 3) for t in range(tokens)])
        return x, routing.topk_ids, routing.topk_weights, replace(slots, slots=slots.slots.cuda())

    def run(self, slots: TokenSlots) -> torch.Tensor:
        return self.layer(self.x, self.ids, self.weights, slots)

    def check(self, seed: int, repeats: int) -> None:
        """Replay new inputs some times over; all equal an eager call."""
        x, ids, weights, slots = self.inputs(seed)
        wanted = self.layer(x, ids, weights, replace(slots, live=(0, 1, 2)))
        self.x.copy_(x)
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.slots.slots.copy_(slots.slots)
        for _ in range(repeats):
            self.graph.replay()
            assert_bit_equal(self.out, wanted, f"T={self.sizes[0]}, seed {seed}")


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_300_replays_equal_eager_calls(name: str, mode: Mode) -> None:
    for num_tokens, repeats in ((1, 60), (4, 60), (16, 60), (64, 60), (512, 48), (2048, 12)):
        replays = Replays(name, mode, num_tokens)
        for seed in range(1, 7):
            replays.check(seed, repeats // 6)
