"""The ops on a CUDA device, in bf16 and fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moegraft import ops
from moegraft.backends.triton.workspace import MAX_PAIRS
from moegraft.testing import (
    LayerCase,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    poisoned_empty,
)
from moegraft.types import Activation, TokenSlots, WeightLayout
from ops_cases import HostDelta, gpu_case, routed, with_all_deltas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def run_moe_lora(case: LayerCase, slots: TokenSlots | None, **options: Any) -> torch.Tensor:
    """Run ``moe_lora`` on a case."""
    return ops.moe_lora(
        case.x,
        case.routing.topk_ids,
        case.routing.topk_weights,
        case.weights,
        case.table(),
        slots,
        expert_offset=case.expert_offset,
        routed_scaling_factor=case.scale,
        **options,
    )


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(0, BF16), (1, BF16), (64, BF16), (7, torch.float16)], ids=str
)
def test_the_op_with_a_hosts_deltas_equals_the_reference(
    num_tokens: int, dtype: torch.dtype
) -> None:
    case = gpu_case(num_tokens, scale=1.5, expert_offset=2, dtype=dtype)
    with poisoned_empty():
        found = with_all_deltas(case)
        whole, base = run_moe_lora(case, case.slots()), run_moe_lora(case, None)
    assert found.shape == case.x.shape
    if num_tokens:
        ref_with, ref_base = case.reference(), case.reference(base=True)
        assert_close(found, ref_with, dtype)
        assert_close(whole, ref_with, dtype)
        assert_delta_close(whole, base, ref_with, ref_base)


@pytest.mark.parametrize(
    ("layout", "activation"),
    [
        (WeightLayout("up_first"), Activation("gelu_tanh")),
        (WeightLayout(), Activation("silu", limit=0.7, alpha=1.702, up_shift=1.0)),
        (WeightLayout("no_gate"), Activation("relu2")),
    ],
    ids=["up first", "clamped", "no gate"],
)
def test_layouts_and_activations(layout: WeightLayout, activation: Activation) -> None:
    case = gpu_case(layout=layout, activation=activation)
    assert_close(with_all_deltas(case), case.reference(), BF16)
    event = torch.cuda.Event()
    event.record()
    assert_close(with_all_deltas(case, lora_ready_event=event), case.reference(), BF16)


def test_rows_then_finalize_equal_the_call_that_sums() -> None:
    case = gpu_case(scale=1.25)
    delta = HostDelta.of(case).gate_up.to(BF16)
    ids = case.routing.topk_ids
    h = torch.full((*ids.shape, 128), torch.nan, dtype=BF16, device="cuda")
    with poisoned_empty():
        whole = routed(case, gate_up_lora_delta=delta, activation_lora_input=h)
        rows = routed(case, gate_up_lora_delta=delta, do_finalize=False)
        summed = ops.finalize_moe_lora(*rows, routed_scaling_factor=1.25)
    assert_close(summed, whole.double(), BF16)
    assert torch.equal(rows.expanded_idx_to_permuted_idx < 0, ids.view(-1) < 0)
    assert bool((h[ids < 0] == 0).all()) and bool(h.isfinite().all())
    packed = ops.pack_topk(ids, case.routing.topk_weights)
    args = (packed, case.x, case.weights.gate_up, case.weights.down)
    again = ops.routed_moe_lora(*args, gate_up_lora_delta=delta, routed_scaling_factor=1.25)
    assert_bit_equal(again, whole)


def test_a_weighted_delta_of_down_is_added_after_the_sum() -> None:
    case = gpu_case(scale=2.0)
    delta = HostDelta.of(case)
    h = torch.empty(*case.routing.topk_ids.shape, 128, dtype=BF16, device="cuda")
    out = routed(case, gate_up_lora_delta=delta.gate_up, activation_lora_input=h)
    ops.add_down_delta(
        out,
        delta.down(h, weighted=True),
        case.routing.topk_ids,
        local_num_experts=8,
        routed_scaling_factor=2.0,
    )
    assert_close(out, case.reference(), BF16)


def test_dependent_launch_changes_no_bit() -> None:
    case = gpu_case(64)
    delta = HostDelta.of(case).gate_up
    wanted = routed(case, gate_up_lora_delta=delta, enable_pdl=False)
    for _ in range(50):
        assert_bit_equal(routed(case, gate_up_lora_delta=delta), wanted)


def test_more_pairs_than_one_round_of_launches_takes() -> None:
    case = gpu_case(7)
    repeats = MAX_PAIRS // 7 // 2 + 10
    ids = case.routing.topk_ids.repeat(repeats, 1)
    weights = case.routing.topk_weights.repeat(repeats, 1)
    delta = HostDelta.of(case).gate_up.repeat(repeats, 1, 1)
    h = torch.empty(*ids.shape, 128, dtype=BF16, device="cuda")
    event = torch.cuda.Event()
    event.record()
    for options in ({}, {"lora_ready_event": event, "gemm2_done_event": torch.cuda.Event()}):
        found = ops.routed_moe_lora(
            ids,
            case.x.repeat(repeats, 1),
            case.weights.gate_up,
            case.weights.down,
            topk_weights=weights,
            gate_up_lora_delta=delta,
            activation_lora_input=h,
            **options,
        )
        assert ids.numel() > MAX_PAIRS
        wanted = routed(case, gate_up_lora_delta=delta[:7].contiguous())
        assert_close(found, wanted.double().repeat(repeats, 1), BF16)
        assert bool((h[ids < 0] == 0).all())
        rows = ops.routed_moe_lora(
            ids,
            case.x.repeat(repeats, 1),
            case.weights.gate_up,
            case.weights.down,
            topk_weights=weights,
            gate_up_lora_delta=delta,
            do_finalize=False,
            **options,
        )
        assert_close(ops.finalize_moe_lora(*rows), found.double(), BF16)
