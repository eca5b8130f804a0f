"""Steps that see what a graph's capture sees: slots whose values nobody on the host knows.

The Triton backend runs here in its interpreter. A graph replays what a step launched when it was
captured, with other slots in the buffer; so a step must not depend on which slots are live.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from moegraft.adapters import AdapterBank, AdapterStore
from moegraft.graphs import Outputs, StepRunner, layer_inputs, layer_step
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.testing import (
    assert_bit_equal,
    assert_close,
    random_activations,
    random_adapter,
    random_routing,
    random_weights,
)
from moegraft.types import TokenSlots
from tiny_grafts import LOADED, ROWS, graft_of, greedy, load_cases, new_graft, prompts

SITE = expert_site("experts", 4, 32, 16)


class CapturedRunner(StepRunner):
    """Runs a step anew each time, with the slots that a capture would give it."""

    def execute(self) -> Outputs:
        bucket = self.batch.bucket_of(self._rows)
        slots = TokenSlots.captured(self.batch.slots(bucket)) if self._live else None
        return self._step(self.batch.views(bucket), slots)


def test_a_layers_captured_step_serves_whatever_the_bank_holds() -> None:
    bank = AdapterBank([SITE], num_slots=3, max_rank=8, dtype=torch.float32)
    store = AdapterStore(bank)
    for i, name in enumerate("abcd"):
        store.add(name, random_adapter([SITE], 3 + i, seed=i))
    weights = random_weights(4, 32, 16)
    table = bank.site_table("experts")
    layer = MoeLoraLayer(weights, table, backend="triton")
    wanted = MoeLoraLayer(weights, table, backend="cpu")
    runner = CapturedRunner(layer_step(layer), layer_inputs(layer, 2), [8], device="cpu")
    for seed, names in enumerate((["a", "b"], ["c", "d", "a"], ["b"])):
        rows = 5 + seed
        x, routing = random_activations(rows, 32, seed=seed), random_routing(rows, 2, 4, seed=seed)
        inputs = {"x": x, "topk_ids": routing.topk_ids, "topk_weights": routing.topk_weights}
        with store.use(names) as slot_of:
            known = [-1, *slot_of.values()]
            slots = TokenSlots.of([known[(row + seed) % len(known)] for row in range(rows)])
            found = runner(inputs, slots)
            expected = wanted(x, routing.topk_ids, routing.topk_weights, slots)
        assert isinstance(found, torch.Tensor)
        assert_close(found, expected, torch.float32)
        base = runner(inputs)
        assert isinstance(base, torch.Tensor)
        none = TokenSlots(torch.full((rows,), -1, dtype=torch.int32), (0,))
        again = runner(inputs, none)
        assert isinstance(again, torch.Tensor)
        assert_bit_equal(again, base.clone())


def test_a_models_captured_decode_steps_give_the_tokens_of_plain_forwards() -> None:
    graft = new_graft("qwen3_moe", backend="triton", fuse_linears=True)
    load_cases(graft, LOADED["qwen3_moe"])
    graft._use_graphs(CapturedRunner)
    all_rows = ROWS["qwen3_moe"]
    inputs = prompts(4)
    decoder = graft.decoder(4, 16)
    for rows in (all_rows[:4], all_rows[4:8]):
        decoder.prefill(inputs["input_ids"], rows, inputs["attention_mask"])
        tokens = decoder.run(1)
        assert torch.equal(tokens, greedy(graft_of("qwen3_moe"), inputs, rows, 2)), rows
