"""Kinds of fault in what a layer is called with, on both backends; see ``docs/field-faults.md``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraft.errors import MoegraftError
from moegraft.testing import assert_bit_equal, assert_close
from moegraft.types import TokenSlots
from ops_cases import BACKENDS, check_case, interpreted, ops_case, routed, run_case

on_both = pytest.mark.parametrize("backend", BACKENDS)
on_kernels = pytest.mark.parametrize("backend", [pytest.param("triton", marks=interpreted)])


@on_both
def test_ids_of_any_size_and_dtype_that_are_no_expert_contribute_nothing(backend: str) -> None:
    case = ops_case(6, minus_ones=0.0)
    wild = torch.tensor([5, -2, 2**31 - 1, -(2**31), 6, 1000], dtype=torch.int64)
    huge = torch.tensor([2**32, 2**32 + 3, 2**40 + 1, -(2**63), 2**63 - 1, -(2**32) + 2])
    for ids in (wild, wild.int(), huge):
        routing = replace(case.routing, topk_ids=case.routing.topk_ids.to(ids.dtype).clone())
        routing.topk_ids[:, 1] = ids
        routing.topk_weights[:, 1] = torch.nan
        odd = replace(case, routing=routing)
        dropped = replace(
            routing, topk_ids=torch.where(torch.tensor([True, False]), routing.topk_ids, -1)
        )
        assert_bit_equal(run_case(odd, backend), run_case(replace(case, routing=dropped), backend))
        assert_close(run_case(odd, backend), odd.reference(), torch.float32)


@on_both
def test_the_same_expert_twice_for_one_token_counts_twice(backend: str) -> None:
    case = ops_case(5, minus_ones=0.0)
    case.routing.topk_ids[:, 1] = case.routing.topk_ids[:, 0]
    check_case(case, backend)


@on_both
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_no_tokens_and_no_local_pair_give_zeros_and_no_error(num_tokens: int, backend: str) -> None:
    case = ops_case(num_tokens, minus_ones=0.0)
    case.routing.topk_ids.fill_(-1)
    for slots in ("case", None):
        found = run_case(case, backend, slots)
        assert found.shape == (num_tokens, 40) and bool((found == 0).all())
        assert bool((routed(case, backend=backend) == 0).all())


@on_both
def test_slots_past_the_table_are_refused_and_below_zero_are_the_base(backend: str) -> None:
    case = ops_case(5)
    base = run_case(case, backend, None)
    assert_bit_equal(run_case(case, backend, TokenSlots.of([-7, -(2**31), -1, -2, -1])), base)
    for slot in (4, 2**31 - 1):
        with pytest.raises(MoegraftError, match=f"slot {slot}, the factor table has 4 slots"):
            run_case(case, backend, TokenSlots.of([0, slot, -1, -1, -1]))
    with pytest.raises(MoegraftError, match="slot 2147483647"):
        run_case(case, backend, TokenSlots.of(torch.tensor([0, 2**32 + 1, -1, -1, -1])))


@on_kernels
def test_garbage_in_a_captured_slot_changes_only_its_own_row(backend: str) -> None:
    case = ops_case(40, minus_ones=0.0)
    slots = case.slots().slots.clone()
    rows = torch.tensor([0, 3, 7, 8, 20])
    slots[rows] = -1
    good = run_case(case, backend, TokenSlots.captured(slots.clone()))
    slots[rows] = torch.tensor([70_000, 2**31 - 1, -(2**31), -5, 65_536], dtype=torch.int32)
    assert_bit_equal(run_case(case, backend, TokenSlots.captured(slots)), good)


@on_both
def test_slots_that_kernels_would_misread_are_refused_or_copied(backend: str) -> None:
    case = ops_case(5)
    wide = torch.full((5, 2), -1, dtype=torch.int32)
    wide[:, 0] = torch.tensor(case.token_slots)
    assert_bit_equal(run_case(case, backend, TokenSlots.of(wide[:, 0])), run_case(case, backend))
    for slots in (wide[:, 0], wide[:, 0].contiguous().long()):
        with pytest.raises(MoegraftError, match=r"TokenSlots\.of makes contiguous int32 ones"):
            run_case(case, backend, TokenSlots(slots, (0, 1, 2, 3)))


@on_both
def test_inputs_that_are_strided_repeated_or_of_other_dtypes_are_read_right(backend: str) -> None:
    case = ops_case(6, biases=True)
    wanted = run_case(case, backend)
    ids, weights = case.routing.topk_ids, case.routing.topk_weights
    routing = replace(
        case.routing,
        topk_ids=ids.long().t().contiguous().t(),
        topk_weights=weights.double().repeat(1, 2)[:, :2],
    )
    strided = replace(
        case,
        x=case.x.t().contiguous().t(),
        routing=routing,
        weights=replace(
            case.weights,
            gate_up=case.weights.gate_up.repeat(1, 1, 2)[:, :, :40],
            gate_up_bias=case.weights.gate_up_bias.t().contiguous().t(),  # type: ignore[union-attr]
            down_bias=case.weights.down_bias.repeat_interleave(2, 1)[:, ::2],  # type: ignore[union-attr]
        ),
    )
    assert_bit_equal(run_case(strided, backend), wanted)
    same = replace(case, x=case.x[:1].expand(6, 40))
    assert_bit_equal(
        run_case(same, backend), run_case(replace(same, x=same.x.contiguous()), backend)
    )


@on_both
def test_activations_of_another_dtype_than_the_weights(backend: str) -> None:
    case = ops_case(5)
    half = replace(case, x=case.x.half())
    found = run_case(half, backend, table=case.table())
    assert_close(found, half.reference(), torch.float16)
