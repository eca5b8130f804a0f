"""MoE layers over 2 and 4 gloo processes equal the layer in one process, adapters mixed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import parallel_cases as cases
from moegraft.errors import MoegraftError
from moegraft.parallel import (
    AllReduceMoe,
    AllToAllMoe,
    ExpertParallel,
    ExpertPlacement,
    MoeGroups,
    shard_experts,
)
from moegraft.testing import LAYOUTS, assert_bit_equal
from moegraft.types import TokenSlots
from parallel_cases import Spec
from ranks import shared

ALL = ((0, 1, 2, 3),)
TWO = ((0, 1), (2, 3))
EVERY_OTHER = ((0, 2), (1, 3))

SPECS = {
    "ep2": Spec(TWO, 2),
    "ep2 of ranks 0 and 2": Spec(EVERY_OTHER, 2),
    "ep4": Spec(ALL, 4),
    "ep4 round robin": Spec(ALL, 4, "round_robin"),
    "ep4 uneven, 10 experts": Spec(ALL, 4, num_experts=10),
    "ep4 uneven, 10 experts round robin": Spec(ALL, 4, "round_robin", num_experts=10),
    "ep4 counts 1, 1, 1, 7": Spec(ALL, 4, "counts", num_experts=10),
    "ep4 any map": Spec(ALL, 4, "shuffled", num_experts=10),
    "tp2": Spec(TWO, 1),
    "tp4": Spec(ALL, 1),
    "tp4, I=31": Spec(ALL, 1, intermediate=31),
    "tp2 x ep2": Spec(ALL, 2),
    "tp2 x ep2, any map": Spec(ALL, 2, "shuffled", num_experts=7),
    "tp2 x ep2, biases and a scale": Spec(ALL, 2, biases=True, scale=2.5),
    "ep4, biases and a scale": Spec(ALL, 4, biases=True, scale=2.5),
    "tp2 x ep2, bf16": Spec(ALL, 2, dtype=torch.bfloat16, biases=True, hidden=40),
    "ep4 round robin, bf16": Spec(ALL, 4, "round_robin", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_all_reduce_equals_one_process(spec: Spec) -> None:
    shared(4).run(cases.all_reduce_equals_one_process, spec)


@pytest.mark.parametrize("name", ["ep4", "ep4 any map", "tp2 x ep2, biases and a scale"])
@pytest.mark.parametrize("tokens", [(6, 6, 6, 5), (0, 12, 11, 0), (0, 0, 0, 23)])
def test_all_to_all_equals_one_process_with_any_tokens_per_rank(
    name: str, tokens: tuple[int, ...]
) -> None:
    shared(4).run(cases.all_to_all_equals_one_process, SPECS[name], tokens)


def test_all_to_all_in_bf16_equals_one_process() -> None:
    spec = Spec(ALL, 4, dtype=torch.bfloat16, hidden=40)
    shared(4).run(cases.all_to_all_equals_one_process, spec, (10, 0, 3, 10))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_the_weights_is_sliced_over_i(name: str) -> None:
    spec = Spec(ALL, 2, layout=LAYOUTS[name], biases=True, intermediate=22)
    shared(4).run(cases.all_reduce_equals_one_process, spec)


@pytest.mark.parametrize("seed", range(20))
def test_random_layers_over_four_ranks(seed: int) -> None:
    run_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 200))
def test_more_random_layers_over_four_ranks(seed: int) -> None:
    run_random(seed)


def run_random(seed: int) -> None:
    """One random layer, combined both ways."""
    spec = cases.random_spec(seed, 4)
    print(f"repeat: run_random({seed}) in test_parallel_layer.py: {spec}")
    shared(4).run(cases.all_reduce_equals_one_process, spec)
    cuts = sorted(random.Random(seed).choices(range(spec.num_tokens + 1), k=spec.ep_size - 1))
    edges = [0, *cuts, spec.num_tokens]
    tokens = tuple(b - a for a, b in itertools.pairwise(edges))
    shared(4).run(cases.all_to_all_equals_one_process, spec, tokens)


def test_no_tokens_on_any_rank() -> None:
    spec = Spec(ALL, 2, num_tokens=0, minus_ones=0.0)
    shared(4).run(cases.all_reduce_equals_one_process, spec)
    shared(4).run(cases.all_to_all_equals_one_process, spec, (0, 0))


def in_a_buffer(rank: int) -> None:
    spec = Spec(ALL, 2)
    case, parallel = cases.case_of(spec), cases.parallel_of(spec)
    weights = shard_experts(case.weights, parallel.shard)
    table = cases.local_table(case, parallel.shard)
    buffer = torch.full((30, spec.hidden), float("nan"))
    sums: list[torch.Size] = []

    def reduce(out: torch.Tensor) -> None:
        sums.append(out.shape)
        torch.distributed.all_reduce(out, group=parallel.groups.whole)

    plain = AllReduceMoe(parallel, weights, table)
    layer = AllReduceMoe(parallel, weights, table, buffer=buffer, reduce=reduce)
    for tokens in (23, 0, 7):
        part = cases.rows_of(case, 0, tokens)
        args = (part.x, part.routing.topk_ids, part.routing.topk_weights, part.slots())
        found = layer(*args)
        assert found.shape == (tokens, spec.hidden)
        assert not tokens or found.data_ptr() == buffer.data_ptr()
        assert_bit_equal(found, plain(*args))
    assert sums == [(23, spec.hidden), (7, spec.hidden)]
    assert bool(buffer[23:].isnan().all())
    big = cases.case_of(Spec(ALL, 2, num_tokens=31))
    try:
        layer(big.x, big.routing.topk_ids, big.routing.topk_weights)
    except MoegraftError as error:
        assert "31 tokens is over the output buffer of 30" in str(error)
    else:
        raise AssertionError("more tokens than the buffer has")


def test_results_stay_at_one_address_and_any_collective_may_add_them() -> None:
    shared(4).run(in_a_buffer)


def with_slots_on_one_rank(rank: int) -> None:
    spec = Spec(ALL, 4)
    case, parallel = cases.case_of(spec), cases.parallel_of(spec)
    layer = AllToAllMoe(
        parallel,
        shard_experts(case.weights, parallel.shard),
        cases.local_table(case, parallel.shard),
    )
    mine = cases.rows_of(case, 5 * rank, 5 * rank + 5)
    args = (mine.x, mine.routing.topk_ids, mine.routing.topk_weights)
    base = layer(*args)
    found = layer(*args, mine.slots() if rank == 1 else None)
    if rank == 1:
        cases.check(mine, found, base)
    else:
        assert_bit_equal(found, base, "rows of a rank without slots")
    # The batch after it carries nothing of it along.
    assert_bit_equal(layer(*args), base, "a base batch after an adapter batch")


def test_rows_that_come_without_a_slot_are_base_rows() -> None:
    shared(4).run(with_slots_on_one_rank)


def refusals(rank: int) -> list[str]:
    """Messages of what a rank is refused; every rank must get the same."""
    found: list[str] = []

    def refused(call: object, *args: object) -> None:
        try:
            call(*args)  # type: ignore[operator]
        except MoegraftError as error:
            found.append(str(error))
        else:
            raise AssertionError(f"{call} took {args}")

    four, both = cases.groups_of(4, ALL), cases.groups_of(2, ALL)
    agree = ExpertParallel.of
    refused(agree, 8, 20, four, ExpertPlacement.contiguous(8, 0, 4))  # all ranks the first two
    refused(agree, 8, 20, both, ExpertPlacement.contiguous(8, rank, 4))  # partners differ
    refused(agree, 8, 20 + rank, four)
    refused(agree, 8 + rank // 2, 20, four, ExpertPlacement.contiguous(8, rank, 4))
    refused(MoeGroups.of, 3)
    refused(MoeGroups.of, 2, [[0, 1], [2]])
    refused(MoeGroups.of, 2, [[1, 0], [2, 3]])
    spec = Spec(ALL, 4)
    case, parallel = cases.case_of(spec), cases.parallel_of(spec)
    weights = shard_experts(case.weights, parallel.shard)
    layer = AllToAllMoe(parallel, weights)
    slots = TokenSlots.captured(torch.zeros(23, dtype=torch.int32))
    refused(layer, case.x, case.routing.topk_ids, case.routing.topk_weights, slots)
    refused(AllReduceMoe, parallel, case.weights)
    narrow = torch.zeros(8, 20)
    refused(lambda: AllReduceMoe(parallel, weights, buffer=narrow))
    refused(agree, 8, 20, four, ExpertPlacement.contiguous(9, rank, 4))
    refused(lambda: MoeGroups(four.whole, both.expert, four.tensor))
    return found


def test_what_ranks_can_not_agree_on_is_refused_on_all_of_them() -> None:
    messages = shared(4).run(refusals)
    assert messages[0] == messages[1] == messages[2] == messages[3]
    for message, part in zip(
        messages[0],
        [
            "Expert 0 is held by expert ranks [0, 1, 2, 3], and would count twice",
            "given different experts; they must hold the same ones",
            "different sizes (E, I): [(8, 20), (8, 21), (8, 22), (8, 23)]",
            "different sizes (E, I): [(8, 20), (9, 20)]",
            "ep_size=3 does not divide the 4 ranks",
            "must hold each of the 4 ranks once",
            "in ascending order",
            "no CUDA graph can hold it",
            "The weights hold 8 experts with I=20, this rank's shard is 2 with I=20",
            "buffer has shape (8, 20); expected [max_tokens, 24]",
            "Expert rank 0 maps 9 experts, the layer has 8",
            "Groups of 2 (expert) times 1 (tensor) ranks are not the 4 ranks of the whole",
        ],
        strict=True,
    ):
        assert part in message


def test_groups_need_a_process_group() -> None:
    with pytest.raises(MoegraftError, match="init_process_group"):
        MoeGroups.of(1)
