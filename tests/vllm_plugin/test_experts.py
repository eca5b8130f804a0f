"""The experts class against vLLM's formula: its own configuration, context and metadata objects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts_cases import (
    DEVICE,
    IDS,
    TOKENS,
    E,
    K,
    T,
    error,
    expected,
    make_case,
    make_experts,
    run,
    set_tokens,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

from moegraft.hosts.vllm.counters import counters
from moegraft.hosts.vllm.experts import MoegraftExperts, contiguous_offset

LIMIT = 1e-5 if DEVICE == "cpu" else 2e-3  # TF32 products on a GPU


@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave"]
)
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("biases", [False, True])
def test_gated_layers_of_one_and_two_slices(name: str, slices: int, biases: bool) -> None:
    case = make_case(name, slices, biases)
    found = run(make_experts(case), case)
    wanted, base = expected(case), expected(case, base=True)
    assert error(found, wanted) < LIMIT
    assert error(wanted, base) > 0.05  # the adapters matter


@pytest.mark.parametrize("name", ["silu_no_mul", "relu2_no_mul"])
def test_layers_without_a_gate(name: str) -> None:
    case = make_case(name, slices=1)
    assert error(run(make_experts(case), case), expected(case)) < LIMIT


def test_shared_outer_slots() -> None:
    case = make_case("silu", outer=True)
    assert case.w13_a[0].shape[1] == case.w2_b.shape[1] == 1
    assert error(run(make_experts(case), case), expected(case)) < LIMIT


def test_bfloat16() -> None:
    case = make_case("silu", dtype=torch.bfloat16)
    assert error(run(make_experts(case), case), expected(case)) < 1e-2


def test_weights_that_are_on_the_rows_already() -> None:
    case = make_case("silu")
    found = run(make_experts(case), case, on_input=True)
    assert error(found, expected(case, on_input=True)) < LIMIT


@pytest.mark.parametrize(
    ("mine", "offset"), [([2, 3, 4], 2), ([0, 2, 4], None), ([4, 3, 2], None)], ids=str
)
@pytest.mark.parametrize("fixed", [True, False])
def test_experts_of_one_rank_by_any_map(mine: list[int], offset: int | None, fixed: bool) -> None:
    expert_map = torch.full((E,), -1, dtype=torch.int32, device=DEVICE)
    for local, e in enumerate(mine):
        expert_map[e] = local
    assert contiguous_offset(expert_map) == offset
    case = make_case("silu", experts=len(mine))
    ids = torch.arange(T * K, device=DEVICE).view(T, K).to(torch.int32) % (E + 1) - 1
    experts = make_experts(case, expert_map if fixed else None, E)
    found = run(experts, replace(case, ids=ids), expert_map)
    local = torch.where(ids < 0, -1, expert_map[ids.clamp(min=0).long()])
    assert error(found, expected(replace(case, ids=local))) < LIMIT


def test_slots_that_came_with_the_rows_take_the_place_of_this_ranks_own() -> None:
    case = make_case("silu")
    experts = make_experts(case)
    assert experts._lora_context is not None
    wanted = run(experts, case)
    sent = [IDS.index(token) if token else -1 for token in TOKENS]
    set_tokens(experts._lora_context.punica_wrapper, (0,) * T)
    base = run(experts, case)
    assert error(base, expected(case, base=True)) < LIMIT
    experts._lora_context.local_token_lora_mapping = torch.tensor(
        sent, dtype=torch.int32, device=DEVICE
    )
    assert torch.equal(run(experts, case), wanted)


def test_rows_without_an_adapter_keep_the_bits_of_the_base_and_counters_tell() -> None:
    case = make_case("silu", biases=True)
    experts = make_experts(case)
    start = counters()
    found = run(experts, case)
    set_tokens(experts._lora_context.punica_wrapper, (0,) * T)  # type: ignore[union-attr]
    base = run(experts, case)
    rows = torch.tensor([token == 0 for token in TOKENS], device=DEVICE)
    assert torch.equal(found[rows], base[rows]) and not torch.equal(found, base)
    end = counters()
    assert end["expert_calls"] - start["expert_calls"] == 2
    assert end["expert_calls_with_adapters"] - start["expert_calls_with_adapters"] == 1


@pytest.mark.parametrize("tokens", [T, 0])
@pytest.mark.parametrize("into_result", [True, False])
def test_vllms_kernel_object_returns_the_layer(into_result: bool, tokens: int) -> None:
    case = make_case("silu")
    plain = make_experts(case)
    plain.stock.set_lora_context(plain._lora_context)
    experts = MoegraftExperts(plain.stock, plain.formula, plain.table, None, into_result)
    kernel = FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), plain.stock)
    for moved in (experts, experts.renewed(plain.stock)):
        kernel.impl.fused_experts = moved
        init_workspace_manager(torch.device(DEVICE))
        try:
            found = kernel.apply(
                hidden_states=case.x[:tokens],
                w1=case.w13,
                w2=case.w2,
                topk_weights=case.weights[:tokens],
                topk_ids=case.ids[:tokens],
                activation=MoEActivation("silu"),
                global_num_experts=E,
                expert_map=None,
                apply_router_weight_on_input=False,
            )
        finally:
            reset_workspace_manager()
        assert torch.equal(found, run(plain, case)[:tokens])


def test_weights_that_moved_are_read_where_they_are_now() -> None:
    case = make_case("silu")
    experts = make_experts(case)
    run(experts, case)
    moved = replace(case, w13=case.w13 * 2, w2=case.w2.clone())
    assert error(run(experts, moved), expected(moved)) < LIMIT


def test_another_kernel_object_gets_the_same_table_and_context() -> None:
    case = make_case("silu")
    experts = make_experts(case)
    stock = TritonExperts(experts.moe_config, experts.quant_config)
    stock.set_lora_context(experts._lora_context)
    assert torch.equal(run(experts.renewed(stock), case), run(experts, case))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
@pytest.mark.parametrize("captured_with", [TOKENS, (11,) * T])
def test_a_captured_call_follows_the_slots_and_ranks_of_each_replay(
    captured_with: tuple[int, ...],
) -> None:
    case = make_case("silu", dtype=torch.bfloat16)
    experts = make_experts(case)
    punica = experts._lora_context.punica_wrapper  # type: ignore[union-attr]
    set_tokens(punica, captured_with)
    run(experts, case)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = run(experts, case)
    set_tokens(punica, TOKENS)
    graph.replay()
    assert error(found, expected(case)) < 1e-2
    set_tokens(punica, (0,) * T)  # only wipes the static slots: the graph stays one with adapters
    graph.replay()
    assert error(found, expected(case, base=True)) < 1e-2
