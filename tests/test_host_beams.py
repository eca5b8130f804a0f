"""Beam search with an adapter per row: every row's beams are those of its merged model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import tiny
from moegraft.adapters.batch import RowSlots
from moegraft.errors import AdapterError, UnsupportedError
from moegraft.testing import assert_close
from test_host_lifecycle import A, B, C, at_step
from tiny_grafts import (
    ROWS,
    generate,
    graft_of,
    model_for,
    new_graft,
    prompts,
    row_of,
    static_graft,
)

MODELS = ["qwen3_moe", "gpt_oss", "mixtral"]


def assert_beams_equal_merged(name: str, rows: list[str | None], **options: Any) -> None:
    """Sequences of every row, in order, and their scores, are those of the row's merged model."""
    inputs = prompts(len(rows), seed=4)
    options = {"num_beams": 3, "output_logits": False, "output_scores": True, **options}
    found = generate(graft_of(name), inputs, adapters=rows, **options)
    each = len(found.sequences) // len(rows)
    assert each == options.get("num_return_sequences", 1)
    for row, case in enumerate(rows):
        expected = generate(model_for(case, name), row_of(inputs, row), **options)
        mine = slice(row * each, (row + 1) * each)
        length = expected.sequences.shape[1]  # others of the batch may go on
        assert torch.equal(found.sequences[mine, :length], expected.sequences), (row, case)
        assert len(found.sequences[mine, length:].unique()) <= 1, "filler behind the end"
        assert_close(found.sequences_scores[mine], expected.sequences_scores, torch.float32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_return_sequences": 2, "cache_implementation": "static"},
        {"use_cache": False},
        {"early_stopping": True, "length_penalty": 0.0},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_beams_of_a_mixed_batch_equal_merged_models(name: str, options: dict[str, Any]) -> None:
    assert_beams_equal_merged(name, ROWS[name][:4], **options)


@pytest.mark.parametrize("name", MODELS[:2])
def test_rows_whose_beams_end_early_do_not_disturb_the_others(name: str) -> None:
    ends = list(range(3, 64, 3))  # a third of the vocabulary ends a text
    options = {"eos_token_id": ends, "pad_token_id": 0, "min_new_tokens": 1, "max_new_tokens": 8}
    assert_beams_equal_merged(name, ROWS[name][:4], num_return_sequences=2, **options)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3}])
def test_sampled_beams_draw_what_the_merged_models_draw(options: dict[str, Any]) -> None:
    rows, inputs = ROWS["qwen3_moe"][:4], prompts(4)
    options = {"do_sample": True, "temperature": 0.9, "output_logits": False, **options}
    torch.manual_seed(5)
    found = generate(graft_of("qwen3_moe"), inputs, adapters=rows, **options).sequences
    each = len(found) // len(rows)
    for row, case in enumerate(rows):
        torch.manual_seed(5)  # the draws of a row depend on its own numbers alone
        expected = generate(model_for(case, "qwen3_moe"), inputs, **options).sequences
        mine = slice(row * each, (row + 1) * each)
        assert torch.equal(found[mine], expected[mine]), (row, case)


def test_beams_with_guidance_equal_merged_models() -> None:
    assert_beams_equal_merged("qwen3_moe", ROWS["qwen3_moe"][:3], guidance_scale=1.5)


def test_beams_set_in_a_generation_config_find_their_rows_too() -> None:
    rows, inputs = ROWS["qwen3_moe"][:3], prompts(3)
    options = dict(num_beams=3, max_new_tokens=5, do_sample=False, pad_token_id=0)
    graft = graft_of("qwen3_moe")
    wanted = graft.generate(**inputs, adapters=rows, **options)
    config = GenerationConfig(**options)
    found = graft.generate(**inputs, adapters=rows, generation_config=config)
    assert torch.equal(found, wanted)
    with graft.rows(rows, 3):
        assert torch.equal(graft.model.generate(**inputs, **options), wanted)


