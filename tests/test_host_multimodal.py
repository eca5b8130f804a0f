"""A model with a vision tower: text adapters bind through any prefix, vision keys never do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import moegraft
import tiny
from moegraft.adapters import bind, make_source
from moegraft.errors import AdapterError
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_close
from tiny_grafts import prompts

TEXT: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=12,
    intermediate_size=16,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
)
VISION: dict[str, Any] = dict(
    depth=2,
    hidden_size=24,
    intermediate_size=24,
    num_heads=2,
    out_hidden_size=24,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0],
)


def build() -> Any:
    """A tiny Qwen3-VL-MoE; its text config names no architecture."""
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=TEXT, vision_config=VISION)
    assert config.text_config.architectures is None
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


@cache
def graft_of() -> Graft:
    """The model with moegraft attached."""
    return moegraft.attach(build())


def text_adapter(prefix: str) -> dict[str, torch.Tensor]:
    """The fixture adapter's factors for the experts under another prefix."""
    tensors = tiny.tensors_of("peft/0.21.2/qwen3_moe/experts")
    return {
        key.replace("base_model.model.model.", prefix): tensor
        for key, tensor in tensors.items()
        if "experts" in key
    }


CONFIG = {"r": 3, "lora_alpha": 6, "peft_version": "0.21.2"}


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.model.language_model.", "base_model.model.model.", "language_model.model."],
)
def test_a_text_adapter_binds_through_any_prefix_and_equals_the_merged_model(prefix: str) -> None:
    graft, inputs = graft_of(), prompts(2)
    info = graft.load_tensors(prefix, text_adapter(prefix), CONFIG)
    assert info.report.bound == info.report.total == 8
    plain = build()
    bound = bind(make_source(text_adapter(prefix), CONFIG), graft.spec)
    with torch.no_grad():
        base = plain(**inputs).logits
        for key, delta in tiny.all_deltas(bound, graft.spec).items():
            plain.get_parameter(key).add_(delta)
        expected = plain(**inputs).logits
    found = graft.forward(**inputs, adapters=[prefix, None]).logits
    assert_close(found[0], expected[0], torch.float32)
    real = inputs["attention_mask"][1].bool()
    assert_close(found[1][real], base[1][real], torch.float32)


def test_no_module_of_the_vision_tower_is_a_site() -> None:
    assert graft_of().spec.sites
    assert all("visual" not in site.name for site in graft_of().spec.sites)


@pytest.mark.parametrize(
    "path",
    [
        "model.visual.blocks.1.mlp.linear_fc1",
        "visual.blocks.1.attn.proj",
        "model.visual.layers.1.self_attn.q_proj",
        "vision_model.encoder.layers.1.self_attn.q_proj",
    ],
)
def test_vision_keys_beside_text_keys_are_refused_by_name(path: str) -> None:
    graft = graft_of()
    tensors = {
        **text_adapter("base_model.model.model."),
        f"base_model.model.{path}.lora_A.weight": torch.ones(3, 24),
        f"base_model.model.{path}.lora_B.weight": torch.ones(24, 3),
    }
    with pytest.raises(AdapterError, match="another tower") as caught:
        graft.load_tensors("both", tensors, CONFIG)
    assert f"{path}.lora_A.weight" in str(caught.value)
    assert "both" not in graft.store
