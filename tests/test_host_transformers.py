"""Rows of a mixed batch on a transformers model: each equals its own merged model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from moegraft.testing import assert_bit_equal, assert_close
from moegraft.types import TokenSlots
from tiny_grafts import (
    LOADED,
    ROWS,
    assert_rows_equal_merged,
    generate,
    graft_of,
    model_for,
    prompts,
    row_of,
)

QWEN = "peft/0.21.2/qwen3_moe/"


def logits_of(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Logits of one forward of a plain model."""
    with torch.no_grad():
        found: torch.Tensor = model(**inputs, **options).logits
    return found


@pytest.mark.parametrize("case", [c for name in tiny.MODELS for c in LOADED[name]])
def test_scoring_with_one_adapter_equals_pefts_own_logits(case: str) -> None:
    oracle = tiny.oracle_of(case)
    inputs = {key: oracle[key] for key in ("input_ids", "attention_mask")}
    found = graft_of(tiny.model_of(case)).forward(**inputs, adapters=case).logits
    real = inputs["attention_mask"].bool()
    assert_close(found[real], oracle["logits"][real], torch.float32)
    base = logits_of(tiny.base_model(tiny.model_of(case)), inputs)
    assert (found - base)[real].abs().max() > 1e-2, "the adapter must do something"


@pytest.mark.parametrize("name", tiny.MODELS)
def test_base_rows_give_the_logits_and_tokens_of_the_untouched_model(name: str) -> None:
    inputs = prompts(3)
    graft, base = graft_of(name), tiny.base_model(name)
    found, expected = generate(graft, inputs), generate(base, inputs)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), torch.float32)
    alone = generate(graft.model, inputs)
    assert_bit_equal(torch.stack(alone.logits), torch.stack(found.logits))
    listed = generate(graft, inputs, adapters=[None, None, None])
    assert_bit_equal(torch.stack(listed.logits), torch.stack(found.logits))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_row_of_a_mixed_batch_equals_its_merged_model(name: str) -> None:
    assert_rows_equal_merged(graft_of(name), ROWS[name], prompts(len(ROWS[name])))


def test_every_row_of_a_mixed_forward_equals_its_merged_model() -> None:
    rows = ROWS["qwen3_moe"]
    inputs = prompts(len(rows), seed=1)
    found = graft_of("qwen3_moe").forward(**inputs, adapters=rows).logits
    for row, case in enumerate(rows):
        expected = logits_of(model_for(case, "qwen3_moe"), row_of(inputs, row))
        real = inputs["attention_mask"][row].bool()
        assert_close(found[row][real], expected[0][real], torch.float32)


def test_a_bf16_model_is_as_close_to_its_merged_model_as_bf16_allows() -> None:
    rows = ROWS["qwen3_moe"]
    inputs = prompts(len(rows))
    graft = graft_of("qwen3_moe", torch.bfloat16)
    found = graft.forward(**inputs, adapters=rows).logits
    assert found.dtype == torch.bfloat16
    for row, case in enumerate(rows):
        exact = logits_of(model_for(case, "qwen3_moe"), row_of(inputs, row))[0]
        merged = logits_of(model_for(case, "qwen3_moe", torch.bfloat16), row_of(inputs, row))[0]
        real = inputs["attention_mask"][row].bool()
        ours = (found[row] - exact)[real].norm() / exact[real].norm()
        theirs = (merged - exact)[real].norm() / exact[real].norm()
        # A router near a tie may go the other way in bf16, in either: hence the wide margin.
        assert ours < max(2 * theirs, 0.02), (case, float(ours), float(theirs))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"use_cache": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_ways_to_generate_equal_merged_models_too(name: str, options: Any) -> None:
    rows = ROWS[name][:4]
    assert_rows_equal_merged(graft_of(name), rows, prompts(len(rows), seed=2), **options)


def test_sampling_with_a_seed_gives_base_rows_what_the_untouched_model_samples() -> None:
    inputs = prompts(4)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2}
    torch.manual_seed(0)
    expected = generate(tiny.base_model("qwen3_moe"), inputs, **options).sequences
    torch.manual_seed(0)
    rows = [None, f"{QWEN}experts", None, f"{QWEN}router"]
    found = generate(graft_of("qwen3_moe"), inputs, adapters=rows, **options).sequences
    base_rows = [0, 1, 4, 5]
    assert torch.equal(found[base_rows], expected[base_rows])
    assert not torch.equal(found, expected)


def test_several_tokens_per_row_after_a_cache_equal_merged_models() -> None:
    rows = [f"{QWEN}experts", None, f"{QWEN}all_linear"]
    graft, inputs = graft_of("qwen3_moe"), prompts(3, length=9)
    mask = torch.ones_like(inputs["attention_mask"])
    first, more = inputs["input_ids"][:, :5], inputs["input_ids"][:, 5:]
    cache = graft.forward(input_ids=first, attention_mask=mask[:, :5], adapters=rows)
    step = graft.forward(
        input_ids=more,
        attention_mask=mask,
        past_key_values=cache.past_key_values,
        adapters=rows,
    )
    whole = {"input_ids": inputs["input_ids"], "attention_mask": mask}
    for row, case in enumerate(rows):
        expected = logits_of(model_for(case, "qwen3_moe"), row_of(whole, row))
        assert_close(step.logits[row], expected[0, 5:], torch.float32)


