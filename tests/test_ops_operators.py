"""The operators as torch sees them: schemas, fake tensors, and whole graphs in torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moegraft import ops
from moegraft.ops.moe_lora import format_arguments
from moegraft.testing import LayerCase, assert_close
from moegraft.types import TokenSlots, WeightLayout
from ops_cases import BACKENDS, HostDelta, ops_case

on_both = pytest.mark.parametrize("backend", BACKENDS)
CASES = {
    "mixed": {"num_tokens": 5, "scale": 1.5},
    "one token": {"num_tokens": 1, "minus_ones": 0.0},
    "no token": {"num_tokens": 0, "minus_ones": 0.0},
    "up first, half": {"layout": WeightLayout("up_first"), "dtype": torch.float16},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compiled code of one test is not another's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def routed_args(case: LayerCase, backend: str, lora: bool = True) -> tuple[Any, ...]:
    """The operator's arguments up to the outputs, without the scaling factor."""
    w = case.weights
    delta = HostDelta.of(case).gate_up.nan_to_num().flatten(0, 1) if lora else None
    return (
        case.x, case.routing.topk_ids, case.routing.topk_weights, w.gate_up, w.down,
        *format_arguments(w), delta, w.layout.gate_up_order, "silu", None, 1.0, 0.0,
        case.expert_offset,
    )  # fmt: skip


@on_both
@pytest.mark.parametrize("name", CASES)
def test_opcheck_finds_nothing_in_any_operator(name: str, backend: str) -> None:
    case = ops_case(**CASES[name])
    pairs, w = case.routing.topk_ids.numel(), case.weights
    end = (0, 0, True, backend)
    for lora in (True, False):
        args = routed_args(case, backend, lora)
        h = case.x.new_zeros(pairs, w.intermediate) if lora else None
        op = torch.ops.moegraft.routed_moe_lora
        torch.library.opcheck(op, (*args, 1.5, *end, torch.zeros_like(case.x), h))
        rows = case.x.new_zeros(pairs, w.hidden)
        index = torch.zeros(pairs, dtype=torch.int32)
        op = torch.ops.moegraft.routed_moe_lora_rows
        torch.library.opcheck(op, (*args, *end, rows, index, h))
        op(*args, *end, rows, index, h)
        delta = torch.ones(*case.routing.topk_ids.shape, w.hidden) if lora else None
        args = (rows, case.routing.topk_weights, index, delta, 1.5, backend)
        op = torch.ops.moegraft.finalize_moe_lora
        torch.library.opcheck(op, (*args, torch.zeros_like(case.x)))
        ids = case.routing.topk_ids if lora else None
        delta = torch.ones(*case.routing.topk_ids.shape, w.hidden)
        op = torch.ops.moegraft.add_down_delta
        torch.library.opcheck(op, (torch.zeros_like(case.x), delta, ids, 0, 5, 1.5, backend))


@on_both
@pytest.mark.parametrize("name", CASES)
def test_opcheck_finds_nothing_in_the_whole_layer(name: str, backend: str) -> None:
    case = ops_case(**CASES[name])
    table, w, slots = case.table(), case.weights, case.slots()
    assert table.expert_map is not None
    args = (
        case.x, case.routing.topk_ids, case.routing.topk_weights, w.gate_up, w.down,
        *format_arguments(w), None, None, table.arena.data, table.records, table.expert_map,
        slots.slots, list(slots.live), False, w.layout.gate_up_order, True, "silu", None, 1.0, 0.0,
        table.max_rank, 0, 1.5, "", backend,
        torch.zeros_like(case.x),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.moegraft.moe_lora, args)


def compiled(function: Callable[..., torch.Tensor], backend: str) -> Callable[..., torch.Tensor]:
    """Compile into one graph or fail."""
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_the_routed_op_is_one_graph_in_torch_compile(compiler: str) -> None:
    case = ops_case(scale=1.5)
    delta = HostDelta.of(case)
    packed = ops.pack_topk(case.routing.topk_ids, case.routing.topk_weights)
    shape = (*packed.shape, case.weights.intermediate)

    def step(x: torch.Tensor, packed: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        h = x.new_empty(shape)
        rows = ops.routed_moe_lora(
            packed,
            2 * x,
            case.weights.gate_up,
            case.weights.down,
            gate_up_lora_delta=2 * delta,
            activation_lora_input=h,
            do_finalize=False,
        )
        out = ops.finalize_moe_lora(*rows, down_delta=h @ down, routed_scaling_factor=1.5)
        ids, weights = ops.unpack_topk(packed)
        return ops.add_down_delta(out, weights[:, :, None] * (h @ down), ids) + 1

    down = torch.randn(case.weights.intermediate, case.weights.hidden)
    wanted = step(case.x, packed, delta.gate_up)
    found = compiled(step, compiler)(case.x, packed, delta.gate_up)
    assert_close(found, wanted.double(), torch.float32)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_the_whole_layer_is_one_graph_in_torch_compile(compiler: str) -> None:
    case = ops_case(scale=1.5)
    table, slots = case.table(), case.slots()
    routing, table = case.routing, case.table()

    def step(x: torch.Tensor, slots: TokenSlots) -> torch.Tensor:
        args = (2 * x, routing.topk_ids, routing.topk_weights, case.weights, table, slots)
        return ops.moe_lora(*args, routed_scaling_factor=1.5) + 1

    wanted = step(case.x, slots)
    assert_close(compiled(step, compiler)(case.x, slots), wanted.double(), torch.float32)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_layer_without_adapters_is_one_graph_too(compiler: str) -> None:
    case = ops_case(biases=True, layout=WeightLayout("interleaved", False))
    routing, table = case.routing, case.table()

    def step(x: torch.Tensor) -> torch.Tensor:
        args = (2 * x, routing.topk_ids, routing.topk_weights, case.weights)
        return ops.moe_lora(*args) + ops.moe_lora(*args, table, None)

    assert_close(compiled(step, compiler)(case.x), step(case.x).double(), torch.float32)


def test_weights_with_gradients_and_inference_mode_are_taken() -> None:
    case = ops_case()
    w, routing = case.weights, case.routing
    params = [torch.nn.Parameter(w.gate_up), torch.nn.Parameter(w.down)]
    args = (routing.topk_ids, case.x, *params)
    found = ops.routed_moe_lora(*args, topk_weights=routing.topk_weights)
    assert isinstance(found, torch.Tensor) and not found.requires_grad
    with torch.inference_mode():
        again = ops.routed_moe_lora(*args, topk_weights=routing.topk_weights)
    assert_close(again, found.double(), torch.float32)


def test_a_captured_batch_in_torch_compile_reads_its_slots_at_run_time() -> None:
    case = ops_case(scale=1.5)
    table, routing = case.table(), case.routing
    buffer = torch.full((7,), -1, dtype=torch.int32)

    def step(x: torch.Tensor, slots: TokenSlots) -> torch.Tensor:
        args = (x, routing.topk_ids, routing.topk_weights, case.weights, table, slots)
        return ops.moe_lora(*args, routed_scaling_factor=1.5, backend="triton") * 1

    pytest.importorskip("triton")
    run = compiled(step, "aot_eager")
    assert_close(run(case.x, TokenSlots.captured(buffer)), case.reference(base=True), torch.float32)
    buffer.copy_(case.slots().slots)
    assert_close(run(case.x, TokenSlots.captured(buffer)), case.reference(), torch.float32)
