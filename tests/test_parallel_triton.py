"""Shares of a layer on the Triton backend (its interpreter) add up to the layer."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

import parallel_cases as cases
from moegraft.parallel import ExpertPlacement, ExpertShard, Part, PartialMoe, shard_experts
from moegraft.testing import assert_bit_equal, poisoned_empty
from moegraft.types import TokenSlots
from parallel_cases import Spec

SPEC = Spec(((0,),), 1, num_experts=6, num_tokens=7, biases=True, scale=2.5)


def shares(round_robin: bool, tp: int) -> list[ExpertShard]:
    """Two ranks of experts times ``tp`` slices of each."""
    deal = ExpertPlacement.round_robin if round_robin else ExpertPlacement.contiguous
    return [
        ExpertShard(deal(SPEC.num_experts, rank, 2), Part.of(SPEC.intermediate, column, tp))
        for rank in range(2)
        for column in range(tp)
    ]


@pytest.mark.parametrize(("round_robin", "tp"), [(False, 1), (True, 1), (False, 2)])
def test_partial_sums_of_all_ranks_are_the_layer(round_robin: bool, tp: int) -> None:
    case = cases.case_of(SPEC)
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights)
    total, base = torch.zeros_like(case.x), torch.zeros_like(case.x)
    for shard in shares(round_robin, tp):
        layer = PartialMoe(
            shard,
            shard_experts(case.weights, shard),
            cases.local_table(case, shard),
            routed_scaling_factor=SPEC.scale,
            backend="triton",
        )
        out = torch.full_like(case.x, float("nan"))
        with poisoned_empty():
            assert layer(*args, case.slots(), out=out) is out
            base += layer(*args)
        total += out
        # What a graph holds decides nothing by the live slots, and has the same bits.
        held = TokenSlots.captured(case.slots().slots)
        assert_bit_equal(layer(*args, held), out)
        nothing = (case.x[:0], case.routing.topk_ids[:0], case.routing.topk_weights[:0])
        assert layer(*nothing, TokenSlots.of([])).shape == (0, SPEC.hidden)
    cases.check(case, total, base)
