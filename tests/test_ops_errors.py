"""What the ops refuse, and in which words; packing."""

from __future__ import annotations

import copy
import ctypes
import pickle
from typing import Any

import pytest
import torch

from moegraft import ops
from moegraft.errors import MoegraftError, PlanError, UnsupportedError
from moegraft.types import Activation
from ops_cases import ops_case

CASE = ops_case()
IDS, WEIGHTS = CASE.routing.topk_ids, CASE.routing.topk_weights
GEMM1, GEMM2 = CASE.weights.gate_up, CASE.weights.down


def call(**changes: Any) -> Any:
    """Call the routed op with one thing changed."""
    arguments = {
        "topk_ids": IDS,
        "hidden_states": CASE.x,
        "gemm1_weights": GEMM1,
        "gemm2_weights": GEMM2,
        "topk_weights": WEIGHTS,
    }
    return ops.routed_moe_lora(**{**arguments, **changes})


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"routing_bias": torch.zeros(5)}, "routing_bias is not implemented"),
    ({"routing_method_type": 3}, "routing_method_type=3 is not implemented (Llama4"),
    ({"routing_method_type": 7}, "its meaning is not known here"),
    ({"use_shuffled_weight": True}, "use_shuffled_weight=True is not implemented"),
    ({"weight_layout": 2}, "weight_layout=2 is not implemented"),
    ({"gemm1_weights": GEMM1.view(5, 2, 24, 40)}, "gemm1_weights (5, 2, 24, 40) look shuffled"),
    ({"gemm2_weights": GEMM2.to(torch.uint8)}, "gemm2_weights are torch.uint8"),
    ({"gemm1_weights": GEMM1.to(torch.float8_e4m3fn)}, "gemm1_weights are torch.float8_e4m3fn"),
    ({"activation_type": 4}, "activation_type=4 is Geglu: pass 'geglu' or 'geglu_tanh'"),
    ({"activation_type": 5}, "activation_type=5 is SwigluBias: pass 'swiglu_oai'"),
    ({"activation_type": 99}, "activation_type=99 is unknown"),
    ({"activation_type": "swish"}, "activation_type='swish' is unknown"),
    ({"activation_type": 2.5}, "activation_type=2.5 is no name, number or Activation"),
    ({"activation_type": True}, "activation_type=True is no name, number or Activation"),
    ({"activation_type": Activation("custom", custom=torch.tanh)}, "a custom function"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 3}, "top_k is 3, but topk_ids have 2 columns"),
    ({"topk_ids": IDS[:3]}, "topk_ids have shape (3, 2); expected [T, K] with T = 7"),
    ({"topk_weights": WEIGHTS[:, :1]}, "topk_weights are torch.float32 (7, 1)"),
    ({"topk_ids": IDS.to(torch.int16)}, "topk_ids are torch.int16"),
    ({"topk_weights": None, "topk_ids": IDS.long()}, "Packed topk_ids must be int32"),
    ({"intermediate_size": 23}, "intermediate_size is 23"),
    ({"local_num_experts": 4}, "local_num_experts is 4, but the weights hold 5"),
    ({"num_experts": 6, "local_expert_offset": 2}, "Local experts 2 to 6 are not among"),
    ({"local_expert_offset": -1}, "Local experts -1 to 3"),
    ({"hidden_states": CASE.x.half()}, "gemm1_weights is torch.float32"),
    ({"hidden_states": CASE.x[:, :39]}, "gemm1_weights has shape (5, 48, 40)"),
    ({"activation_type": "relu2"}, "without a gate"),
    ({"gate_up_lora_delta": torch.zeros(7, 2, 24)}, "gate_up_lora_delta has shape (7, 2, 24)"),
    ({"gate_up_lora_delta": torch.zeros(7, 48, 2).mT}, "it must be contiguous"),
    ({"gate_up_lora_delta": torch.zeros(7, 2, 48, dtype=torch.int32)}, "expected a float dtype"),
    ({"activation_lora_input": torch.zeros(7, 2, 24).half()}, "activation_lora_input is"),
    ({"output": torch.zeros(7, 39)}, "output has shape (7, 39)"),
    ({"output": torch.zeros(40, 7).t()}, "The columns of output are 7 elements apart"),
    ({"output": CASE.x}, "output is hidden_states"),
    ({"output": CASE.x[:]}, "output shares memory with hidden_states"),
    ({"output": torch.zeros(40).expand(7, 40)}, "The rows of output are 0 elements apart"),
    ({"topk_ids": IDS.to("meta")}, "topk_ids is on meta, hidden_states on cpu"),
    ({"topk_weights": WEIGHTS.to("meta")}, "topk_weights is on meta, hidden_states on cpu"),
    ({"topk_ids": IDS[:, :0], "topk_weights": WEIGHTS[:, :0]}, "(7, 0): no expert per token"),
    ({"gemm1_weights": GEMM1[:0], "gemm2_weights": GEMM2[:0]}, "at least one expert"),
    ({"do_finalize": False, "routed_scaling_factor": 2.0}, "give output and"),
    ({"lora_ready_event": 4096}, "lora_ready_event is given, but the tensors are on cpu"),
    ({"gemm2_done_event": 4096}, "gemm2_done_event is given, but the tensors are on cpu"),
]


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED, ids=[m for _, m in UNSUPPORTED])
def test_what_has_no_implementation_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        call(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[m for _, m in WRONG])
def test_arguments_that_disagree_are_refused_with_both_numbers(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(MoegraftError) as caught:
        call(**changes)
    assert message in str(caught.value)


def test_an_unknown_backend_is_refused() -> None:
    rows = call(do_finalize=False)
    with pytest.raises(PlanError, match="There is no backend 'cuda'"):
        call(backend="cuda")
    with pytest.raises(PlanError, match="There is no backend 'cuda'"):
        ops.finalize_moe_lora(*rows, backend="cuda")


def test_the_sums_refuse_what_does_not_fit() -> None:
    rows, weights, index = call(do_finalize=False)
    with pytest.raises(MoegraftError, match="down_delta has shape"):
        ops.finalize_moe_lora(rows, weights, index, torch.zeros(7, 2, 39))
    with pytest.raises(MoegraftError, match="expected int32 or int64"):
        ops.finalize_moe_lora(rows, weights, index.float())
    with pytest.raises(MoegraftError, match=r"rows .* must be"):
        ops.finalize_moe_lora(rows[0], weights, index)
    with pytest.raises(MoegraftError, match="expanded_idx_to_permuted_idx has shape"):
        ops.finalize_moe_lora(rows, weights, index[:3])
    out = torch.zeros(7, 40)
    with pytest.raises(MoegraftError, match="down_delta has shape"):
        ops.add_down_delta(out, torch.zeros(6, 2, 40))
    with pytest.raises(MoegraftError, match="summed already"):
        ops.add_down_delta(out, torch.zeros(7, 40), IDS)
    with pytest.raises(MoegraftError, match=r"topk_ids are torch\.float32"):
        ops.add_down_delta(out, torch.zeros(7, 2, 40), WEIGHTS)
    with pytest.raises(MoegraftError, match="must be"):
        ops.add_down_delta(out[0], torch.zeros(7, 40))
    with pytest.raises(MoegraftError, match="no expert per token"):
        ops.finalize_moe_lora(rows, weights[:, :0], index[:0])
    with pytest.raises(MoegraftError, match="no range of expert ids"):
        ops.add_down_delta(out, torch.zeros(7, 2, 40), IDS, local_expert_offset=-1)


def test_the_sums_say_where_the_triton_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.backends.triton.device.is_interpreted", lambda: False)
    with pytest.raises(PlanError, match="on cpu, this backend runs on NVIDIA GPUs"):
        ops.finalize_moe_lora(*call(do_finalize=False), backend="triton")
    with pytest.raises(PlanError, match="on cpu, this backend runs on NVIDIA GPUs"):
        ops.add_down_delta(torch.zeros(7, 40), torch.zeros(7, 40), backend="triton")


def test_what_is_written_may_not_lie_in_what_is_read() -> None:
    rows, weights, index = call(do_finalize=False)
    with pytest.raises(MoegraftError, match="out shares memory with rows"):
        ops.finalize_moe_lora(rows, weights, index, out=rows[:7])
    delta = torch.zeros(7, 2, 40)
    with pytest.raises(MoegraftError, match="output shares memory with down_delta"):
        ops.add_down_delta(delta[:, 1], delta)
    with pytest.raises(MoegraftError, match="out shares memory with x"):
        ops.moe_lora(CASE.x, IDS, WEIGHTS, CASE.weights, out=CASE.x[:])
    memory = torch.zeros(CASE.x.numel())
    inside = memory[: WEIGHTS.numel()].view(WEIGHTS.shape).copy_(WEIGHTS)
    with pytest.raises(MoegraftError, match="out shares memory with topk_weights"):
        ops.moe_lora(CASE.x, IDS, inside, CASE.weights, out=memory.view(CASE.x.shape))
    memory = torch.zeros(7 * 2 * 48)
    with pytest.raises(MoegraftError, match="activation_lora_input shares memory with gate_up_"):
        call(
            gate_up_lora_delta=memory.view(7, 2, 48),
            activation_lora_input=memory[-7 * 2 * 24 :].view(7, 2, 24),
        )


def test_columns_beside_what_is_read_may_be_written() -> None:
    both = torch.cat([CASE.x, torch.zeros(7, 40)], 1)
    found = call(hidden_states=both[:, :40], output=both[:, 40:])
    torch.testing.assert_close(found, call())
    with pytest.raises(MoegraftError, match="shares memory"):
        call(hidden_states=both[:, :40], output=both[:, 39:79])


def test_moe_lora_refuses_what_does_not_fit() -> None:
    args = (CASE.x, IDS, WEIGHTS, CASE.weights, CASE.table())
    with pytest.raises(MoegraftError, match="slot 9"):
        ops.moe_lora(*args, torch.full((7,), 9))
    with pytest.raises(MoegraftError, match="7 tokens but 6"):
        ops.moe_lora(*args, torch.zeros(6, dtype=torch.int32))
    with pytest.raises(MoegraftError, match=r"token_slots are torch\.float32"):
        ops.moe_lora(*args, torch.zeros(7))
    with pytest.raises(MoegraftError, match="out is x"):
        ops.moe_lora(*args, out=CASE.x)
    with pytest.raises(PlanError, match="is for GPUs"):
        ops.moe_lora(*args, mode="in_kernel", backend="cpu")
    wrong: Any = "in_kernal"
    with pytest.raises(PlanError, match="no mode 'in_kernal'; choose one of in_kernel, fused_"):
        ops.moe_lora(*args, mode=wrong)
    with pytest.raises(MoegraftError, match="expert_offset=-1 is below 0"):
        ops.moe_lora(*args, expert_offset=-1)
    numbers: Any = [0] * 7
    with pytest.raises(MoegraftError, match=r"a list; pass TokenSlots\.of"):
        ops.moe_lora(*args, numbers)
    other = ops_case(num_experts=4).table()
    with pytest.raises(MoegraftError, match="The factor table is for 4 experts"):
        ops.moe_lora(*args[:-1], other)


@pytest.mark.parametrize("number", [None, 0, 1, 2, 4, 5])
def test_routing_methods_that_mean_a_weighted_sum_are_taken(number: int | None) -> None:
    assert torch.equal(call(routing_method_type=number), call())


@pytest.mark.parametrize("name", [3, "swiglu", Activation("silu")])
def test_an_activation_by_number_name_or_object_is_the_same(name: Any) -> None:
    assert torch.equal(call(activation_type=name), call())


def test_packing_keeps_ids_and_rounds_weights_to_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 2**15, (64, 9), generator=generator, dtype=torch.int64)
    weights = torch.randn(64, 9, generator=generator) * torch.logspace(-30, 30, 9)
    weights[0] = torch.tensor([0.0, -0.0, 1.0, 1.00390625, 1.01171875, -1.5, 3e38, 1e-40, 0.1])
    back, found = ops.unpack_topk(ops.pack_topk(ids, weights))
    assert torch.equal(back, ids.to(torch.int32))
    assert torch.equal(found.view(torch.int32), weights.bfloat16().float().view(torch.int32))
    assert ops.pack_topk(torch.tensor([3]), torch.tensor([1.0])).item() == 0x00033F80


