"""One layer as CUDA graphs: replays equal eager calls, whatever the bank does in between."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from moegraft.adapters import AdapterBank, AdapterStore
from moegraft.compile_counter import count_compilations
from moegraft.errors import AdapterError
from moegraft.graphs import CaptureError, GraphRunner, layer_inputs, layer_step
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.static_batch import StaticInput
from moegraft.testing import (
    assert_bit_equal,
    assert_close,
    random_activations,
    random_adapter,
    random_routing,
    random_weights,
)
from moegraft.types import TokenSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, SLOTS = 8, 128, 64, 2, 4
BUCKETS = (1, 4, 16, 32)
SITE = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
NAMES = ("a", "b", "c")


class Served:
    """A layer, its adapters, and its graphs."""

    def __init__(self) -> None:
        bank = AdapterBank(
            [SITE], num_slots=SLOTS, max_rank=16, dtype=torch.bfloat16, device="cuda"
        )
        self.store = AdapterStore(bank)
        self.bank = bank
        for i, name in enumerate(NAMES):
            self.add(name, rank=(4, 16, 7)[i], seed=i)
        weights = random_weights(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        self.layer = MoeLoraLayer(weights, bank.site_table("experts"))
        self.runner = GraphRunner(
            layer_step(self.layer),
            layer_inputs(self.layer, TOP_K, torch.int32),
            BUCKETS,
            before_capture=self.store.freeze,
        )

    def add(self, name: str, rank: int = 8, seed: int = 0) -> None:
        kind = ("fused", "separate", "shared_outer")[seed % 3]
        self.store.add(name, random_adapter([SITE], rank, kind, seed=seed))

    def eager(self, inputs: dict[str, torch.Tensor], slots: TokenSlots | None) -> torch.Tensor:
        """The layer itself, on the batch padded as the graph's is: the same plan, so equal bits."""
        rows = inputs["x"].shape[0]
        more = self.runner.batch.bucket_of(rows) - rows
        x, ids, weights = inputs["x"], inputs["topk_ids"], inputs["topk_weights"]
        x = torch.cat([x, x.new_zeros(more, HIDDEN)])
        ids = torch.cat([ids, ids.new_full((more, TOP_K), -1)])
        weights = torch.cat([weights, weights.new_zeros(more, TOP_K)])
        if slots is not None:
            padded = torch.cat([slots.slots, slots.slots.new_full((more,), -1)])
            slots = TokenSlots(padded, slots.live)
        return self.layer(x, ids, weights, slots)[:rows]


@pytest.fixture(scope="module")
def warm() -> Iterator[Served]:
    """Everything captured; tests may load more adapters, but must leave NAMES as they are."""
    served = Served()
    told: list[tuple[int, int, str]] = []
    served.runner.warmup(progress=lambda *what: told.append(what))
    assert told[0] == (0, 8, "base, 32 rows") and told[-1] == (8, 8, "done")
    assert served.runner.num_graphs == 8 and served.bank.frozen
    yield served
    served.runner.drop()


def batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    routing = random_routing(rows, TOP_K, EXPERTS, seed=seed, device="cuda")
    x = random_activations(rows, HIDDEN, torch.bfloat16, seed=seed, device="cuda")
    return {"x": x, "topk_ids": routing.topk_ids, "topk_weights": routing.topk_weights}


def run(served: Served, inputs: dict[str, torch.Tensor], slots: TokenSlots | None) -> torch.Tensor:
    found = served.runner(inputs, slots)
    assert isinstance(found, torch.Tensor)
    return found.clone()


def test_300_replays_of_random_batches_equal_eager_calls_and_compile_nothing(warm: Served) -> None:
    choose = random.Random(0)
    done = []
    with warm.store.use(NAMES) as slot_of, count_compilations() as compiled:
        known = [-1, *slot_of.values()]
        for seed in range(300):
            rows = choose.choice([1, 2, 4, 5, 16, 17, 32])
            inputs = batch(rows, seed)
            slots = None
            if seed % 4:
                slots = TokenSlots.of([choose.choice(known) for _ in range(rows)], "cuda")
            done.append((inputs, slots, run(warm, inputs, slots)))
        assert compiled.count == 0, compiled.kernels
        for inputs, slots, found in done:
            assert_bit_equal(found, warm.eager(inputs, slots))
            plain = warm.layer(inputs["x"], inputs["topk_ids"], inputs["topk_weights"], slots)
            assert_close(found, plain, torch.bfloat16)
    assert warm.runner.num_graphs == 8


