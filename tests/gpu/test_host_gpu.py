"""A transformers model on a GPU: decoding by graphs equals the same steps without them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from host_cases import (
    ROWS,
    STEPS,
    add,
    assert_same,
    generate,
    new_graft,
    new_model,
    prompts,
    stop_after,
    without_graphs,
)

import moegraft
from moegraft.compile_counter import count_compilations
from moegraft.graphs import GraphRunner
from moegraft.hosts.transformers import Graft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def graft() -> Iterator[Graft]:
    """A graft that tests may load more adapters into."""
    graft = new_graft()
    yield graft
    graft.detach()


@pytest.mark.parametrize(
    "rows", [ROWS, [None] * 6, ["a"] * 6, ["b"], [None]], ids=["mixed", "base", "one", "1", "1base"]
)
def test_tokens_of_graphs_are_those_of_eager_steps(graft: Graft, rows: list[str | None]) -> None:
    expected = without_graphs(graft, rows)
    for _ in range(2):
        assert_same(generate(graft, rows, graphs=True), expected)
    if any(rows):
        base = generate(graft, [None] * len(rows), graphs=True)
        own = [row for row, name in enumerate(rows) if name is not None]
        assert not torch.equal(base.logits[0][own], expected.logits[0][own])


def test_logits_of_graphs_are_close_to_those_of_one_forward_over_everything(graft: Graft) -> None:
    found = generate(graft, ROWS, graphs=True)
    logits = torch.stack(found.logits, 1).float()
    mask = prompts(len(ROWS))["attention_mask"]
    ids = found.sequences
    whole = torch.cat([mask, mask.new_ones(len(ROWS), ids.shape[1] - mask.shape[1])], 1)
    positions = (whole.cumsum(-1) - 1).clamp(min=0)
    scored = graft.forward(
        input_ids=ids, attention_mask=whole, position_ids=positions, adapters=ROWS
    )
    wanted = scored.logits[:, mask.shape[1] - 1 : -1].float()
    # A token whose router is near a tie may go the other way: the median says enough.
    error = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.median() < 0.05, error


def test_adapters_come_and_go_between_replays_and_nothing_is_compiled(graft: Graft) -> None:
    generate(graft, ROWS, graphs=True)
    generate(graft, [None] * 6, graphs=True)
    with count_compilations() as compiled:
        results = []
        for turn in range(4):
            add(graft, "new", rank=(5, 16, 2, 9)[turn], seed=50 + turn)
            rows = ["new" if name == "c" else name for name in ROWS]
            results.append((turn, rows, generate(graft, rows, graphs=True, seed=turn)))
            if turn == 1:
                graft.unload("new")
        base = generate(graft, [None] * 6, graphs=True)
    assert compiled.count == 0, compiled.kernels
    turn, rows, last = results[-1]
    assert_same(last, without_graphs(graft, rows, seed=turn))
    assert_same(base, without_graphs(graft, [None] * 6))
    graft.unload("new")


def test_more_adapters_than_slots_take_turns(graft: Graft) -> None:
    names = [f"turn{i}" for i in range(6)]
    for i, name in enumerate(names):
        add(graft, name, rank=8, seed=70 + i)
    first = {name: generate(graft, [name, None], graphs=True).sequences for name in names}
    for name in reversed(names):
        assert torch.equal(generate(graft, [name, None], graphs=True).sequences, first[name])
    assert len({tuple(tokens[0].tolist()) for tokens in first.values()}) > 1
    for name in names:
        graft.unload(name)


def test_an_adapter_for_sites_that_had_none_is_captured_too() -> None:
    graft = moegraft.attach(new_model(), max_adapters=2, max_rank=16, arena_bytes=1 << 24)
    add(graft, "experts", seed=1, kinds=("experts",))
    before = generate(graft, ["experts", None], graphs=True)
    add(graft, "all", seed=2)
    found = generate(graft, ["all", None], graphs=True)
    assert_same(found, without_graphs(graft, ["all", None]))
    assert_same(generate(graft, ["experts", None], graphs=True), before)
    graft.detach()


def test_sampling_and_a_returned_cache_work_with_graphs(graft: Graft) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2}
    torch.manual_seed(1)
    expected = without_graphs(graft, ROWS, **options)
    torch.manual_seed(1)
    found = generate(graft, ROWS, graphs=True, **options)
    assert_same(found, expected)
    cache = found.past_key_values
    keys = cache.layers[0].keys.clone()
    generate(graft, ROWS, graphs=True, seed=3, **options)
    assert torch.equal(cache.layers[0].keys, keys)
    assert int(cache.get_seq_length()) == found.sequences.shape[1] - 1


def test_a_decoder_replays_what_its_eager_twin_runs(graft: Graft) -> None:
    inputs = prompts(len(ROWS))
    twins = [graft.decoder(len(ROWS), 16 + STEPS, graphs=graphs) for graphs in (True, False)]
    for rows in (ROWS, [None] * len(ROWS), list(reversed(ROWS)), ["b"] * len(ROWS)):
        tokens = []
        for decoder in twins:
            decoder.prefill(inputs["input_ids"], rows, inputs["attention_mask"])
            tokens.append(decoder.run(STEPS - 1).clone())
        assert torch.equal(*tokens)
        # transformers' own loop over the static cache of the same steps
        assert torch.equal(tokens[0][:, 16], generate(graft, rows, graphs=True).sequences[:, 16])
    with count_compilations() as compiled:
        twins[0].prefill(inputs["input_ids"], ROWS, inputs["attention_mask"])
        twins[0].run(STEPS - 1)
    assert compiled.count == 0, compiled.kernels
    for decoder in twins:
        decoder.close()


def test_graphs_are_the_default_and_can_be_turned_off(graft: Graft) -> None:
    assert graft._graphed is not None
    graft._graphed._free.clear()
    generate(graft, ROWS)
    [kept] = graft._graphed._free
    assert isinstance(kept.runner, GraphRunner) and kept.runner.num_graphs == 1
    generate(graft, [None] * len(ROWS))
    assert kept.runner.num_graphs == 2
    generate(graft, ROWS, graphs=False)
    generate(graft, ROWS, num_beams=2, output_logits=False)
    assert graft._graphed._free == [kept]


def test_q_k_and_v_in_one_launch_give_what_single_launches_give(graft: Graft) -> None:
    alone = new_graft(fuse_linears=False)
    assert "forward" in vars(graft.model.model.layers[0].self_attn.q_proj)
    assert "forward" not in vars(alone.model.model.layers[0].self_attn.q_proj)
    inputs = prompts(len(ROWS))
    found = graft.forward(**inputs, adapters=ROWS).logits.float()
    expected = alone.forward(**inputs, adapters=ROWS).logits.float()
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.03, error
    alone.detach()


def test_generate_on_another_stream_equals_generate_on_the_default_one(graft: Graft) -> None:
    expected = generate(graft, ROWS, graphs=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = generate(graft, ROWS, graphs=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(found, expected)
    assert_same(generate(graft, ROWS, graphs=True), expected)


def test_a_cache_larger_than_the_gpu_is_not_made(
    graft: Graft, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[str | None] = ["a", None]
    # 256 bytes per token and row: two rows of 2^31 tokens are beyond any GPU.
    options: dict[str, Any] = {"max_new_tokens": 1 << 31, "stopping_criteria": stop_after(4)}
    with caplog.at_level(logging.WARNING, "moegraft"):
        found = generate(graft, rows, **options).sequences
    assert "free bytes; lower max_new_tokens" in caplog.text
    assert found.shape == (2, 20)
    assert torch.equal(found[:, 16], generate(graft, rows, graphs=True).sequences[:, 16])


def test_detach_frees_the_graphs_and_leaves_the_model_as_it_was() -> None:
    graft = new_graft()
    model, attributes = graft.model, set(vars(new_model()))
    generate(graft, ROWS, graphs=True)
    graft.detach()
    assert set(vars(model)) == attributes and graft._graphed is None
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other threads may wait")
def test_a_model_that_waits_for_the_gpu_runs_without_graphs_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graft = new_graft()
    graft.model.model.norm.register_forward_hook(lambda *args: args[-1] * args[-1].max().item())
    with caplog.at_level(logging.WARNING, "moegraft"):
        found = generate(graft, ROWS)
    assert "can't be captured" in caplog.text
    expected = generate(graft, ROWS, graphs=False, cache_implementation="static")
    assert found.sequences.shape == expected.sequences.shape
    assert torch.equal(found.sequences[:, 16], expected.sequences[:, 16])
    with pytest.raises(moegraft.UnsupportedError, match="can't be captured"):
        generate(graft, ROWS, graphs=True)
    graft.detach()