def test_prompt_lookup_decoding_equals_the_merged_model() -> None:
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    case = f"{QWEN}experts"
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "output_logits": False}
    found = generate(graft_of("qwen3_moe"), inputs, adapters=case, **options)
    expected = generate(tiny.merged_model(case), inputs)
    assert torch.equal(found.sequences, expected.sequences)


def test_prompts_given_as_embeddings_find_their_rows() -> None:
    rows = [f"{QWEN}experts", None]
    inputs = prompts(2)
    graft = graft_of("qwen3_moe")
    embeds = graft.model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    found = generate(graft, given, adapters=rows)
    expected = generate(graft, inputs, adapters=rows)
    assert torch.equal(found.sequences, expected.sequences[:, -found.sequences.shape[1] :])


@pytest.mark.parametrize("name", tiny.MODELS)
def test_base_rows_of_a_mixed_batch_keep_the_layers_bits(name: str) -> None:
    graft = graft_of(name)
    cases = LOADED[name][:3]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(12, 24, generator=generator)
    scores = torch.rand(12, 4, generator=generator)
    weights, ids = scores.topk(2, -1)
    with graft.store.use(cases) as slot_of:
        slots = [-1, *slot_of.values()] * 3
        for layer in graft.layers.values():
            base = layer(hidden, ids, weights)
            mixed = layer(hidden, ids, weights, TokenSlots.of(slots))
            is_base = torch.tensor(slots) < 0
            assert_bit_equal(mixed[is_base[:12]], base[is_base[:12]])
            assert not torch.equal(mixed[~is_base], base[~is_base])


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = ROWS["qwen3_moe"]
    inputs = prompts(len(rows))
    graft = graft_of("qwen3_moe")
    expected = graft.forward(**inputs, adapters=rows).logits
    for seed in range(3):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        shuffled = {key: value[order] for key, value in inputs.items()}
        adapters = [rows[i] for i in order.tolist()]
        found = graft.forward(**shuffled, adapters=adapters).logits
        assert_close(found, expected[order], torch.float32)


def test_a_base_batch_after_an_adapter_batch_equals_one_before_it() -> None:
    graft, inputs = graft_of("qwen3_moe"), prompts(4)
    before = graft.forward(**inputs).logits
    changed = graft.forward(**inputs, adapters=f"{QWEN}all_linear").logits
    assert not torch.equal(changed, before)
    assert_bit_equal(logits_of(graft.model, inputs), before)
    for _ in range(2):
        assert_bit_equal(graft.forward(**inputs).logits, before)


def test_an_inner_module_called_by_itself_is_the_base_model() -> None:
    graft, inputs = graft_of("qwen3_moe"), prompts(4)
    with torch.no_grad():
        before = graft.model.model(**inputs).last_hidden_state
        graft.forward(**inputs, adapters=f"{QWEN}all_linear")
        assert_bit_equal(graft.model.model(**inputs).last_hidden_state, before)
        with pytest.raises(IndexError):
            graft.forward(input_ids=torch.full((4, 7), 9999), adapters=f"{QWEN}all_linear")
        assert_bit_equal(graft.model.model(**inputs).last_hidden_state, before)


def test_a_router_adapter_alone_changes_the_routing_as_the_merged_router_does() -> None:
    case = f"{QWEN}router"
    graft = graft_of("qwen3_moe")
    oracle = tiny.oracle_of(case)
    inputs = {key: oracle[key] for key in ("input_ids", "attention_mask")}
    found = graft.forward(**inputs, adapters=case, output_router_logits=True).router_logits
    with torch.no_grad():
        expected = tiny.merged_model(case)(**inputs, output_router_logits=True).router_logits
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, torch.float32)


def test_assisted_decoding_with_a_plain_draft_equals_the_merged_model() -> None:
    inputs = {key: value[-1:] for key, value in prompts(1).items()}
    case = f"{QWEN}experts"
    draft = tiny.new_model("qwen3_moe")
    options: dict[str, Any] = {"assistant_model": draft, "output_logits": False}
    found = generate(graft_of("qwen3_moe"), inputs, adapters=case, **options)
    expected = generate(tiny.merged_model(case), inputs)
    assert torch.equal(found.sequences, expected.sequences)


def test_input_ids_may_be_positional() -> None:
    inputs, rows = prompts(2), [None, f"{QWEN}router"]
    graft = graft_of("qwen3_moe")
    mask = inputs["attention_mask"]
    found = graft.forward(inputs["input_ids"], attention_mask=mask, adapters=rows).logits
    assert_bit_equal(found, graft.forward(**inputs, adapters=rows).logits)


def test_rows_with_gradients_enabled_give_the_same_logits() -> None:
    inputs, rows = prompts(2), [None, f"{QWEN}all_linear"]
    graft = graft_of("qwen3_moe")
    with graft.rows(rows, 2):
        found = graft.model(**inputs).logits
    assert found.requires_grad
    assert_bit_equal(found.detach(), graft.forward(**inputs, adapters=rows).logits)


def test_every_step_of_a_chunked_prefill_finds_its_rows() -> None:
    rows = [f"{QWEN}experts", None]
    inputs = prompts(2)
    graft = graft_of("qwen3_moe")
    found = generate(graft, inputs, adapters=rows, prefill_chunk_size=3)
    assert torch.equal(found.sequences, generate(graft, inputs, adapters=rows).sequences)
