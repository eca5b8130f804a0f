"""The compiled CPU kernels, in every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import compiled
import moegraft.backends.cpp as cpp
from cpu_layer import DTYPES, mixed_adapters
from moegraft.backends.cpp.instructions import InstructionSet, available
from moegraft.backends.cpp.library import Library
from moegraft.backends.cpu import CpuStages
from moegraft.backends.cpu.grouped import ALL_ROWS
from moegraft.call import LayerCall
from moegraft.errors import MoegraftError
from moegraft.factor_table import site_table
from moegraft.layer import run_stages
from moegraft.linear import LinearLora
from moegraft.ops import moe_lora
from moegraft.reference import linear_lora_reference
from moegraft.sites import expert_site, linear_site
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_bit_equal,
    assert_case,
    assert_close,
    layer_case,
    random_activations,
    random_factors,
    relative_error,
)
from moegraft.types import TokenSlots


@cache
def library(instructions: InstructionSet) -> Library:
    """One library per instruction set for all tests."""
    return Library(instructions)


#: What is left without intrinsics: the source that ARM64 compiles.
PLAIN = InstructionSet("plain", frozenset(), ())


@pytest.fixture(params=[*available(), PLAIN], ids=lambda found: found.name)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force the compiled kernels, in one instruction set."""
    compiled.require()
    found = library(request.param)
    monkeypatch.setenv("MOEGRAFT_BACKEND", "cpp")
    monkeypatch.setattr(cpp, "best_library", lambda: found)
    return str(request.param.name)