def test_packing_makes_ids_that_do_not_fit_minus_one() -> None:
    ids = torch.tensor([-7, 32767, 32768, 65535 + 5, 2**40 + 3])
    back, _ = ops.unpack_topk(ops.pack_topk(ids, torch.ones(5)))
    assert back.tolist() == [-1, 32767, -1, -1, -1]


def test_a_packed_tensor_may_be_strided() -> None:
    packed = ops.pack_topk(IDS, WEIGHTS)
    wide = torch.zeros(7, 4, dtype=torch.int32)
    wide[:, ::2] = packed
    back, weights = ops.unpack_topk(wide[:, ::2])
    assert torch.equal(back, IDS) and torch.equal(weights, WEIGHTS)


def test_packing_refuses_what_does_not_fit() -> None:
    with pytest.raises(MoegraftError, match="differ"):
        ops.pack_topk(IDS, WEIGHTS[:3])
    with pytest.raises(MoegraftError, match="expected int32 or int64, and float"):
        ops.pack_topk(IDS, IDS)
    with pytest.raises(MoegraftError, match="Packed topk_ids must be int32"):
        ops.unpack_topk(IDS.long())


def test_a_table_that_fits_does_not_let_another_pass() -> None:
    weights, slots = CASE.weights, CASE.slots()
    right, other = CASE.table(), ops_case(intermediate=32).table()
    for _ in range(2):
        ops.moe_lora(CASE.x, IDS, WEIGHTS, weights, right, slots)
        with pytest.raises(MoegraftError, match="factor table is for 5 experts"):
            ops.moe_lora(CASE.x, IDS, WEIGHTS, weights, other, slots)


