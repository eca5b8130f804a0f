"""The ops against the reference, on the CPU backend and in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraft import ops
from moegraft.errors import MoegraftError
from moegraft.testing import assert_bit_equal, assert_close, assert_delta_close, poisoned_empty
from moegraft.testing.cases import LayerCase
from moegraft.types import Activation, TokenSlots, WeightLayout
from ops_cases import BACKENDS, HostDelta, interpreted, ops_case, routed, with_all_deltas

GPT_OSS = Activation("silu", limit=0.7, alpha=1.702, up_shift=1.0)
CASES = {
    "gate_first": (WeightLayout(), Activation("silu")),
    "up_first": (WeightLayout("up_first"), Activation("silu")),
    "clamped": (WeightLayout(), GPT_OSS),
    "gelu": (WeightLayout(), Activation("gelu")),
    "gelu_tanh, up first": (WeightLayout("up_first"), Activation("gelu_tanh")),
    "relu2 without a gate": (WeightLayout("no_gate"), Activation("relu2")),
}
on_both = pytest.mark.parametrize("backend", BACKENDS)


def run_moe_lora(case: LayerCase, backend: str, base: bool = False) -> torch.Tensor:
    """Run ``moe_lora`` on a case."""
    return ops.moe_lora(
        case.x,
        case.routing.topk_ids,
        case.routing.topk_weights,
        case.weights,
        case.table(),
        None if base else case.slots(),
        expert_offset=case.expert_offset,
        routed_scaling_factor=case.scale,
        backend=backend,
    )


@on_both
@pytest.mark.parametrize("name", CASES)
def test_the_op_with_a_hosts_deltas_equals_moe_lora_and_the_reference(
    name: str, backend: str
) -> None:
    layout, activation = CASES[name]
    case = ops_case(layout=layout, activation=activation, scale=1.5)
    ref_with, ref_base = case.reference(), case.reference(base=True)
    with poisoned_empty():
        found, base = with_all_deltas(case, backend), routed(case, backend=backend)
        whole = run_moe_lora(case, backend)
    for result in (found, whole):
        assert_close(result, ref_with, torch.float32)
        assert_delta_close(result, base, ref_with, ref_base)
    assert_close(base, ref_base, torch.float32)


@on_both
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_no_token_one_token_and_many_tokens(num_tokens: int, backend: str) -> None:
    case = ops_case(num_tokens, expert_offset=3)
    found = with_all_deltas(case, backend)
    assert found.shape == case.x.shape
    if num_tokens:
        assert_close(found, case.reference(), torch.float32)
        assert_close(run_moe_lora(case, backend), case.reference(), torch.float32)


@on_both
def test_half_precision_and_a_delta_of_another_dtype(backend: str) -> None:
    case = ops_case(dtype=torch.float16)
    assert_close(with_all_deltas(case, backend), case.reference(), torch.float16)
    delta = HostDelta.of(case).gate_up
    wide = routed(case, gate_up_lora_delta=delta.half().float(), backend=backend)
    narrow = routed(case, gate_up_lora_delta=delta.half(), backend=backend)
    assert_bit_equal(wide, narrow)


def test_bfloat16_on_the_cpu() -> None:
    case = ops_case(dtype=torch.bfloat16)
    assert_close(with_all_deltas(case), case.reference(), torch.bfloat16)


@on_both
def test_rows_then_finalize_equal_the_call_that_sums(backend: str) -> None:
    case = ops_case(scale=1.25)
    delta = HostDelta.of(case).gate_up
    with poisoned_empty():
        whole = routed(case, gate_up_lora_delta=delta, backend=backend)
        rows = routed(case, gate_up_lora_delta=delta, do_finalize=False, backend=backend)
        summed = ops.finalize_moe_lora(*rows, routed_scaling_factor=1.25, backend=backend)
    assert_close(summed, whole.double(), torch.float32)
    assert rows.topk_weights.dtype == torch.bfloat16
    assert rows.rows.dtype == case.x.dtype
    index = rows.expanded_idx_to_permuted_idx
    assert index.dtype == torch.int32
    assert torch.equal(index < 0, case.routing.topk_ids.view(-1) < 0)
    used = index[index >= 0].tolist()
    assert len(set(used)) == len(used) and max(used) < rows.rows.shape[0]


@on_both
def test_packed_ids_equal_plain_ids_with_bf16_weights(backend: str) -> None:
    case = ops_case()
    ids, weights = case.routing.topk_ids, case.routing.topk_weights
    packed = ops.pack_topk(ids, weights)
    args = (case.x, case.weights.gate_up, case.weights.down)
    plain = ops.routed_moe_lora(ids.long(), *args, topk_weights=weights, backend=backend)
    assert_bit_equal(ops.routed_moe_lora(packed, *args, backend=backend), plain)


@on_both
def test_the_scaling_factor_is_applied_once_to_base_and_delta_alike(backend: str) -> None:
    one, two = ops_case(scale=1.0), ops_case(scale=2.0)
    assert_bit_equal(with_all_deltas(two, backend), 2 * with_all_deltas(one, backend))
    delta = HostDelta.of(two)
    h = torch.empty(*two.routing.topk_ids.shape, two.weights.intermediate)
    out = routed(two, gate_up_lora_delta=delta.gate_up, activation_lora_input=h, backend=backend)
    found = ops.add_down_delta(
        out,
        delta.down(h, weighted=True),
        two.routing.topk_ids,
        local_num_experts=two.weights.num_experts,
        routed_scaling_factor=2.0,
        backend=backend,
    )
    assert found is out
    assert_close(out, two.reference(), torch.float32)


@on_both
def test_a_summed_delta_is_added_as_it_is(backend: str) -> None:
    out, delta = torch.randn(3, 40), torch.randn(3, 40)
    wanted = out + 2 * delta
    ops.add_down_delta(out, delta, routed_scaling_factor=2.0, backend=backend)
    assert_close(out, wanted.double(), torch.float32)


@on_both
def test_parts_of_the_experts_sum_to_the_whole(backend: str) -> None:
    case = ops_case(num_experts=6)
    whole = routed(case, backend=backend)
    total = torch.zeros_like(whole)
    for first, count in ((0, 2), (2, 3), (5, 1)):
        part = replace(
            case.weights,
            gate_up=case.weights.gate_up[first : first + count],
            down=case.weights.down[first : first + count],
        )
        total += ops.routed_moe_lora(
            case.routing.topk_ids,
            case.x,
            part.gate_up,
            part.down,
            topk_weights=case.routing.topk_weights,
            num_experts=6,
            local_expert_offset=first,
            local_num_experts=count,
            backend=backend,
        )
    assert_close(total, whole.double(), torch.float32)


@on_both
def test_h_is_what_meets_the_down_weights_and_zero_elsewhere(backend: str) -> None:
    case = ops_case()
    ids, weights = case.routing.topk_ids, case.routing.topk_weights
    h = torch.full((*ids.shape, case.weights.intermediate), torch.nan)
    out = routed(case, activation_lora_input=h, backend=backend)
    assert bool((h[ids < 0] == 0).all()) and bool((ids < 0).any())
    by_hand = torch.zeros_like(out)
    for t, k in (ids >= 0).nonzero().tolist():
        by_hand[t] += weights[t, k] * (case.weights.down[ids[t, k]] @ h[t, k])
    assert_close(by_hand, out.double(), torch.float32)


@on_both
def test_results_go_where_the_caller_says(backend: str) -> None:
    case = ops_case()
    wide = torch.full((7, 50), 3.0)
    out = wide[:, 5:45]
    assert routed(case, output=out, backend=backend) is out
    assert_bit_equal(out.contiguous(), routed(case, backend=backend))
    rows = routed(case, do_finalize=False, backend=backend)
    ops.finalize_moe_lora(*rows, out=out, backend=backend)
    assert_close(out.contiguous(), routed(case, backend=backend).double(), torch.float32)
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights)
    ops.moe_lora(*args, case.table(), case.slots(), out=out, backend=backend)
    assert_close(out.contiguous(), case.reference(), torch.float32)
    assert bool((wide[:, :5] == 3).all()) and bool((wide[:, 45:] == 3).all())


@on_both
def test_strided_activations_and_weights_are_read_where_they_are(backend: str) -> None:
    case = ops_case()
    wanted = routed(case, backend=backend)
    x = torch.full((7, 80), torch.nan)
    x[:, ::2] = case.x
    gate_up = case.weights.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    strided = replace(case, x=x[:, ::2], weights=replace(case.weights, gate_up=gate_up))
    found = routed(strided, backend=backend)
    if backend != "triton":  # for another layout, sums may take another order
        assert_close(found, wanted.double(), torch.float32)
    else:
        assert_bit_equal(found, wanted)


@interpreted
def test_a_call_in_pieces_equals_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import moegraft.backends.triton.routed as triton_routed

    case = ops_case(9, scale=1.5)
    delta = HostDelta.of(case).gate_up
    shape = (*case.routing.topk_ids.shape, case.weights.intermediate)

    def results() -> list[torch.Tensor]:
        h = torch.full(shape, torch.nan)
        options = {"gate_up_lora_delta": delta, "backend": "triton"}
        out = routed(case, activation_lora_input=h, **options)
        rows = routed(case, do_finalize=False, **options)
        local = rows.expanded_idx_to_permuted_idx >= 0
        summed = ops.finalize_moe_lora(*rows, backend="triton")
        return [out, h, rows.rows[local], rows.expanded_idx_to_permuted_idx, summed]

    whole = results()
    monkeypatch.setattr(triton_routed, "MAX_PAIRS", 7)
    for found, wanted in zip(results(), whole, strict=True):
        assert_bit_equal(found, wanted)


@interpreted
def test_one_launch_unpacks_the_routing_as_torch_does() -> None:
    from moegraft.backends.triton.pairs import run_unpack

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 2**15, (70, 5), generator=generator)
    packed = ops.pack_topk(ids, torch.randn(70, 5, generator=generator))
    for found, wanted in zip(run_unpack(packed), ops.unpack_topk(packed), strict=True):
        assert_bit_equal(found, wanted)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_the_activation_that_waits_for_an_event_is_the_fused_one(name: str) -> None:
    """What runs around the event, without one: there are none on the CPU."""
    from moegraft.backends.triton.config import FusedConfig, GemmConfig
    from moegraft.backends.triton.launch import run_grouped_gemm, run_route
    from moegraft.backends.triton.pair_activation import run_pair_activation
    from moegraft.backends.triton.workspace import make_workspace

    layout, activation = CASES[name]
    case = ops_case(layout=layout, activation=activation)
    ids, w = case.routing.topk_ids, case.weights
    delta = HostDelta.of(case).gate_up
    wanted = torch.empty(*ids.shape, w.intermediate)
    routed(case, gate_up_lora_delta=delta, activation_lora_input=wanted)
    tile = GemmConfig(16, 32, 4, 2)
    config = FusedConfig(16, tile, tile, tile)
    ws = make_workspace(w, ids.numel(), 16, lora=False)
    gate_up = torch.full((ids.numel(), w.gate_up.shape[1]), torch.nan)
    run_route(ids, None, w.num_experts, ws, config)
    run_grouped_gemm(case.x, w, ws, 2, config, gate_up, down=False)
    ws.h.fill_(torch.nan)
    run_pair_activation(gate_up, w, ws.h, ws, every_pair=delta)
    local = ids.view(-1) >= 0
    assert_close(ws.h[local], wanted.view(ws.h.shape)[local].double(), torch.float32)
    assert bool(ws.h[~local].isnan().all()), "rows of pairs that are not local are not written"


def test_slots_as_a_tensor_equal_token_slots() -> None:
    case = ops_case()
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights, case.table())
    slots = torch.tensor(case.token_slots, dtype=torch.int32)
    assert_bit_equal(ops.moe_lora(*args, slots), ops.moe_lora(*args, case.slots()))
    with pytest.raises(MoegraftError, match="captured are for CUDA graphs"):
        ops.moe_lora(*args, TokenSlots.captured(slots), backend="cpu")


def test_the_examples_of_the_docs_run() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[1] / "docs" / "ops.md").read_text()
    names: dict[str, object] = {}
    for block in text.split("```python\n")[1:]:
        exec(compile(block.split("```")[0], "docs/ops.md", "exec"), names)
    packed = names["packed"]
    assert isinstance(packed, torch.Tensor) and packed.shape == (4, 8)
