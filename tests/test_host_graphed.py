"""Decode steps on static memory equal the eager ones; run here without graphs, which need a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import tiny
from moegraft.adapters.batch import RowSlots
from moegraft.errors import UnsupportedError
from moegraft.graphs import StepRunner
from moegraft.hosts.transformers import Graft
from moegraft.hosts.transformers.graphed import LENGTH_STEP, MAX_KEPT, _DecodeSteps
from moegraft.hosts.transformers.state import StepState
from moegraft.testing import assert_close, random_adapter
from moegraft.types import TokenSlots
from tiny_grafts import (
    ROWS,
    assert_rows_equal_merged,
    generate,
    graft_of,
    greedy,
    new_graft,
    prompts,
    static_graft,
)

QWEN = "peft/0.21.2/qwen3_moe/"
NAME = "qwen3_moe"
#: Models whose layers all attend to everything; gpt_oss slides.
FULL = ("qwen3_moe", "mixtral", "olmoe")


@pytest.fixture
def graft() -> Iterator[Graft]:
    graft = static_graft()
    yield graft
    graft.detach()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every decode step that ran on static memory."""
    seen: list[int] = []
    original = StepRunner.execute

    def execute(runner: StepRunner) -> Any:
        seen.append(1)
        return original(runner)

    monkeypatch.setattr(StepRunner, "execute", execute)
    return seen


def kept(graft: Graft) -> list[_DecodeSteps]:
    assert graft._graphed is not None
    return graft._graphed._free