@pytest.mark.parametrize("rows", [1, 3, 16, 32])
def test_a_lora_graph_with_base_rows_only_gives_the_base_graphs_bits(
    warm: Served, rows: int
) -> None:
    inputs = batch(rows, 1000 + rows)
    base = run(warm, inputs, None)
    none = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    assert_bit_equal(run(warm, inputs, TokenSlots(none, (0,))), base)


def test_adapters_may_come_and_go_between_replays(warm: Served) -> None:
    inputs = batch(16, 5)
    arena = warm.bank.site_table("experts").arena.data.data_ptr()
    results = {}
    with count_compilations() as compiled:
        for turn, name in enumerate(("new", "new", "other", "a", "new")):
            if turn != 3:
                warm.add(name, rank=3 + turn, seed=20 + turn)
            with warm.store.use([name, "b"]) as slot_of:
                slots = TokenSlots.of([slot_of[name], -1, slot_of["b"], -1] * 4, "cuda")
                results[turn] = run(warm, inputs, slots)
                assert_bit_equal(results[turn], warm.eager(inputs, slots))
            if name == "other":
                warm.store.remove("other")
    warm.store.remove("new")
    assert compiled.count == 0, compiled.kernels
    for turn in (1, 2, 3, 4):
        own, base = results[turn][0::4], results[turn][1::2]
        assert not torch.equal(own, results[0][0::4]), "another adapter, the same result"
        assert_bit_equal(base, results[0][1::2])
        assert_bit_equal(results[turn][2::4], results[0][2::4])
    assert warm.bank.site_table("experts").arena.data.data_ptr() == arena


def test_an_adapter_that_does_not_fit_the_frozen_arena_is_refused(warm: Served) -> None:
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
    bank = AdapterBank([site], num_slots=1, max_rank=16, dtype=torch.bfloat16, device="cuda")
    store = AdapterStore(bank)
    store.add("small", random_adapter([site], 2))
    store.freeze()
    with pytest.raises(AdapterError, match=r"needs [\d,]+ bytes, the whole arena has"):
        store.add("large", random_adapter([site], 16))


def test_batches_on_two_streams_do_not_disturb_each_other(warm: Served) -> None:
    """Two slots, four adapters: every batch evicts, on streams that take turns without waiting."""
    bank = AdapterBank([SITE], num_slots=2, max_rank=16, dtype=torch.bfloat16, device="cuda")
    store = AdapterStore(bank)
    names = [f"s{i}" for i in range(4)]
    for i, name in enumerate(names):
        store.add(name, random_adapter([SITE], 8, seed=40 + i))
    layer = MoeLoraLayer(warm.layer.weights, bank.site_table("experts"))
    inputs = batch(16, 7)
    arguments = (inputs["x"], inputs["topk_ids"], inputs["topk_weights"])

    def once(name: str) -> torch.Tensor:
        with store.use([name]) as slot_of:
            return layer(*arguments, TokenSlots.of([slot_of[name]] * 16, "cuda"))

    expected = {name: once(name) for name in names}
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for turn in range(40):
        name = names[turn * 3 % 4]
        with torch.cuda.stream(streams[turn % 2]):
            found.append((name, once(name)))
    torch.cuda.synchronize()
    for name, result in found:
        assert_bit_equal(result, expected[name], name)


def test_what_a_step_changes_in_place_is_as_it_was_after_the_capture() -> None:
    count = torch.zeros(1, device="cuda")
    runner = GraphRunner(
        lambda inputs, slots: inputs["x"] + count.add_(1),
        {"x": StaticInput((), torch.float32)},
        [2],
        changed=[count],
    )
    runner.warmup(lora=False)
    assert count.item() == 0
    for turn in range(1, 4):
        found = runner({"x": torch.zeros(2, device="cuda")})
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == [turn] * 2


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other threads may wait")
def test_a_step_that_waits_for_the_gpu_is_an_error_ahead_of_the_capture() -> None:
    count = torch.zeros(1, device="cuda")

    def step(inputs: object, slots: object) -> torch.Tensor:
        count.add_(1)
        return torch.full((2,), count.item(), device="cuda")

    runner = GraphRunner(step, {"x": StaticInput((), torch.float32)}, [2], changed=[count])
    with pytest.raises(CaptureError, match=r"2 rows can't be captured.*synchroniz"):
        runner.warmup(lora=False)
    assert count.item() == 0 and runner.num_graphs == 0
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_a_kernel_that_runs_for_the_first_time_is_counted(warm: Served) -> None:
    with count_compilations() as compiled:
        x = random_activations(3, 96, torch.bfloat16, device="cuda")
        weights = random_weights(4, 96, 32, dtype=torch.bfloat16, device="cuda")
        routing = random_routing(3, 3, 4, device="cuda")
        MoeLoraLayer(weights)(x, routing.topk_ids, routing.topk_weights)
    assert compiled.count > 0