def test_beams_over_embeddings_equal_those_over_tokens() -> None:
    rows, inputs = [A, None, C], prompts(3)
    graft = graft_of("qwen3_moe")
    embeds = graft.model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    options = {"num_beams": 3, "output_logits": False}
    wanted = generate(graft, inputs, adapters=rows, **options).sequences
    found = generate(graft, given, adapters=rows, **options).sequences
    assert torch.equal(found, wanted[:, -found.shape[1] :])


def test_beams_of_linears_that_share_a_launch_equal_merged_models() -> None:
    rows, inputs = [A, None, B, C], prompts(4)
    graft = new_graft("qwen3_moe", fuse_linears=True)
    for case in (A, B, C):
        graft.load(case, tiny.folder(case))
    options = {"num_beams": 3, "num_return_sequences": 3, "output_logits": False}
    found = generate(graft, inputs, adapters=rows, **options).sequences
    for row, case in enumerate(rows):
        wanted = generate(model_for(case, "qwen3_moe"), row_of(inputs, row), **options).sequences
        assert torch.equal(found[3 * row : 3 * row + 3], wanted), (row, case)
    graft.detach()


def test_two_threads_with_beams_each_get_their_own_rows() -> None:
    graft, inputs = graft_of("qwen3_moe"), prompts(2)
    options = {"num_beams": 3, "output_logits": False}
    wanted = {
        case: generate(graft, inputs, adapters=[case, None], **options).sequences for case in (A, B)
    }
    failures: list[str] = []

    def run(case: str) -> None:
        for _ in range(3):
            found = generate(graft, inputs, adapters=[case, None], **options).sequences
            if not torch.equal(found, wanted[case]):
                failures.append(case)

    threads = [threading.Thread(target=run, args=(case,)) for case in (A, B, A)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_running_beams_keep_an_adapter_that_is_updated_and_unloaded() -> None:
    graft, rows, inputs = new_graft("qwen3_moe", max_adapters=2), [A, None, A], prompts(3)
    graft.load(A, tiny.folder(A))
    options = {"num_beams": 3, "num_return_sequences": 2, "output_logits": False}
    wanted = generate(graft, inputs, adapters=rows, **options).sequences
    for action in (lambda: graft.load(A, tiny.folder(B)) and None, lambda: graft.unload(A)):
        graft.load(A, tiny.folder(A))
        stop = at_step(2, action)
        found = generate(graft, inputs, adapters=rows, stopping_criteria=stop, **options)
        assert torch.equal(found.sequences, wanted)
    assert graft.bank.memory.used == 0
    graft.detach()


def test_beams_run_without_graphs_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    graft, inputs = static_graft(), prompts(2)
    options = {"num_beams": 3, "num_return_sequences": 2, "output_logits": False}
    wanted = generate(graft_of("qwen3_moe"), inputs, adapters=[A, None], **options).sequences
    for _ in range(2):
        found = generate(graft, inputs, adapters=[A, None], **options).sequences
        assert torch.equal(found, wanted)
    said = [record for record in caplog.records if "beam search" in record.getMessage()]
    assert len(said) == 1
    with pytest.raises(UnsupportedError, match="beam search reorders the cache"):
        generate(graft, inputs, adapters=[A, None], graphs=True, **options)
    graft.detach()


def test_one_entry_per_prompt_not_per_beam() -> None:
    graft, inputs = graft_of("qwen3_moe"), prompts(2)
    with pytest.raises(AdapterError, match="2 rows but 6 adapters were given"):
        generate(graft, inputs, adapters=[A, A, A, None, None, None], num_beams=3)


def test_a_forward_of_beams_that_are_no_multiple_of_the_rows_is_refused() -> None:
    slots = RowSlots([3, -1])
    assert slots.spread(6, 1).slots.tolist() == [3, 3, 3, -1, -1, -1]
    assert slots.spread(4, 2).slots.tolist() == [3] * 4 + [-1] * 4
    for rows in (1, 3, 5):
        with pytest.raises(AdapterError, match=f"has {rows} rows, but adapters were given for 2"):
            slots.spread(rows, 1)