def test_weights_keep_their_plans_for_each_backend_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = CASE.weights
    ops.moe_lora(CASE.x, IDS, WEIGHTS, weights)
    with pytest.raises(PlanError, match="abacus"):
        ops.moe_lora(CASE.x, IDS, WEIGHTS, weights, backend="abacus")
    monkeypatch.setenv("MOEGRAFT_BACKEND", "abacus")
    with pytest.raises(PlanError, match="abacus"):
        ops.moe_lora(CASE.x, IDS, WEIGHTS, weights)


@pytest.mark.parametrize("window", [slice(0, 40), slice(39, 79), slice(40, 80)])
def test_columns_of_one_tensor_may_be_written_beside_others_alone(window: slice) -> None:
    whole = torch.zeros(CASE.x.shape[0], 80)
    x, out = whole[:, :40].copy_(CASE.x), whole[:, window]
    if window.start == 40:
        expected = ops.moe_lora(CASE.x, IDS, WEIGHTS, CASE.weights)
        assert torch.equal(ops.moe_lora(x, IDS, WEIGHTS, CASE.weights, out=out), expected)
    else:
        with pytest.raises(MoegraftError, match="out shares memory with x"):
            ops.moe_lora(x, IDS, WEIGHTS, CASE.weights, out=out)


def test_copies_of_weights_leave_behind_what_was_derived_from_them() -> None:
    weights = CASE.weights
    weights.cache["a kernel"] = ctypes.c_void_p(3)  # can't be copied
    for copied in (copy.deepcopy(weights), copy.copy(weights), pickle.loads(pickle.dumps(weights))):
        assert torch.equal(copied.down, weights.down)
    assert "a kernel" not in copy.deepcopy(weights).cache
    del weights.cache["a kernel"]
