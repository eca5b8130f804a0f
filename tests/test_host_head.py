"""LoRA on the output head: rows of a batch as their merged models say, under every name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from moegraft.adapters import ReadOptions, bind, check_bound, make_source
from moegraft.adapters.merge import merge
from moegraft.errors import AdapterError
from moegraft.testing import assert_bit_equal, assert_close, relative_error
from tiny import EXPERTS
from tiny_grafts import generate, load_cases, new_graft, prompts, row_of, static_graft

CONFIG = {"r": 3, "lora_alpha": 6}
NAMES = ["lm_head", "model.unembed_tokens", "base_model.model.lm_head"]


def head_factors(name: str = "lm_head", seed: int = 0) -> dict[str, torch.Tensor]:
    """Random factors of a head 24 -> 64."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (0.3 * torch.randn(*shape, generator=generator) for shape in ((3, 24), (64, 3)))
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


def merged_head(model: str) -> Any:
    """The model with those factors in its head."""
    merged, factors = tiny.new_model(model), head_factors()
    with torch.no_grad():
        merged.lm_head.weight += (
            2 * factors["lm_head.lora_B.weight"] @ factors["lm_head.lora_A.weight"]
        )
    return merged


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_rows_with_a_head_of_their_own_generate_as_their_merged_model(
    model: str, name: str
) -> None:
    graft = new_graft(model)
    report = graft.load_tensors("head", head_factors(name), CONFIG).report
    assert [site.site for site in report.sites] == ["lm_head"]
    inputs = prompts(3)
    found = generate(graft, inputs, adapters=["head", None, "head"])
    logits = torch.stack(found.logits, 1)
    for row, expected_model in enumerate(
        (merged_head(model), tiny.base_model(model), merged_head(model))
    ):
        expected = generate(expected_model, row_of(inputs, row))
        assert torch.equal(found.sequences[row : row + 1], expected.sequences)
        assert_close(logits[row : row + 1], torch.stack(expected.logits, 1), torch.float32)


@pytest.mark.parametrize("keep", [1, 3])
def test_logits_of_the_last_tokens_only_have_the_delta_too(keep: int) -> None:
    graft = new_graft("qwen3_moe")
    graft.load_tensors("head", head_factors(), CONFIG)
    inputs = prompts(4)
    rows = ["head", None, None, "head"]
    whole = graft.forward(**inputs, adapters=rows).logits[:, -keep:]
    last = graft.forward(**inputs, adapters=rows, logits_to_keep=keep).logits
    assert_close(last, whole, torch.float32)
    base = graft.forward(**inputs, logits_to_keep=keep).logits
    assert_bit_equal(last[1:3], base[1:3])
    assert relative_error(last[::3], base[::3]) > 0.01


def test_decode_steps_on_static_memory_have_the_delta_too() -> None:
    graft = static_graft()
    graft.load_tensors("head", head_factors(), CONFIG)
    inputs, rows = prompts(3), ["head", None, EXPERTS]
    found = generate(graft, inputs, adapters=rows, graphs=True)
    eager = generate(graft, inputs, adapters=rows, graphs=False)
    assert torch.equal(found.sequences, eager.sequences)
    assert_close(torch.stack(found.logits), torch.stack(eager.logits), torch.float32)


def test_a_file_that_peft_wrote_for_the_head_gives_pefts_logits(tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["lm_head"])
    peft_model = get_peft_model(tiny.new_model("qwen3_moe"), config).eval()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    peft_model.save_pretrained(tmp_path)
    assert any("lm_head" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    graft = new_graft("qwen3_moe")
    with pytest.raises(AdapterError, match=r"base_layer\.weight: it is a base weight, which PEFT"):
        graft.load("head", tmp_path)
    graft.load("head", tmp_path, ReadOptions(skip=(r"base_layer\.weight",)))
    load_cases(graft, [EXPERTS])
    inputs = prompts(2)
    found = graft.forward(**inputs, adapters=["head", EXPERTS]).logits
    with torch.no_grad():
        expected = peft_model(**row_of(inputs, 0)).logits
    mask = inputs["attention_mask"][0].bool()
    assert_close(found[0][mask], expected[0][mask], torch.float32)


def test_a_head_merges_into_its_own_weight(tmp_path: Path) -> None:
    spec = tiny.spec_of("qwen3_moe")
    bound = bind(make_source(head_factors(), CONFIG), spec)
    merge(tiny.FIXTURES / "models" / "qwen3_moe", bound, spec, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert relative_error(found.lm_head.weight, merged_head("qwen3_moe").lm_head.weight) <= 1e-6


def test_full_tensors_of_the_head_are_still_refused() -> None:
    tensors = {**head_factors(), "lm_head.weight": torch.ones(64, 24)}
    spec = tiny.spec_of("qwen3_moe")
    with pytest.raises(AdapterError, match=r"lm_head\.weight: it is a full tensor"):
        check_bound(bind(make_source(tensors, CONFIG), spec).report, spec)