@pytest.fixture
def threads() -> Iterator[None]:
    """Put torch's number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def wide_case(num_tokens: int, dtype: torch.dtype, layout: str = "gate_first") -> LayerCase:
    """Sizes that are no multiple of a vector, a tile or a block of columns, and cross all three."""
    site = expert_site("experts", 5, 136, 203, LAYOUTS[layout])
    return layer_case(
        num_tokens,
        mixed_adapters(site, dtype),
        [-1, 0, 1, 2, 3, 4],
        hidden=136,
        intermediate=203,
        layout=LAYOUTS[layout],
        activation=ACTIVATIONS["relu2" if layout.startswith("no_gate") else "silu"],
        biases=True,
        minus_ones=0.1,
        scale=2.5,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 150])
def test_every_layout_agrees_with_the_reference(
    num_tokens: int, layout: str, dtype: torch.dtype, instructions: str
) -> None:
    assert_case(wide_case(num_tokens, dtype, layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "custom"])
def test_every_activation_agrees_with_the_reference(
    activation: str, dtype: torch.dtype, instructions: str
) -> None:
    case = wide_case(9, dtype)
    weights = replace(case.weights, activation=ACTIVATIONS[activation])
    # Far into the tails on both sides.
    assert_case(replace(case, weights=weights, x=case.x * 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["gate_first", "interleaved_in_major"])
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_threads(
    layout: str, dtype: torch.dtype, instructions: str, threads: None
) -> None:
    case = wide_case(150, dtype, layout)
    layer, routing, slots = case.layer(), case.routing, list(case.token_slots)
    torch.set_num_threads(1)
    together = case.run(layer)
    torch.set_num_threads(2)
    assert_bit_equal(case.run(layer), together, "two threads")
    for first, last in ((0, 1), (3, 5), (60, 67), (100, 149)):
        part = layer(
            case.x[first:last],
            routing.topk_ids[first:last],
            routing.topk_weights[first:last],
            TokenSlots.of(slots[first:last]),
        )
        assert_bit_equal(part, together[first:last], f"rows {first} to {last}")


def test_more_pairs_than_are_worked_on_at_once(instructions: str) -> None:
    site = expert_site("experts", 5, 8, 12)
    adapters = mixed_adapters(site, torch.float32)
    case = layer_case(5000, adapters, [1, 2, -1, 3, 0, 4], hidden=8, intermediate=12)
    layer, routing, slots = case.layer(), case.routing, list(case.token_slots)
    parts = [
        layer(
            case.x[first : first + 1000],
            routing.topk_ids[first : first + 1000],
            routing.topk_weights[first : first + 1000],
            TokenSlots.of(slots[first : first + 1000]),
        )
        for first in range(0, 5000, 1000)
    ]
    assert_bit_equal(case.run(layer), torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_path_is_less_accurate_than_torchs_own_products(
    dtype: torch.dtype, instructions: str
) -> None:
    case = replace(wide_case(150, dtype), token_slots=(-1,) * 150, scale=1.0)
    case = replace(case, weights=replace(case.weights, gate_up_bias=None, down_bias=None))
    routing = case.routing
    wanted = case.reference()
    torchs = relative_error(_eager(case), wanted)
    assert relative_error(case.run(), wanted) <= 1.05 * torchs
    for rows in (0, 4, ALL_ROWS):
        call = LayerCall(case.x, routing.topk_ids, routing.topk_weights, case.weights)
        found = run_stages(CpuStages("segments", own_dtype_rows=rows), call)
        assert relative_error(found, wanted) <= 1.05 * torchs, rows


def _eager(case: LayerCase) -> torch.Tensor:
    """What transformers' eager experts compute, in the case's dtype."""
    out = torch.zeros_like(case.x)
    for e in range(case.weights.num_experts):
        token, choice = torch.where(case.routing.topk_ids == e)
        gate, up = F.linear(case.x[token], case.weights.gate_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, case.weights.down[e])
        weighted = y * case.routing.topk_weights[token, choice, None]
        out.index_add_(0, token, weighted.to(out.dtype))
    return out


def test_tensors_may_be_strided_in_any_way(instructions: str) -> None:
    case = wide_case(9, torch.float32)
    whole = case.run()
    spread = torch.zeros(9, 272)
    spread[:, ::2] = case.x
    weights = case.weights
    odd = replace(
        weights,
        gate_up=weights.gate_up.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        down=torch.stack([weights.down, weights.down], dim=3)[..., 0],
    )
    other = replace(case, x=spread[:, ::2], weights=odd)
    assert_close(other.run(), whole, torch.float32)
    layer, routing = case.layer(), case.routing
    out = torch.zeros(9, 272)
    call = LayerCall(
        case.x, routing.topk_ids, routing.topk_weights, weights, layer.table, case.slots(),
        scale=2.5, out=out[:, ::2],
    )  # fmt: skip
    run = layer.plan(9, 2).run
    assert run is not None
    assert_bit_equal(run(call), whole)
    assert_bit_equal(out[:, ::2].contiguous(), whole)
    assert not bool(out[:, 1::2].any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 200])
def test_linears_of_odd_sizes_and_strides(
    num_tokens: int, dtype: torch.dtype, instructions: str
) -> None:
    site = linear_site("q_proj", 203, 1027)
    adapters = [random_factors(site, rank, seed=rank, dtype=dtype) for rank in (1, 20, 5)]
    linear = LinearLora(site_table(site, [*adapters, None], dtype), dtype, torch.device("cpu"))
    slots = [(t % 5) - 1 for t in range(num_tokens)]
    x = random_activations(num_tokens, 406, dtype)[:, ::2]
    packed = random_activations(num_tokens, 2054, dtype, seed=1)
    base = packed.clone()
    linear.add_to(packed[:, 1027:], x, TokenSlots.of(slots))
    delta = linear_lora_reference(x, [*adapters, None], slots, 1027, torch.float64)
    assert_close(packed[:, 1027:], base[:, 1027:].double() + delta, dtype)
    assert_bit_equal(packed[:, :1027], base[:, :1027], "the columns beside")
    columns = base.clone().t().contiguous().t()
    linear.add_to(columns[:, 1027:], x, TokenSlots.of(slots))
    assert_bit_equal(columns.contiguous(), packed, "by columns")


def odd_case() -> LayerCase:
    return layer_case(
        9, mixed_adapters(expert_site("experts", 5, 24, 20), torch.float32), [-1, 0, 1, 2, 3, 4]
    )


def test_views_that_torch_negates_when_read_are_right_or_refused() -> None:
    compiled.require()
    case = odd_case()
    table, slots, ids = case.table(), case.slots(), case.routing.topk_ids
    wanted = case.run(case.layer("cpp"))
    out = torch._neg_view(torch.zeros_like(case.x))
    x, weights = torch._neg_view(-case.x), torch._neg_view(-case.routing.topk_weights)
    options: dict[str, Any] = {"routed_scaling_factor": case.scale, "backend": "cpp"}
    moe_lora(x, ids, weights, case.weights, table, slots, out=out, **options)
    assert_bit_equal(out.resolve_neg(), wanted, "negated views")
    negated = replace(case.weights, down=torch._neg_view(-case.weights.down))
    with pytest.raises(MoegraftError, match=r"resolve_neg\(\)"):
        moe_lora(case.x, ids, case.routing.topk_weights, negated, table, slots, **options)


def test_slots_of_a_graph_are_refused() -> None:
    """Nobody has looked at their numbers, and here they would be taken for addresses."""
    compiled.require()
    case = odd_case()
    unknown = TokenSlots.captured(torch.full((9,), 1 << 30, dtype=torch.int32))
    routing = case.routing
    with pytest.raises(MoegraftError, match=r"TokenSlots\.of on the CPU"):
        case.layer("cpp")(case.x, routing.topk_ids, routing.topk_weights, unknown)
