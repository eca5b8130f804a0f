"""DoRA and biases of lora_B in generation: eager and on static memory, as the merged models do."""

from __future__ import annotations

import pytest
import torch

from tiny import EXPERTS, VECTOR_CASES
from tiny_grafts import (
    assert_rows_equal_merged,
    generate,
    load_cases,
    new_graft,
    prompts,
    static_graft,
)

DORA, BIAS, GPT_BIAS = VECTOR_CASES
ROWS = [DORA, None, BIAS, EXPERTS, DORA]


@pytest.mark.parametrize("fuse", [False, True])
def test_a_mixed_batch_generates_what_its_merged_models_do(fuse: bool) -> None:
    graft = new_graft("qwen3_moe", fuse_linears=fuse)
    load_cases(graft, [DORA, BIAS, EXPERTS])
    assert_rows_equal_merged(graft, ROWS, prompts(len(ROWS)))
    assert_rows_equal_merged(graft, [DORA, BIAS], prompts(2), num_beams=2)


def test_a_model_with_biases_generates_what_its_merged_model_does() -> None:
    graft = new_graft("gpt_oss")
    load_cases(graft, [GPT_BIAS])
    assert_rows_equal_merged(graft, [GPT_BIAS, None], prompts(2))


def test_decode_steps_on_static_memory_follow_adapters_that_come_and_go() -> None:
    graft = static_graft()
    inputs = prompts(len(ROWS))
    plain = generate(graft, inputs, adapters=[None, EXPERTS, None, None, EXPERTS], graphs=True)
    load_cases(graft, [DORA, BIAS])
    assert_rows_equal_merged(graft, ROWS, inputs)  # on static memory by default there
    graft.unload(DORA)
    graft.unload(BIAS)
    again = generate(graft, inputs, adapters=[None, EXPERTS, None, None, EXPERTS], graphs=True)
    assert torch.equal(again.sequences, plain.sequences)
    assert all(map(torch.equal, again.logits, plain.logits))