@pytest.mark.parametrize("name", FULL)
def test_rows_of_a_mixed_batch_equal_their_merged_models(name: str, steps: list[int]) -> None:
    rows = ROWS[name]
    inputs = prompts(len(rows))
    graft = static_graft(name)
    found = generate(graft, inputs, adapters=rows, graphs=True)
    assert len(steps) == 5, "the prompt gives the first of six tokens"
    expected = generate(graft_of(name), inputs, adapters=rows)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), torch.float32)
    assert_rows_equal_merged(graft, rows[:3], prompts(3, seed=4))


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": None},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"max_new_tokens": 1, "min_new_tokens": 1},
        {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.5},
        {"generation_config": GenerationConfig(max_new_tokens=4, do_sample=False)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_generate_give_what_they_give_without_graphs(
    graft: Graft, options: dict[str, Any]
) -> None:
    inputs, rows = prompts(3), [f"{QWEN}experts", None, f"{QWEN}all_linear"]
    fixed: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        found = graft.generate(**{**inputs, **fixed, **options}, adapters=rows, graphs=graphs)
        results.append(found)
    assert torch.equal(*results)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attention_functions_decode_on_static_memory(attention: str, steps: list[int]) -> None:
    graft = static_graft()
    graft.model.set_attn_implementation(attention)
    inputs, rows = prompts(2), [f"{QWEN}experts", None]
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        found = generate(graft, given, adapters=rows, graphs=True).sequences
        assert torch.equal(found, generate(graft, given, adapters=rows, graphs=False).sequences)
    assert len(steps) == 10


def test_a_cache_is_kept_per_shape_and_the_oldest_go(graft: Graft) -> None:
    inputs = prompts(2)
    for length, count in ((6, 1), (40, 1), (LENGTH_STEP, 2), (6, 2)):
        generate(graft, inputs, max_new_tokens=length, min_new_tokens=1)
        assert len(kept(graft)) == count
    first = kept(graft)[-1]
    assert first.max_length == LENGTH_STEP
    for rows in range(3, 3 + MAX_KEPT):
        generate(graft, prompts(rows))
    assert len(kept(graft)) == MAX_KEPT and first not in kept(graft)


def test_base_batches_and_other_adapters_follow_each_other_on_one_cache(graft: Graft) -> None:
    inputs = prompts(2)
    for rows in ([None, None], [f"{QWEN}experts", None], [None] * 2, [None, f"{QWEN}router"]):
        found = generate(graft, inputs, adapters=rows, graphs=True).sequences
        expected = generate(graft_of(NAME), inputs, adapters=rows).sequences
        assert torch.equal(found, expected), rows
    assert len(kept(graft)) == 1


@pytest.mark.parametrize("static", [False, True])
def test_a_returned_cache_is_the_callers_own_and_can_be_continued(
    graft: Graft, static: bool
) -> None:
    inputs, rows = prompts(2), [f"{QWEN}experts", None]
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    found = generate(graft, inputs, adapters=rows, graphs=True, **options)
    cache = found.past_key_values
    assert type(cache) is (StaticCache if static else DynamicCache)
    assert int(cache.get_seq_length()) == found.sequences.shape[1] - 1
    before = cache.layers[0].keys.clone()
    generate(graft, prompts(2, seed=5), adapters=rows, graphs=True)
    assert torch.equal(cache.layers[0].keys, before)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
    step = graft.forward(
        input_ids=found.sequences[:, -1:],
        attention_mask=mask,
        position_ids=mask.cumsum(-1)[:, -1:] - 1,
        past_key_values=cache,
        adapters=rows,
    )
    whole = graft.forward(input_ids=found.sequences, attention_mask=mask, adapters=rows)
    assert_close(step.logits[:, -1], whole.logits[:, -1], torch.float32)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam search reorders the cache"),
        ({"use_cache": False}, "use_cache is False"),
        ({"past_key_values": "own"}, "the caller brings a cache"),
        ({"cache_implementation": "dynamic"}, "cache_implementation is 'dynamic'"),
        ({"prompt_lookup_num_tokens": 2}, "prompt lookup checks several tokens at once"),
        ({"output_attentions": True}, "the caller asks for attentions"),
        ({"output_router_logits": True}, "the caller asks for router logits"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_graphs_can_not_do_runs_without_them_and_says_so_once(
    graft: Graft,
    options: dict[str, Any],
    reason: str,
    steps: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inputs = {key: value[-1:] for key, value in prompts(1).items()}

    def given() -> dict[str, Any]:
        if "past_key_values" in options:
            return {"past_key_values": DynamicCache(config=graft.model.config)}
        return {"output_logits": False, **options}

    case = f"{QWEN}experts"
    with caplog.at_level(logging.WARNING, "moegraft"):
        found = [generate(graft, inputs, adapters=case, **given()) for _ in range(2)]
    expected = generate(graft_of(NAME), inputs, adapters=case, **given())
    assert torch.equal(found[1].sequences, expected.sequences)
    said = [r.getMessage() for r in caplog.records if "without CUDA graphs" in r.getMessage()]
    assert len(said) == 1 and reason in said[0]
    assert not steps
    with pytest.raises(UnsupportedError, match=reason):
        generate(graft, inputs, adapters=case, graphs=True, **given())


def test_a_model_with_sliding_layers_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    graft = static_graft("gpt_oss")
    with caplog.at_level(logging.WARNING, "moegraft"):
        assert_rows_equal_merged(graft, ROWS["gpt_oss"], prompts(len(ROWS["gpt_oss"])))
    assert "StaticSlidingWindowLayer" in caplog.text
    with pytest.raises(UnsupportedError, match="StaticSlidingWindowLayer"):
        graft.decoder(1, 8)


def test_on_a_cpu_graphs_are_no_default_and_an_error_when_asked_for() -> None:
    graft = graft_of(NAME)
    for ask in (
        lambda: generate(graft, prompts(1), graphs=True),
        lambda: graft.decoder(1, 8, graphs=True),
    ):
        with pytest.raises(UnsupportedError, match="not on a GPU"):
            ask()
    generate(graft, prompts(1))
    assert "forward" not in vars(graft.model)


def test_detach_takes_the_shadows_and_the_caches_away() -> None:
    graft = static_graft()
    before = set(vars(tiny.new_model(NAME)))
    generate(graft, prompts(2))
    model, graphed = graft.model, graft._graphed
    assert "forward" in vars(model) and graphed is not None
    graft.detach()
    assert set(vars(model)) == before and not graphed._free


def test_calls_within_inference_mode_and_outside_may_take_turns(graft: Graft) -> None:
    inputs, rows = prompts(2), [f"{QWEN}experts", None]
    expected = generate(graft, inputs, adapters=rows, graphs=False).sequences
    decoder = graft.decoder(2, 16)
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            found = generate(graft, inputs, adapters=rows, graphs=True).sequences
            decoder.prefill(inputs["input_ids"], rows, inputs["attention_mask"])
            tokens = decoder.run(5)
        assert torch.equal(found, expected)
        assert torch.equal(tokens, greedy(graft, inputs, rows, 6))


def test_two_threads_decode_at_once_on_caches_of_their_own(graft: Graft) -> None:
    inputs = prompts(2)
    batches = [[f"{QWEN}experts", None], [None, f"{QWEN}all_linear"]]
    expected = [generate(graft_of(NAME), inputs, adapters=rows).sequences for rows in batches]
    found: dict[tuple[int, int], torch.Tensor] = {}

    def work(which: int) -> None:
        for turn in range(4):
            out = generate(graft, inputs, adapters=batches[which], graphs=True)
            found[which, turn] = out.sequences

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(out, expected[which]) for (which, _), out in found.items())


def test_in_a_graph_slots_of_more_rows_come_from_the_static_buffer() -> None:
    state = StepState()
    buffer = torch.tensor([2, -1], dtype=torch.int32)
    with (
        state.use_rows(RowSlots([0, 0])),
        state.use_step(TokenSlots.captured(buffer), 2),
    ):
        assert state.slots_of(torch.zeros(2, 1, 4)) is state.current
        spread = state.slots_of(torch.zeros(2, 3, 4))
    assert spread is not None and spread.in_graph and spread.live == (0,)
    assert spread.slots.tolist() == [2, 2, 2, -1, -1, -1]
    assert state.current is None


def test_adapters_of_other_sites_leave_the_experts_to_the_base() -> None:
    graft, seen = new_graft(NAME), []
    for kind in ("linear", "experts"):
        sites = [site for site in graft.spec.sites if site.kind == kind]
        graft.store.add(kind, random_adapter(sites))
    layer = next(iter(graft.layers.values()))
    original = type(layer).__call__

    def call(self: Any, x: Any, ids: Any, weights: Any, slots: Any = None) -> Any:
        seen.append(slots)
        return original(self, x, ids, weights, slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "__call__", call)
        graft.forward(**prompts(2), adapters="linear")
        assert seen and all(slots is None for slots in seen)
        graft.forward(**prompts(2), adapters="experts")
    assert seen[-1] is not None and seen[-1].live
