"""Tiny models with adapters attached, and what their rows must equal: merged models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import moegraft
import tiny
from moegraft.graphs import StepRunner
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_close

#: Adapters of different versions, layouts, ranks and targets for one model.
LOADED = {
    name: [case for case in tiny.SERVED_CASES if tiny.model_of(case) == name]
    for name in tiny.MODELS
}
#: Rows of a mixed batch: base rows between adapters, one adapter on two rows.
ROWS: dict[str, list[str | None]] = {
    "qwen3_moe": [
        None,
        "peft/0.21.2/qwen3_moe/experts",
        "peft/0.21.2/qwen3_moe/all_linear",
        None,
        "per_expert/qwen3_moe/gate_only",
        "peft/0.21.2/qwen3_moe/experts",
        "peft/0.18.0/qwen3_moe/router",
        "peft/0.21.2/qwen3_moe/patterns",
    ],
    "mixtral": [
        "peft/0.19.0/mixtral/experts",
        None,
        "per_expert/mixtral/subset",
        "per_expert/mixtral/rank_pattern_gate",
        "peft/0.21.2/mixtral/all_linear",
    ],
    "olmoe": [f"peft/{v}/olmoe/experts" for v in ("0.18.0", "0.21.2")] + [None],
    "gpt_oss": [None, *(f"peft/{v}/gpt_oss/experts" for v in ("0.19.0", "0.21.2"))],
}
NEW_TOKENS = 6


def new_graft(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Graft:
    """A fresh attached model without adapters."""
    return moegraft.attach(tiny.new_model(name, dtype), **{"max_adapters": 8, **options})


def load_cases(graft: Graft, cases: Sequence[str]) -> None:
    """Load each case under its own name."""
    for case in cases:
        graft.load(case, tiny.folder(case))


@cache
def graft_of(name: str, dtype: torch.dtype = torch.float32) -> Graft:
    """An attached model with every served case of it loaded; load nothing else into it."""
    graft = new_graft(name, dtype)
    load_cases(graft, LOADED[name])
    return graft


def static_graft(name: str = "qwen3_moe", **options: Any) -> Graft:
    """A graft that decodes on static memory, each step run by StepRunner: graphs need a GPU."""
    graft = new_graft(name, **options)
    load_cases(graft, LOADED[name])
    graft._use_graphs(StepRunner)
    return graft


def greedy(graft: Graft, inputs: dict[str, torch.Tensor], rows: Any, count: int) -> torch.Tensor:
    """Prompts and ``count`` most likely tokens, by one forward over everything per token."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for _ in range(count):
        logits = graft.forward(input_ids=ids, attention_mask=mask, adapters=rows).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


def prompts(num_rows: int, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 64, (num_rows, length), generator=generator)
    mask = torch.ones_like(input_ids)
    for row in range(num_rows):
        pad = row % (length - 2)
        input_ids[row, :pad] = 0
        mask[row, :pad] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def row_of(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row of a batch, still padded."""
    return {key: value[row : row + 1] for key, value in inputs.items()}


def model_for(case: str | None, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The plain model that a row with this adapter must equal."""
    return tiny.base_model(name, dtype) if case is None else tiny.merged_model(case, dtype)


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """Greedy generation of a fixed number of tokens, with the logits of each step."""
    defaults: dict[str, Any] = dict(
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return model.generate(**inputs, **{**defaults, **options})


def assert_rows_equal_merged(
    graft: Graft,
    rows: Sequence[str | None],
    inputs: dict[str, torch.Tensor],
    **options: Any,
) -> None:
    """Every row of a generate gives the tokens and logits of its own merged model."""
    name = graft.model.config.model_type
    found = generate(graft, inputs, adapters=rows, **options)
    logits = torch.stack(found.logits, 1)  # [rows, steps, vocab]
    per_row = logits.shape[0] // len(rows)
    sequences = found.sequences.shape[0] // len(rows)
    for row, case in enumerate(rows):
        expected = generate(model_for(case, name), row_of(inputs, row), **options)
        mine = found.sequences[row * sequences : (row + 1) * sequences]
        assert torch.equal(mine, expected.sequences), (row, case)
        if "num_beams" not in options:
            got = logits[row * per_row : (row + 1) * per_row]
            assert_close(got, torch.stack(expected.logits, 1), torch.float32)
