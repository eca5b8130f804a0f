"""Buckets, padding and the choice between base and adapters; graphs themselves need a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cpu_layer import mixed_adapters
from moegraft.compile_counter import count_compilations
from moegraft.errors import MoegraftError
from moegraft.factor_table import site_table
from moegraft.graphs import GraphRunner, StepRunner, layer_inputs, layer_step
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.static_batch import StaticBatch, StaticInput
from moegraft.testing import assert_bit_equal, random_activations, random_routing, random_weights
from moegraft.types import TokenSlots

INPUTS = {
    "x": StaticInput((2,), torch.float32),
    "ids": StaticInput((3,), torch.int32, -1),
    "ok": StaticInput((), torch.bool, False),
}


def inputs_of(rows: int, value: int = 1) -> dict[str, torch.Tensor]:
    return {
        "x": torch.full((rows, 2), float(value)),
        "ids": torch.full((rows, 3), value),
        "ok": torch.ones(rows, dtype=torch.bool),
    }


@pytest.mark.parametrize(("rows", "bucket"), [(0, 1), (1, 1), (2, 4), (4, 4), (5, 16), (16, 16)])
def test_a_batch_gets_the_smallest_bucket_that_holds_it(rows: int, bucket: int) -> None:
    assert StaticBatch(INPUTS, [16, 1, 4, 4], "cpu").bucket_of(rows) == bucket


@pytest.mark.parametrize("buckets", [[], [0, 2], [-1], [2.5], ["4"], [True], 4, None])
def test_buckets_that_are_none_are_refused(buckets: Any) -> None:
    with pytest.raises(MoegraftError, match="at least one number of rows above 0"):
        StaticBatch(INPUTS, buckets, "cpu")


def test_a_batch_over_the_largest_bucket_is_refused_with_both_numbers() -> None:
    batch = StaticBatch(INPUTS, [1, 4], "cpu")
    with pytest.raises(MoegraftError, match="batch of 5 rows is over the largest bucket of 4"):
        batch.load(inputs_of(5), None)
    assert not batch.views(4)["ok"].any()


def test_rows_between_batch_and_bucket_hold_the_pads_whatever_was_there_before() -> None:
    batch = StaticBatch(INPUTS, [4, 8], "cpu")
    for rows, bucket in ((8, 8), (3, 4), (5, 8), (1, 4), (0, 4), (4, 4)):
        slots = TokenSlots.of([2] * rows)
        assert batch.load(inputs_of(rows, value=rows + 1), slots) == rows
        views = batch.views(bucket)
        assert (views["ids"][:rows] == rows + 1).all() and (views["x"][:rows] == rows + 1).all()
        assert (views["ids"][rows:] == -1).all() and not views["ok"][rows:].any()
        assert batch.slots(bucket).tolist() == [2] * rows + [-1] * (bucket - rows)
        assert views["ids"].dtype == torch.int32


def test_buffers_never_move_and_small_buckets_are_the_start_of_large_ones() -> None:
    batch = StaticBatch(INPUTS, [2, 8], "cpu")
    before = [view.data_ptr() for view in batch.views(8).values()]
    batch.load(inputs_of(7), TokenSlots.of([1] * 7))
    assert [view.data_ptr() for view in batch.views(2).values()] == before


def test_inputs_that_are_left_out_stay_and_the_same_slots_are_copied_once() -> None:
    batch = StaticBatch(INPUTS, [4], "cpu")
    slots = TokenSlots.of([0, 1])
    batch.load(inputs_of(2), slots)
    batch.slots(4)[0] = 7  # shows whether it is written again
    batch.load({"ids": torch.full((2, 3), 9)}, slots)
    assert batch.slots(4).tolist() == [7, 1, -1, -1]
    assert batch.views(4)["x"][:2].eq(1).all()
    batch.load({}, TokenSlots.of([0, 1]))
    assert batch.slots(4).tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(2)}, "no input 'y'; the step has x, ids, ok"),
        ({"slots": torch.zeros(2)}, "no input 'slots'"),
        ({"x": torch.zeros(2, 3)}, r"x has shape \(2, 3\); expected \[T, 2\]"),
        ({"x": torch.zeros(3, 2)}, "one number of rows; got {'x': 3, 'ids': 2"),
        ({"ids": torch.zeros(2, 3)}, r"ids is torch\.float32; the step takes torch\.int32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_and_nothing_is_copied(
    change: dict[str, torch.Tensor], message: str
) -> None:
    batch = StaticBatch(INPUTS, [4], "cpu")
    with pytest.raises(MoegraftError, match=message):
        batch.load({**inputs_of(2), **change}, None)
    assert not batch.views(4)["ok"].any()


def test_one_value_is_no_batch_and_slots_are_token_slots() -> None:
    batch = StaticBatch({"n": StaticInput((), torch.int64)}, [4], "cpu")
    with pytest.raises(MoegraftError, match=r"n has shape \(\)"):
        batch.load({"n": torch.tensor(3)}, None)
    slots: Any = torch.zeros(1, dtype=torch.int32)
    for wrong in (slots, TokenSlots(slots[:, None], (0,))):
        with pytest.raises(MoegraftError, match="no TokenSlots of one slot per row"):
            batch.load({"n": torch.zeros(1)}, wrong)
    with pytest.raises(MoegraftError, match=r"slots is torch\.float32"):
        batch.load({"n": torch.zeros(1).long()}, TokenSlots(torch.zeros(1), (0,)))


def test_a_layer_in_buckets_equals_the_layer_alone() -> None:
    weights = random_weights(5, 16, 12)
    site = expert_site("experts", 5, 16, 12)
    table = site_table(site, mixed_adapters(site, torch.float32))
    layer = MoeLoraLayer(weights, table)
    runner = StepRunner(layer_step(layer), layer_inputs(layer, 2), [1, 4, 8], device="cpu")
    for seed, rows in enumerate((8, 3, 1, 4, 6, 2, 8)):
        x, routing = random_activations(rows, 16, seed=seed), random_routing(rows, 2, 5, seed=seed)
        inputs = {"x": x, "topk_ids": routing.topk_ids, "topk_weights": routing.topk_weights}
        slots = TokenSlots.of([(row + seed) % 6 - 1 for row in range(rows)])
        for given in (slots, None, TokenSlots.of([-1] * rows)):
            expected = layer(x, routing.topk_ids, routing.topk_weights, given)
            found = runner(inputs, given)
            assert isinstance(found, torch.Tensor)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_several_outputs_are_cut_to_the_batch_and_only_live_slots_are_passed_on() -> None:
    seen: list[TokenSlots | None] = []

    def step(
        inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None
    ) -> tuple[torch.Tensor, ...]:
        seen.append(slots)
        return inputs["x"] + 1, inputs["ok"].clone()

    runner = StepRunner(step, INPUTS, [4], device="cpu")
    first, second = runner(inputs_of(3), TokenSlots.of([-1, -1, -1]))
    assert_bit_equal(first, torch.full((3, 2), 2.0))
    assert second.tolist() == [True] * 3
    runner(inputs_of(2), TokenSlots.of([-1, 5]))
    assert seen[0] is None and seen[1] is not None
    assert seen[1].live == (5,) and seen[1].slots.tolist() == [-1, 5, -1, -1]
    assert len(runner.execute()) == 2 and len(seen) == 3
    runner.drop()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_a_graph_runner_says_what_is_missing(device: str) -> None:
    with pytest.raises(MoegraftError, match=r"need a CUDA device.*this machine has none.*Step"):
        GraphRunner(lambda inputs, slots: inputs["x"], INPUTS, [1], device=device)


def test_compilations_are_counted_by_name_and_the_hook_is_given_back() -> None:
    knobs = pytest.importorskip("triton").knobs
    from triton.runtime.jit import JitFunctionInfo

    said: list[str] = []

    def earlier(**kwargs: object) -> bool:
        said.append("earlier")
        return False

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = earlier
    try:
        with count_compilations() as found, count_compilations() as inner:
            for name in ("a", "b"):
                knobs.runtime.jit_post_compile_hook(fn=JitFunctionInfo("kernels", name, None))
        assert knobs.runtime.jit_post_compile_hook is earlier
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert found.kernels == inner.kernels == ["kernels.a", "kernels.b"]
    assert found.count == 2 and said == ["earlier", "earlier"]
